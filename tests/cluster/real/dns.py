"""CoreDNS, a process on the host: it answers pods for the names of services and of other pods."""

from typing import Final

from tests.cluster import binaries
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import Processes
from tests.cluster.real import settings

_USER: Final = "coredns"
_RBAC: Final = "rbac.authorization.k8s.io"
_READ: Final = ["list", "watch"]
_RULES: Final = [
    {"apiGroups": [""], "resources": ["namespaces", "pods", "services"], "verbs": _READ},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": _READ},
]


def start_dns(processes: Processes, control_plane: ControlPlane, address: str) -> None:
    """Run it at port 53 of this address, with the rights that it needs."""
    meta = {"name": _USER}
    role = {"rules": _RULES, "metadata": meta}
    binding = {
        "metadata": meta,
        "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _USER},
        "subjects": [{"apiGroup": _RBAC, "kind": "User", "name": _USER}],
    }
    control_plane.api.create(f"/apis/{_RBAC}/v1/clusterroles", role)
    control_plane.api.create(f"/apis/{_RBAC}/v1/clusterrolebindings", binding)
    kubeconfig = control_plane.issue_kubeconfig(_USER, f"/CN={_USER}")
    config = processes.folder / "Corefile"
    config.write_text(settings.corefile(address=address, kubeconfig=kubeconfig))
    processes.start("coredns", [binaries.path("coredns"), "-conf", config])
