"""Simulated nodes: made in bulk with topology labels and GPUs, killed, revived, tainted, removed.

Nodes belong to the whole cluster, so a test that adds some takes them away again (`Nodes` does).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Final, Literal, Self

from tests.cluster.api import Api, ApiError, Object, concurrently, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kwok import LABEL_BEATING, LABEL_CARED

GPU: Final = "nvidia.com/gpu"
LABEL_REGION: Final = "topology.kubernetes.io/region"
LABEL_ZONE: Final = "topology.kubernetes.io/zone"
LABEL_CORE: Final = "network.topology.nvidia.com/core"
LABEL_SPINE: Final = "network.topology.nvidia.com/spine"
LABEL_LEAF: Final = "network.topology.nvidia.com/leaf"
LABEL_ACCELERATOR: Final = "network.topology.nvidia.com/accelerator"

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]

_NODES: Final = "/api/v1/nodes"
_LEASES: Final = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_PODS: Final = "/api/v1/pods"
_HEALTH_TAINTS: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_READY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One node to be."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Beside the host name, which every node has."""
    gpus: int = 8
    cpu: int = 128
    memory: str = "1Ti"
    pods: int = 110
    """The kubelet's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A regular cluster: zones of blocks of racks of nodes. Node names are NAME-z0-b0-r0-n0."""

    zones: int = 1
    blocks: int = 1
    """In each zone."""
    racks: int = 1
    """In each block."""
    nodes: int = 1
    """In each rack."""
    gpus: int = 8
    """Of each node."""
    region: str = "region-0"
    name: str = "node"
    """Begins the name of each node and domain; grids that stand side by side differ in it."""

    def __iter__(self) -> Iterator[NodeSpec]:
        for zone in range(self.zones):
            for block in range(self.blocks):
                for rack in range(self.racks):
                    for node in range(self.nodes):
                        yield self._node(zone, block, rack, node)

    def _node(self, zone: int, block: int, rack: int, node: int) -> NodeSpec:
        in_zone = f"{self.name}-z{zone}"
        in_block = f"{in_zone}-b{block}"
        in_rack = f"{in_block}-r{rack}"
        labels = {
            LABEL_REGION: self.region,
            LABEL_ZONE: in_zone,
            LABEL_CORE: in_zone,
            LABEL_SPINE: in_block,
            LABEL_LEAF: in_rack,
            LABEL_ACCELERATOR: in_rack,
        }
        return NodeSpec(name=f"{in_rack}-n{node}", labels=labels, gpus=self.gpus)


