"""A whole Kubernetes on one machine: control plane, DNS and real nodes, until the end of a `with`.

Each node is a machine made of namespaces. Needs root and some of Debian's packages.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.nodes import Grid
from tests.cluster.processes import Processes
from tests.cluster.real import settings
from tests.cluster.real.cgroups import make_cgroups
from tests.cluster.real.dns import start_dns
from tests.cluster.real.images import share_images, write_tiny_image
from tests.cluster.real.machine import Machine
from tests.cluster.real.network import Network, build_bridge
from tests.cluster.real.node import RealNode
from tests.cluster.real.requirements import require

_PATIENCE_S: Final = 10.0


class RealCluster:
    """Context manager around the running cluster. All attributes are valid inside it.

    `archives` are the images that pods may use, beside a tiny one: files that `ctr images import`
    reads. They are imported once, whatever the number of nodes. All state goes below
    `state_dir`, by default where temporary files go. The nodes say that they have `gpus`, and are
    of one rack.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        *,
        nodes: int = 3,
        gpus: int = 8,
        archives: Sequence[Path] = (),
    ) -> None:
        self._state_dir = state_dir and state_dir.absolute()
        self._specs = [*Grid(nodes=nodes, gpus=gpus)]
        self._archives = archives
        self.control_plane: ControlPlane
        """With the API server that nodes and pods reach, too."""
        self.nodes: Mapping[str, RealNode] = {}
        """By name."""

    def __enter__(self) -> Self:
        if self._state_dir is not None:
            self._state_dir.mkdir(parents=True, exist_ok=True)
        require(self._state_dir or Path(tempfile.gettempdir()), user_id=os.geteuid())
        with contextlib.ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def partition(self, node: str, *, api_only: bool = False) -> None:
        """Cut a node off: wholly, or from the API server alone, so that S3 and other nodes stay."""
        if api_only:
            self.nodes[node].partition_from_api()
        else:
            self.nodes[node].partition()

    def heal(self, node: str) -> None:
        """Undo `partition`. The node is Ready some seconds later."""
        self.nodes[node].heal()

    def save_logs(self, folder: Path) -> None:
        """Keep what all processes said: all else is gone after the end."""
        folder.mkdir(parents=True, exist_ok=True)
        for processes in (self._processes, self.control_plane.processes):
            for log in processes.folder.glob("*.log"):
                shutil.copy(log, folder)

    def _start(self, stack: contextlib.ExitStack) -> None:
        self._processes = processes = stack.enter_context(Processes(self._state_dir))
        network = build_bridge(processes, len(self._specs))
        make_cgroups(processes, network.bridge, [spec.name for spec in self._specs])
        options = Options(
            address=network.gateway,
            kwok=False,
            heartbeat_s=settings.HEARTBEAT_S,
            node_monitor_grace_s=settings.GRACE_S,
            patience_s=_PATIENCE_S,
            state_dir=self._state_dir,
        )
        self.control_plane = stack.enter_context(ControlPlane(options))
        start_dns(processes, self.control_plane, network.gateway)
        nodes = self._boot(stack, processes, network)
        self._share_images(nodes)
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_until_ready()
        processes.check("coredns")
        self.nodes = {node.name: node for node in nodes}

    def _boot(
        self, stack: contextlib.ExitStack, processes: Processes, network: Network
    ) -> list[RealNode]:
        nodes = []
        for index, spec in enumerate(self._specs, start=1):
            folder = processes.folder / spec.name
            machine = Machine(processes, network, index, spec.name, folder)
            machine.boot()
            stack.callback(machine.power_off)
            nodes.append(
                RealNode(machine, self.control_plane, network, gpus=spec.gpus, labels=spec.labels)
            )
        return nodes

    def _share_images(self, nodes: Sequence[RealNode]) -> None:
        found = shutil.which("busybox")
        assert found is not None, "it was required"
        tiny = write_tiny_image(self._processes.folder / "tiny.tar", Path(found))
        first, *others = nodes
        first.import_images([tiny, *self._archives])
        share_images(first.containerd_root, [node.containerd_root for node in others])
