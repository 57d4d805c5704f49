"""The operator under test as a process of its own, with the rights and arguments of the chart."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.cluster.api import wait_for
from tests.cluster.chart import Installed, install_chart, uninstall_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import free_port


class OperatorProcess:
    """One operator. Tests end it and start it again as they like."""

    def __init__(self, control_plane: ControlPlane, installed: Installed, name: str) -> None:
        self.installed = installed
        """What the chart set up for it."""
        self.name = name
        """Among the processes of the control plane."""
        self._processes = control_plane.processes

    @property
    def user(self) -> str:
        """Its name in the API server's audit log."""
        installed = self.installed
        return f"system:serviceaccount:{installed.namespace}:{installed.service_account}"

    @property
    def log(self) -> str:
        """What it said so far, over all its starts."""
        return self._processes.log(self.name).read_text(errors="replace")

    def has_ended(self) -> bool:
        """Whether it ended by itself."""
        return self._processes.has_ended(self.name)

    def leads(self) -> bool:
        """Whether it began to lead at its last start or at one before."""
        return "Leading." in self.log

    def kill(self) -> None:
        """End it where it stands (SIGKILL). Its Lease stays held for up to 15 s."""
        self._processes.stop(self.name, with_signal=signal.SIGKILL)

    def stop(self) -> None:
        """Ask it to end (SIGTERM), and wait until it has."""
        self._processes.stop(self.name)

    def keep(self) -> None:
        """Start it again where it ended by itself, as a kubelet does."""
        if self.has_ended():
            self._processes.stop(self.name)
            self._processes.start_again(self.name)

    def start_again(self) -> None:
        """Run it once more."""
        self._processes.start_again(self.name)


@contextlib.contextmanager
def running_operator(
    control_plane: ControlPlane,
    namespace: str,
    *,
    values: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
) -> Iterator[OperatorProcess]:
    """Run an operator for the jobs of this namespace, installed in it; `values` of the chart may
    say otherwise, and `arguments` are added to those that the chart gives."""
    installed = install_chart(
        control_plane, namespace, {"watchNamespace": namespace, **(values or {})}
    )
    operator = OperatorProcess(control_plane, installed, f"operator-{namespace}")
    module = [sys.executable, "-m", "omni_operator.main"]
    control_plane.processes.start(
        operator.name,
        [*module, *installed.arguments, f"--port={free_port()}", *arguments],
        env={"KUBECONFIG": str(installed.kubeconfig)},
    )
    try:
        wait_for(lambda: operator.leads() or operator.has_ended(), "the operator leading")
        control_plane.processes.check(operator.name)
        yield operator
    finally:
        print(operator.log)  # pytest shows it where the test fails
        with contextlib.suppress(KeyError):  # killed by the test and not started again
            operator.stop()
        uninstall_chart(control_plane, installed)
