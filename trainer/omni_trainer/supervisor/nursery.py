"""Ranks forked from one process that has imported everything.

Importing torch and megatron takes seconds of CPU on every rank; a restart would pay them again.
The nursery imports once, then forks ranks on order. It never touches a GPU and has one thread, so
the fork is safe. To the program a forked rank looks as if started with `python -m MODULE`.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_trainer.supervisor.reaper import die_with_parent

_MAX_ORDER_BYTES = 1 << 17


class Nursery:
    """The supervisor's end: starts ranks and learns how they ended."""

    def __init__(self, *, preload: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start the process. `preload`: modules, or MODULE:FUNCTION to call. `env` is
        added to its environment: what imports read, such as OMP_NUM_THREADS.
        """
        self._preload, self._log, self._env = preload, log, env
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __spec__.name, str(there.fileno()), *preload],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[there.fileno()],
            )
        self._socket = here
        self._exits: dict[int, int] = {}
        self._started: list[int] = []

    @property
    def pid(self) -> int:
        """Process id of the nursery itself."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once it is gone, and with it every rank."""
        return self._process.poll() is None

    def start(self, *, module: str, env: Mapping[str, str], log: str) -> int:
        """Fork a rank that runs `module` as main program; waits for the imports. Returns its pid.

        Raises ConnectionError where the nursery is gone.
        """
        order = json.dumps({"module": module, "env": dict(env), "log": log}).encode()
        if len(order) > _MAX_ORDER_BYTES:
            raise ValueError(f"the environment of a rank takes {len(order)} bytes")
        self._socket.send(order)
        while True:
            answer = self._receive()
            if "started" in answer:
                pid = int(answer["started"])
                self._started.append(pid)
                return pid

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a rank, negative for a signal; None while it runs."""
        with contextlib.suppress(OSError):
            while pid not in self._exits and select.select([self._socket], [], [], 0)[0]:
                self._receive()
        if not self.is_alive:
            return self._exits.get(pid, -signal.SIGKILL)
        return self._exits.get(pid)

    def reborn(self) -> "Nursery":
        """Another nursery like this one, which is gone."""
        self.close()
        return Nursery(preload=self._preload, log=self._log, env=self._env)

    def close(self) -> None:
        """End the nursery and every rank."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _receive(self) -> dict[str, Any]:
        raw = self._socket.recv(_MAX_ORDER_BYTES)
        if not raw:
            raise ConnectionError("the nursery is gone")
        answer: dict[str, Any] = json.loads(raw)
        if "ended" in answer:
            self._exits[int(answer["ended"])] = int(answer["exit"])
        return answer


def main() -> None:
    """Preload, then serve until the supervisor is gone."""
    parent = os.getppid()
    die_with_parent(parent)
    orders = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the supervisor
    for item in sys.argv[2:]:
        module, _, function = item.partition(":")
        try:
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
        except Exception:  # the rank will meet it again and be blamed for it
            traceback.print_exc()
    gc.collect()
    gc.freeze()  # or every rank's collector writes to, and so copies, all that they share
    order = _serve(orders)
    if order is not None:
        _run(order)


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork on every order. Returns None at the end, and in each forked child its order."""
    nursery = os.getpid()
    alive: dict[int, int] = {}  # pidfd -> pid
    while True:
        ready, _, _ = select.select([orders.fileno(), *alive], [], [])
        for pidfd in alive.keys() & ready:
            pid = alive.pop(pidfd)
            os.close(pidfd)
            _, status = os.waitpid(pid, 0)
            exit_code = os.waitstatus_to_exitcode(status)
            orders.send(json.dumps({"ended": pid, "exit": exit_code}).encode())
        if orders.fileno() in ready:
            raw = orders.recv(_MAX_ORDER_BYTES)
            if not raw:
                return None
            pid = os.fork()
            if pid == 0:
                die_with_parent(nursery)
                os.setsid()  # one kill of the session's group takes what the rank started, too
                orders.close()
                for pidfd in alive:
                    os.close(pidfd)
                order: dict[str, Any] = json.loads(raw)
                return order
            alive[os.pidfd_open(pid)] = pid
            orders.send(json.dumps({"started": pid}).encode())


def _run(order: dict[str, Any]) -> None:
    """Become the rank."""
    output = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(order["env"])
    module = order["module"]
    sys.argv = [module]
    sys.modules.pop(module, None)  # it runs again, as __main__; what it imports stays
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as exc:
        _leave_error(exc)
        raise


def _leave_error(exc: Exception) -> None:
    """Write the error file as torch's `record` does, without a need for torch."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(exc).__name__}: {exc}", "extraInfo": extra}
        Path(path).write_text(json.dumps({"message": message}))


if __name__ == "__main__":
    main()
