"""Two operators that share a Lease, each started again where it ends, as their Deployment would."""

import contextlib
import signal
import sys
import threading
import time
import urllib.request
from types import TracebackType
from typing import Final, Self

from tests.cluster.chart import Installed
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import free_port

_LOOK_S: Final = 1.0


class OperatorPair:
    """Context manager around two processes of the operator with the chart's rights."""

    names: Final = ("operator-a", "operator-b")
    """Among the processes of the control plane."""

    def __init__(self, control_plane: ControlPlane, installed: Installed) -> None:
        self._processes = control_plane.processes
        self._installed = installed
        self._ports = {name: free_port() for name in self.names}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        for name, port in self._ports.items():
            module = [sys.executable, "-m", "omni_operator.main"]
            self._processes.start(
                name,
                [*module, *self._installed.arguments, f"--port={port}"],
                env={"KUBECONFIG": str(self._installed.kubeconfig)},
            )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        for name in self.names:
            with contextlib.suppress(KeyError):
                self._processes.stop(name)

    def leader(self) -> str | None:
        """The one that leads now."""
        for name, port in self._ports.items():
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as page,
            ):
                if b"standing by" not in page.read():
                    return name
        return None

    def kill(self, name: str, *, down_s: float) -> None:
        """End one where it stands (SIGKILL), and start it again after a while."""
        with self._lock:
            self._processes.stop(name, with_signal=signal.SIGKILL)
        time.sleep(down_s)
        with self._lock:
            self._processes.start_again(name)

    def logs(self) -> dict[str, str]:
        """What each said so far, over all its starts."""
        return {name: self._processes.log(name).read_text(errors="replace") for name in self.names}

    def _keep(self) -> None:
        while not self._stop.wait(_LOOK_S):
            for name in self.names:
                with self._lock:
                    if self._processes.has_ended(name):
                        self._processes.stop(name)
                        self._processes.start_again(name)
