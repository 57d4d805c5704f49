"""Child processes of the launcher: each with a log, a parent's care, and an end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Run in between, so that the kernel ends the child when the launcher is killed; the setting
# survives exec. A preexec_fn would do the same but is unsafe beside the threads of the S3 client.
_GUARD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A running program of the job."""

    process: "subprocess.Popen[bytes]"
    log: Path

    @classmethod
    def start(
        cls, module: str, arguments: Sequence[str], *, log: Path, env: Mapping[str, str]
    ) -> "Child":
        """Start `python -m module` in a session of its own: Ctrl-C is the launcher's to handle."""
        command = [sys.executable, "-u", "-m", module, *arguments]
        with log.open("ab") as output:
            process = subprocess.Popen(
                guarded(command),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process=process, log=log)

    @property
    def pid(self) -> int:
        """Process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def last_line(self) -> str:
        """What it said last."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "it said nothing"


def guarded(command: Sequence[str]) -> list[str]:
    """The command as a child that gets SIGTERM when the thread that starts it ends."""
    return [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]


def end_all(children: Iterable[Child], *, timeout_s: float) -> None:
    """SIGTERM to all, SIGKILL to those that are left after `timeout_s`."""
    living = [child for child in children if child.exit_code is None]
    for child in living:
        child.send(signal.SIGTERM)
    wait_all(living, timeout_s=timeout_s)
    for child in living:
        if child.exit_code is None:
            child.send(signal.SIGKILL)
            child.process.wait()


def wait_all(children: Iterable[Child], *, timeout_s: float) -> None:
    """Wait until all have ended or the time is over."""
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(deadline - time.monotonic(), 0))


def free_ports(number: int) -> list[int]:
    """Loopback ports that nobody listens on, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
