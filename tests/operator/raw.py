"""Jobs, pods and nodes as an API server says them."""

from typing import Any

from omni_contract.names import API_VERSION, KIND

TIME = "2026-11-30T08:00:00Z"
TIME_S = 1_796_025_600.0
GPU = "nvidia.com/gpu"


def job(
    name: str = "train",
    *,
    uid: str = "job-1",
    version: int = 1,
    status: dict[str, Any] | None = None,
    namespace: str = "team",
) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid,
            "generation": 3,
            "resourceVersion": str(version),
            "creationTimestamp": TIME,
        },
        "spec": {},
        "status": status or {},
    }


def ended(condition: str) -> dict[str, Any]:
    """A status in which one condition holds."""
    return {"conditions": [said(condition, "True")]}


def said(condition: str, status: str, reason: str = "Because") -> dict[str, str]:
    return {
        "type": condition,
        "status": status,
        "reason": reason,
        "message": "So it is.",
        "lastTransitionTime": TIME,
    }


def pod(
    name: str = "p0",
    *,
    uid: str | None = None,
    version: int = 1,
    job_uid: str | None = "job-1",
    node: str | None = "n0",
    gpus: int = 8,
    phase: str = "Running",
    namespace: str = "team",
    meta: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
) -> dict[str, Any]:
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": "train", "controller": True}
    asked = {"resources": {"requests": {"cpu": "4", GPU: str(gpus)}}} if gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": TIME,
            **({"ownerReferences": [{**owner, "uid": job_uid}]} if job_uid else {}),
            **(meta or {}),
        },
        "spec": {
            "containers": [{"name": "trainer", **asked}],
            **({"nodeName": node} if node else {}),
            **(spec or {}),
        },
        "status": {"phase": phase, **(status or {})},
    }


def node(
    name: str = "n0",
    *,
    version: int = 1,
    gpus: int = 8,
    ready: str = "True",
    labels: dict[str, str] | None = None,
    heartbeat: str = TIME,
    **spec: Any,
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": str(version),
            "creationTimestamp": TIME,
            "labels": labels or {},
        },
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "64", "memory": "1Ti", "hugepages-2Mi": "0", GPU: str(gpus)},
            "conditions": [
                {"type": "MemoryPressure", "status": "False", "lastTransitionTime": TIME},
                {
                    "type": "Ready",
                    "status": ready,
                    "lastTransitionTime": TIME,
                    "lastHeartbeatTime": heartbeat,
                },
            ],
        },
    }
