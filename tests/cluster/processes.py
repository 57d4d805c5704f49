"""Server processes of one test cluster: started, ended, and never left behind.

A watchdog process ends them and removes what they leave also when the owner was killed. It knows
them by a variable in their environment, so threads, restarts and their own children need no
bookkeeping.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

ENV_MARK: Final = "OMNI_TEST_CLUSTER_STATE"
"""In the environment of everything that a test cluster started: its state folder."""
STOP_S: Final = 10.0

_AT_END: Final = "at-end.jsonl"
_FIRST_PORT: Final = 22_000
_LAST_PORT: Final = 32_000  # below Linux's ephemeral ports, which any client may hold

# The owner alone holds the other end of standard input, so the end of file says that it is gone.
# A fork may not have reached its exec yet: only the second empty look in a row counts.
# What is removed may be busy for a moment longer than the processes that held it.
_WATCHDOG = """
import json, os, shutil, signal, subprocess, sys, time
mark, folder, at_end = sys.argv[1].encode(), sys.argv[2], sys.argv[3]
sys.stdin.buffer.read()
empty = 0
while empty < 2:
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(pid), signal.SIGKILL)
                    found += 1
        except OSError:
            pass
    empty = 0 if found else empty + 1
    time.sleep(0.1)
if os.path.exists(at_end):
    for line in reversed(open(at_end).readlines()):
        tries = 50
        while tries and subprocess.run(json.loads(line), capture_output=True).returncode:
            tries -= 1
            time.sleep(0.1)
shutil.rmtree(folder, ignore_errors=True)
"""


def free_port() -> int:
    """A loopback port that nothing listens on, drawn at random so that two callers differ."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port


class Processes:
    """Context manager over the processes of one cluster and the temporary folder they write to.

    The folder is made in `parent`, by default where temporary files go.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self.folder: Path = Path()
        """State of the cluster; removed at the end, however the end comes."""
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="omni-cluster-", dir=self._parent))
        mark = f"{ENV_MARK}={self.folder}"
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _WATCHDOG, mark, self.folder, self.folder / _AT_END],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal is the owner's to handle
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in reversed(list(self._running)):  # clients before the servers they talk to
            self.stop(name)
        assert self._watchdog is not None and self._watchdog.stdin is not None
        self._watchdog.stdin.close()
        self._watchdog.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run_at_end(self, *command: str | Path) -> None:
        """Have this run, last come first, once all processes are gone, however the end comes; again
        where it fails, for some seconds. For what a dead process leaves: links, cgroups."""
        with (self.folder / _AT_END).open("a") as file:
            file.write(json.dumps([str(word) for word in command]) + "\n")

    def start(
        self, name: str, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> int:
        """Run a program until `stop` or the end, and return its pid. Its output goes to `log`."""
        self._commands[name] = ([str(word) for word in command], dict(env or {}))
        return self.start_again(name)

    def start_again(self, name: str) -> int:
        """Run the program once more as it was last run."""
        assert name not in self._running, f"{name} is running already"
        command, env = self._commands[name]
        with self.log(name).open("ab") as output:
            self._running[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **env, ENV_MARK: str(self.folder)},
                start_new_session=True,
            )
        return self._running[name].pid

    def pid(self, name: str) -> int:
        """Of a program that runs, or ended by itself."""
        return self._running[name].pid

    def stop(self, name: str, *, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """End one process, wait until it is gone, and return its exit status."""
        process = self._running.pop(name)
        if process.poll() is None:
            process.send_signal(with_signal)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def log(self, name: str) -> Path:
        """Where the process of this name writes."""
        return self.folder / f"{name}.log"

    def has_ended(self, name: str) -> bool:
        """Whether the program ended by itself."""
        process = self._running.get(name)
        return process is not None and process.poll() is not None

    def check(self, name: str) -> None:
        """Raise where the program ended by itself, with the last lines of its log."""
        if self.has_ended(name):
            raise RuntimeError(
                f"{name} ended with status {self._running[name].returncode}; its last lines: "
                f"{last_lines(self.log(name))}"
            )


def last_lines(log: Path, num_lines: int = 15) -> str:
    """The end of a log, for an error message."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-num_lines:]) or "(nothing)"
