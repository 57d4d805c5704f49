"""Configuration files of containerd, the pod network, the kubelet and CoreDNS, as values.

A node has /run and /var of its own (`machine.py`), so their usual places are per node.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster.certificates import Certificate
from tests.cluster.real.images import PAUSE_IMAGE
from tests.cluster.real.requirements import CNI_PLUGINS

CONTAINERD_ROOT: Final = Path("/var/lib/containerd")
CONTAINERD_SOCKET: Final = Path("/run/containerd/containerd.sock")
CNI_SETTINGS: Final = Path("/var/lib/cni/net.d")
CLUSTER_DOMAIN: Final = "cluster.local"
HEARTBEAT_S: Final = 2
"""Of a kubelet, which renews its Lease at a quarter of the Lease's duration."""
GRACE_S: Final = 12
"""After which a silent node is NotReady."""

_CONTAINERD: Final = f"""\
version = 2

[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true  # some virtual machines allow none below that of containerd
  sandbox_image = "{PAUSE_IMAGE}"

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{CNI_PLUGINS}"
  conf_dir = "{CNI_SETTINGS}"
"""
_COREFILE: Final = """\
.:53 {{
    bind {address}
    errors
    kubernetes {domain} {{
        kubeconfig {kubeconfig}
        ttl 1
    }}
}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletSettings:
    """What differs between kubelets."""

    address: str
    dns: str
    cgroup: str
    """Such as /cluster/node."""
    ca_certificate: Path
    """Signs the certificates of those who may call it."""
    serving: Certificate

    def document(self) -> dict[str, Any]:
        """As the kubelet's --config holds it."""
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": "127.0.0.1",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(self.ca_certificate)},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(self.serving.certificate),
            "tlsPrivateKeyFile": str(self.serving.key),
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup,
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
            "clusterDNS": [self.dns],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": "",  # the host's servers are not for pods
            "nodeLeaseDurationSeconds": 4 * HEARTBEAT_S,
            # Nodes share one disk: how full it is says nothing about a node, and images that are
            # collected as garbage could not be pulled again.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
            },
        }


def containerd_toml() -> str:
    """The file config.toml, which is the same on every node."""
    return _CONTAINERD


def pod_network(subnet: str) -> str:
    """What gives pods their addresses, as containerd reads it: a bridge on each node."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}, indent=1)


def corefile(*, address: str, kubeconfig: Path) -> str:
    """CoreDNS's file: names of services and pods, and no others."""
    return _COREFILE.format(address=address, domain=CLUSTER_DOMAIN, kubeconfig=kubeconfig)
