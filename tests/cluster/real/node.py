"""A real node: containerd, kubelet and kube-proxy on a machine of its own."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.cluster import binaries
from tests.cluster.api import wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import Nodes
from tests.cluster.real import settings
from tests.cluster.real.machine import Machine
from tests.cluster.real.network import Network

CONTAINERD: Final = "containerd"
KUBELET: Final = "kubelet"
KUBE_PROXY: Final = "kube-proxy"
SERVICES: Final = (CONTAINERD, KUBELET, KUBE_PROXY)

_KUBELET_PORT: Final = 10250
_KUBELET_ROOT: Final = Path("/var/lib/kubelet")
_OWN: Final = Path("/var/lib/omni")
"""Where its settings are."""
_START_S: Final = 30.0
_READY_S: Final = 120.0
_IMPORT_S: Final = 900.0
"""Of one archive, on a slow disk."""


class RealNode:
    """One node, on a machine that runs."""

    def __init__(
        self,
        machine: Machine,
        control_plane: ControlPlane,
        network: Network,
        *,
        gpus: int,
        labels: Mapping[str, str],
    ) -> None:
        self._machine = machine
        self._control_plane = control_plane
        self._network = network
        self._gpus = gpus
        self._labels = labels
        self._nodes = Nodes(control_plane)
        self._is_told = False
        self._old_heartbeat: str | None = None

    @property
    def name(self) -> str:
        """Of the node and of its machine."""
        return self._machine.name

    @property
    def containerd_root(self) -> Path:
        """Images and containers, as the host sees them."""
        return self._outside(settings.CONTAINERD_ROOT)

    def import_images(self, archives: Sequence[Path]) -> None:
        """Unpack archives by a containerd that runs for that alone. Minutes, for 5 GB."""
        self._start_containerd()
        for archive in archives:
            command = ("ctr", "--namespace=k8s.io", "images", "import", archive.absolute())
            self._machine.run(*command, timeout_s=_IMPORT_S)
        self._machine.kill(CONTAINERD)

    def start(self) -> None:
        """Run its services; it is Ready some seconds later."""
        pods = settings.pod_network(self._machine.subnet)
        self._write(settings.CNI_SETTINGS / "pods.conflist", pods)
        self._start_containerd()
        self._start_kubelet()
        self._start_kube_proxy()

    def kill(self, service: str) -> None:
        """End one of its services where it stands. Containers go on without any of them."""
        self._machine.kill(service)

    def start_again(self, service: str) -> None:
        """Bring it back."""
        if service == KUBELET:  # it may take the GPUs away when it registers the node again
            self._is_told = False
            self._old_heartbeat = self._heartbeat()
        self._machine.start_again(service)

    def partition(self) -> None:
        """Cut it off from everything."""
        self._machine.pull_cable_out()

    def partition_from_api(self) -> None:
        """Cut it and its pods off from the API server alone: DNS and other nodes stay."""
        self._machine.cut_off_from(
            self._network.gateway, port=self._control_plane.port, own_port=_KUBELET_PORT
        )

    def heal(self) -> None:
        """Undo either."""
        self._machine.heal()

    def wait_until_ready(self, timeout_s: float = _READY_S) -> None:
        """Wait until it is Ready, without the taints of a node that is not, and has its GPUs."""
        wait_for(self._tell, f"{self.name} registered", timeout_s)
        self._nodes.wait_until_ready(self.name, timeout_s=timeout_s)

    def wait_until_not_ready(self, timeout_s: float = _READY_S) -> None:
        """Wait until the node controller noticed that it is lost."""
        self._nodes.wait_until_not_ready(self.name, timeout_s=timeout_s)

    def volume(self, pod_uid: str, name: str) -> Path:
        """An emptyDir of a pod on it, as the host sees it; gone when the pod is."""
        pods = self._outside(_KUBELET_ROOT / "pods")
        return pods / pod_uid / "volumes" / "kubernetes.io~empty-dir" / name

    def log(self, service: str) -> Path:
        """Where one of its services writes."""
        return self._machine.log(service)

    def _tell(self) -> bool:
        """Give the node what a cloud and a device plugin would: labels and GPUs, anew each time
        that its kubelet has registered it."""
        for service in SERVICES:
            self._machine.check(service)
        if not self._is_told and self._heartbeat() not in (None, self._old_heartbeat):
            self._nodes.label(self.name, self._labels)
            self._nodes.set_gpus(self.name, capacity=self._gpus, allocatable=self._gpus)
            self._is_told = True
        return self._is_told

    def _heartbeat(self) -> str | None:
        """When a kubelet that had registered the node last told of it."""
        nodes = self._control_plane.api.list("/api/v1/nodes")
        found = [node["status"] for node in nodes if node["metadata"]["name"] == self.name]
        conditions = found[0].get("conditions", []) if found else []
        told = [one["lastHeartbeatTime"] for one in conditions if one["type"] == "Ready"]
        return told[0] if told else None

    def _start_containerd(self) -> None:
        config = self._write(_OWN / "containerd.toml", settings.containerd_toml())
        self._machine.start(CONTAINERD, ["containerd", f"--config={config}"])

        def answers() -> bool:
            self._machine.check(CONTAINERD)
            try:
                self._machine.run("ctr", "version")
            except RuntimeError:
                return False
            return True

        wait_for(answers, f"containerd of {self.name}", _START_S)

    def _start_kubelet(self) -> None:
        serving = self._control_plane.issue_certificate(
            f"{self.name}-serving", hosts=(f"IP:{self._machine.address}",)
        )
        kubelet = settings.KubeletSettings(
            address=self._machine.address,
            dns=self._network.gateway,
            cgroup=f"/{self._network.bridge}/{self.name}",
            ca_certificate=self._control_plane.ca_certificate,
            serving=serving,
        )
        config = self._write(_OWN / "kubelet.json", json.dumps(kubelet.document(), indent=1))
        user = f"/O=system:nodes/CN=system:node:{self.name}"
        kubeconfig = self._control_plane.issue_kubeconfig(self.name, user)
        self._machine.start(
            KUBELET,
            [
                binaries.path("kubelet"),
                f"--config={config}",
                f"--kubeconfig={kubeconfig}",
                f"--node-ip={self._machine.address}",
            ],
        )

    def _start_kube_proxy(self) -> None:
        user = "/CN=system:kube-proxy"
        kubeconfig = self._control_plane.issue_kubeconfig(f"{self.name}-proxy", user)
        self._machine.start(
            KUBE_PROXY,
            [
                binaries.path("kube-proxy"),
                f"--kubeconfig={kubeconfig}",
                "--proxy-mode=nftables",
                f"--cluster-cidr={self._network.all_pods}",
                "--metrics-bind-address=127.0.0.1:10249",
                # These belong to the whole machine, and only its own network may set them.
                "--conntrack-max-per-core=0",
                "--conntrack-min=0",
            ],
        )

    def _write(self, path: Path, text: str) -> Path:
        """Write a file, given its place on the node."""
        outside = self._outside(path)
        outside.parent.mkdir(parents=True, exist_ok=True)
        outside.write_text(text)
        return path

    def _outside(self, path: Path) -> Path:
        return self._machine.var / path.relative_to("/var")