class Nodes:
    """Context manager over the nodes it added: those left at the end go, with their pods."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._api: Api = control_plane.api
        self._names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove(*self._names)

    @property
    def names(self) -> list[str]:
        """Of the nodes that were added and not removed, in order."""
        return list(self._names)

    def add(self, specs: Iterable[NodeSpec]) -> list[str]:
        """Create these nodes, such as a Grid; return their names once all are Ready."""
        names = concurrently(self._create, specs)
        self._names += names
        wait_for(lambda: all(map(_is_ready, self._get(names))), "new nodes Ready", _READY_S)
        # The node controller lifts the taint of new nodes at five a second, which is long for many.
        concurrently(self._lift_health_taints, self._get(names))
        return names

    def remove(self, *names: str) -> None:
        """Delete nodes as a cloud takes machines away: their pods are gone with them."""
        gone = set(names)
        concurrently(self.delete_object, names)
        pods = [pod for pod in self._api.list(_PODS) if pod["spec"].get("nodeName") in gone]
        concurrently(lambda pod: self._api.delete(_path_of_pod(pod), grace_s=0), pods)

    def delete_object(self, name: str) -> None:
        """Delete the node object alone; pods stay until the pod garbage collector finds them."""
        self._api.delete(f"{_LEASES}/{name}")
        self._api.delete(f"{_NODES}/{name}")
        self._names = [one for one in self._names if one != name]

    def kill(self, *names: str) -> None:
        """Cut the power. NotReady and unreachable come after the grace period, as in life."""
        concurrently(lambda name: self._set_cared(name, False), names)
        concurrently(lambda name: self._set_beating(name, False), names)

    def revive(self, *names: str) -> None:
        """Undo `kill`: the node is Ready again, deleted pods go, living ones are ready again."""
        concurrently(lambda name: self._set_beating(name, True), names)
        concurrently(lambda name: self._set_cared(name, True), names)
        self.wait_until_ready(*names)
        concurrently(self._ready_pods_again, names)

    def freeze_pods(self, *names: str) -> None:
        """Pods stay as they are, new ones Pending, deleted ones Terminating; the node is Ready."""
        concurrently(lambda name: self._set_cared(name, False), names)

    def thaw_pods(self, *names: str) -> None:
        """Undo `freeze_pods`."""
        concurrently(lambda name: self._set_cared(name, True), names)

    def flap(self, name: str, *, times: int) -> None:
        """Kill and revive the node this often; each time it is NotReady before it comes back."""
        for _ in range(times):
            self.kill(name)
            self.wait_until_not_ready(name)
            self.revive(name)

    def cordon(self, name: str) -> None:
        """Mark the node unschedulable, as `kubectl cordon` does."""
        self._patch(name, {"spec": {"unschedulable": True}})

    def uncordon(self, name: str) -> None:
        """Undo `cordon`."""
        self._patch(name, {"spec": {"unschedulable": None}})

    def taint(self, name: str, key: str, *, value: str = "", effect: Effect = "NoSchedule") -> None:
        """Add a taint, or change its value."""
        others = self._taints_without(name, key, effect)
        taint = {"key": key, "value": value, "effect": effect}
        self._patch(name, {"spec": {"taints": [*others, taint]}})

    def untaint(self, name: str, key: str, *, effect: Effect = "NoSchedule") -> None:
        """Take the taint away."""
        self._patch(name, {"spec": {"taints": self._taints_without(name, key, effect)}})

    def label(self, name: str, labels: Mapping[str, str | None]) -> None:
        """Set labels; None takes one away."""
        self._patch(name, {"metadata": {"labels": dict(labels)}})

    def set_gpus(self, name: str, *, capacity: int, allocatable: int) -> None:
        """What the device plugin reports; a failed GPU is in the capacity, but not allocatable."""
        status = {"capacity": {GPU: str(capacity)}, "allocatable": {GPU: str(allocatable)}}
        self._api.patch(f"{_NODES}/{name}/status", {"status": status})

    def set_condition(
        self, name: str, kind: str, status: str, reason: str, message: str = ""
    ) -> None:
        """Report a condition as an agent on the node does, such as a GPU health check."""
        condition = {"type": kind, "status": status, "reason": reason, "message": message}
        times = {"lastTransitionTime": now(), "lastHeartbeatTime": now()}
        body = {"status": {"conditions": [condition | times]}}
        self._api.patch(f"{_NODES}/{name}/status", body, kind="strategic")

    def is_ready(self, name: str) -> bool:
        """Whether the node's condition Ready is True."""
        return _is_ready(self._api.get(f"{_NODES}/{name}"))

    def wait_until_ready(self, *names: str, timeout_s: float = _READY_S) -> None:
        """Wait until all are Ready and without the taints of nodes that are not."""
        wait_for(lambda: all(map(_is_healthy, self._get(names))), "nodes Ready", timeout_s)

    def wait_until_not_ready(self, *names: str, timeout_s: float = _READY_S) -> None:
        """Wait until the node controller noticed: Ready is not True, nothing is scheduled there.

        The NoExecute taint comes later, one node in 10 s, and never where all nodes are lost.
        """

        def are_lost() -> bool:
            return all(_has_health_taint(node) and not _is_ready(node) for node in self._get(names))

        wait_for(are_lost, f"NotReady and tainted: {', '.join(names)}", timeout_s)

    def _create(self, spec: NodeSpec) -> str:
        labels = {
            "kubernetes.io/hostname": spec.name,
            "kubernetes.io/os": "linux",
            LABEL_CARED: "true",
        }
        resources = {
            "cpu": str(spec.cpu),
            "memory": spec.memory,
            "pods": str(spec.pods),
            **({GPU: str(spec.gpus)} if spec.gpus else {}),
        }
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": spec.name, "labels": labels | dict(spec.labels)},
            "status": {"capacity": resources, "allocatable": resources},
        }
        uid = self._api.create(_NODES, node)["metadata"]["uid"]
        owner = {"apiVersion": "v1", "kind": "Node", "name": spec.name, "uid": uid}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": spec.name,
                "labels": {LABEL_BEATING: "true"},
                "ownerReferences": [owner],
            },
            "spec": {
                "holderIdentity": spec.name,
                "leaseDurationSeconds": 40,
                "renewTime": now(),
            },
        }
        self._api.create(_LEASES, lease)
        return spec.name

    def _get(self, names: Iterable[str]) -> list[Object]:
        nodes = {node["metadata"]["name"]: node for node in self._api.list(_NODES)}
        return [nodes.get(name, {}) for name in names]

    def _lift_health_taints(self, node: Object) -> None:
        taints = node["spec"].get("taints", [])
        left = [taint for taint in taints if taint["key"] not in _HEALTH_TAINTS]
        if left != taints:
            self._patch(node["metadata"]["name"], {"spec": {"taints": left}})

    def _patch(self, name: str, body: Object) -> None:
        self._api.patch(f"{_NODES}/{name}", body)

    def _set_cared(self, name: str, cared: bool) -> None:
        self.label(name, {LABEL_CARED: "true" if cared else None})

    def _set_beating(self, name: str, beating: bool) -> None:
        if beating:
            body: Object = {
                "metadata": {"labels": {LABEL_BEATING: "true"}},
                "spec": {"renewTime": now()},
            }
        else:
            body = {"metadata": {"labels": {LABEL_BEATING: None}}}
        self._api.patch(f"{_LEASES}/{name}", body)

    def _ready_pods_again(self, name: str) -> None:
        """What a returning kubelet posts; the node controller had set its pods to not ready."""
        conditions = [
            {"type": kind, "status": "True", "lastTransitionTime": now()}
            for kind in ("Ready", "ContainersReady")
        ]
        for pod in pods_on(self._api, name):
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
                try:
                    body = {
                        "metadata": {"uid": pod["metadata"]["uid"]},
                        "status": {"conditions": conditions},
                    }
                    self._api.patch(f"{_path_of_pod(pod)}/status", body, kind="strategic")
                except ApiError as exc:
                    if exc.status not in (404, 409):  # deleted or replaced meanwhile
                        raise

    def _taints_without(self, name: str, key: str, effect: str) -> list[Object]:
        taints = self._api.get(f"{_NODES}/{name}")["spec"].get("taints", [])
        return [one for one in taints if (one["key"], one["effect"]) != (key, effect)]


def now() -> str:
    """The time as Leases and conditions write it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def pods_on(api: Api, node: str) -> list[Object]:
    """All pods bound to this node, of any namespace."""
    return api.list(_PODS, fieldSelector=f"spec.nodeName={node}")


def _path_of_pod(pod: Object) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def _is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _is_healthy(node: Object) -> bool:
    return _is_ready(node) and not _has_health_taint(node)


def _has_health_taint(node: Object) -> bool:
    return any(taint["key"] in _HEALTH_TAINTS for taint in node.get("spec", {}).get("taints", []))
