"""Names and metadata of a job's objects, and the patches of its pods. Knows nothing of the API."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from omni_contract.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_HISTORY,
    ANNOTATION_INDEX,
    ANNOTATION_NODE,
    ANNOTATION_RENDEZVOUS,
    API_VERSION,
    GATE,
    KIND,
    LABEL_JOB,
    LABEL_JOB_UID,
    RENDEZVOUS_PORT,
    base_name,
)
from omni_contract.placement import JobPlacement
from omni_contract.records import History
from omni_operator.settings import Settings
from omni_operator.state import JobState, PodState

Object = dict[str, Any]
"""A Kubernetes object as the API takes it."""
Operations = list[dict[str, Any]]
"""A JSON patch."""

HOSTNAME_LABEL: Final = "kubernetes.io/hostname"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectNames:
    """What the objects of a job are called. A later job of the same name has other ones."""

    base: str
    """Job name and the first characters of its uid: at most 46 characters."""

    @classmethod
    def of(cls, job: JobState) -> Self:
        """The names for a job."""
        return cls(base=base_name(job.key.name, job.uid))

    @property
    def service(self) -> str:
        """The headless Service that gives each pod a DNS name."""
        return self.base

    @property
    def workload(self) -> str:
        """What asks Kueue for the job's quota."""
        return self.base

    @property
    def progress_lease(self) -> str:
        """The Lease that rank 0's supervisor renews."""
        return f"{self.base}-progress"

    @property
    def rank0(self) -> str:
        """ServiceAccount, Role and RoleBinding of the pods that may hold rank 0."""
        return f"{self.base}-rank0"

    def plan(self, plan_hash: str) -> str:
        """ConfigMap of a compiled plan."""
        return f"{self.base}-plan-{plan_hash}"

    def placement(self, attempt: int) -> str:
        """ConfigMap of the placement of an attempt."""
        return f"{self.base}-placement-{attempt}"

    def pod(self, *, born: int, index: int) -> str:
        """A pod created in attempt `born`; spares are counted on from the last node of the plan.

        It is a host name, too, so it must stay below 64 characters: 17 are left for both numbers.
        """
        return f"{self.base}-{born}-{index}"


def labels(job: JobState) -> dict[str, str]:
    """Labels of everything that belongs to a job."""
    return {LABEL_JOB: job.key.name, LABEL_JOB_UID: job.uid}


def metadata(job: JobState, name: str) -> Object:
    """Metadata of an object of a job. The garbage collector deletes it with the job."""
    return {
        "name": name,
        "namespace": job.key.namespace,
        "labels": labels(job),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": job.key.name,
                "uid": job.uid,
                "controller": True,
            }
        ],
    }


def is_spare(placement: JobPlacement, index: int) -> bool:
    """Whether a pod of `placement.all_pods` has no rank."""
    return index >= len(placement.pods)


def pod_annotations(
    job: JobState, placement: JobPlacement, index: int, settings: Settings, history: History
) -> dict[str, str]:
    """What the pod at `index` of `placement.all_pods` is told, by a file that follows changes."""
    placed = placement.all_pods[index]
    host = f"{placement.pods[0].name}.{ObjectNames.of(job).service}.{job.key.namespace}.svc"
    return {
        ANNOTATION_ATTEMPT: str(placement.attempt),
        ANNOTATION_INDEX: "" if is_spare(placement, index) else str(index),
        ANNOTATION_RENDEZVOUS: f"{host}.{settings.cluster_domain}:{RENDEZVOUS_PORT}",
        ANNOTATION_HISTORY: history.model_dump_json(),
        ANNOTATION_NODE: placed.node,
    }


def annotation_patch(pod: PodState, annotations: Mapping[str, str]) -> Operations:
    """Give a living pod these annotations; empty where it has them all."""
    changes = {
        key: value for key, value in annotations.items() if pod.annotations.get(key) != value
    }
    if not changes:
        return []
    # Every pod of ours has annotations, so the map is there to add to.
    return [
        _is_this(pod),
        *(
            {"op": "add", "path": f"/metadata/annotations/{_escaped(key)}", "value": value}
            for key, value in changes.items()
        ),
    ]


def gate_patch(pod: PodState, hostname: str) -> Operations:
    """Bind a gated pod to a node, by the value of its hostname label, and lift our gate.

    On a gated pod the API lets selectors only be added. A webhook may have put gates of its own
    behind ours; those stay. The record of who set which field goes: nobody applies to these pods,
    and keeping it true would take the API server as long as all else it does in a start.
    """
    return [
        _is_this(pod),
        {"op": "test", "path": "/spec/schedulingGates/0/name", "value": GATE},
        {"op": "add", "path": f"/spec/nodeSelector/{_escaped(HOSTNAME_LABEL)}", "value": hostname},
        {"op": "remove", "path": "/spec/schedulingGates/0"},
        {"op": "add", "path": "/metadata/managedFields", "value": [{}]},
    ]


def _is_this(pod: PodState) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/uid", "value": pod.uid}


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
