"""First process of a machine's namespaces: gives it /run, /var and settings of its own, and reaps.

Started by path, with the standard library alone: machine_init.py NAME FOLDER, where FOLDER/var is
what becomes /var. Whoever dies here without a parent is this process's child; when it ends itself,
the kernel ends all the others.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Final

READY: Final = "ready"
"""File in FOLDER that says that the machine is up."""

KERNEL: Final = {
    "kernel/keys/root_maxbytes": 25_000_000,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
}
"""What a kubelet would set for all of the kernel, which is not ours to change. It finds it set."""


def set_up(name: str, folder: Path) -> None:
    """Make these namespaces look like a machine of this name."""
    socket.sethostname(name)
    _mount("--types=tmpfs", "tmpfs", "/run")
    for key, value in KERNEL.items():
        file = folder / key.replace("/", "-")
        file.write_text(f"{value}\n")
        _mount("--bind", str(file), f"/proc/sys/{key}")
    _mount("--bind", str(folder / "var"), "/var")
    (folder / READY).touch()


def reap() -> None:
    """Take note of the end of each child, for ever."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    set_up(sys.argv[1], Path(sys.argv[2]))
    reap()
