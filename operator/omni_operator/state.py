"""What the operator knows about the cluster, reduced to what decisions read. Values only.

`observe` makes these from what the API server says; `decide` and its parts read nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from omni_contract.names import ANNOTATION_NODE
from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.reasons import QueueReason
from omni_contract.records import JobHeartbeat, PodEnd
from omni_contract.spec_run import FaultClass
from omni_contract.status import JobStatus


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class JobKey:
    """Names one job object; a job deleted and made again has another uid."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A MultimodalTrainingJob as last seen."""

    key: JobKey
    uid: str
    generation: int
    resource_version: str
    created_s: float
    is_deleting: bool
    raw_spec: Mapping[str, Any]
    annotations: Mapping[str, str]
    status: JobStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """One container of a pod."""

    name: str
    is_init: bool
    is_ready: bool
    is_started: bool
    restarts: int
    waiting_reason: str | None = None
    waiting_message: str = ""
    running_since_s: float | None = None
    exit_code: int | None = None
    """Of the current or, where it was restarted, the last ended run."""
    is_terminated: bool = False
    """Whether it is over now."""
    reason: str | None = None
    """Why it ended: Completed, Error, OOMKilled, ..."""
    message: str = ""
    """Its termination message."""
    finished_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """A pod of any owner."""

    namespace: str
    name: str
    uid: str
    resource_version: str
    created_s: float
    phase: Literal["Pending", "Running", "Succeeded", "Failed", "Unknown"]
    node: str | None
    """Node it is bound to."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """Extended resources it holds (names with a slash): GPUs."""
    job_uid: str | None = None
    """Job that owns it; None: a foreign pod. What follows is read for owned pods only."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    is_gated: bool = False
    """Holds our scheduling gate."""
    deleting_since_s: float | None = None
    """When its deletion was asked for."""
    reason: str | None = None
    message: str = ""
    is_ready: bool = False
    scheduled: tuple[bool, str, str] | None = None
    """PodScheduled condition: holds, reason, message."""
    disruption: tuple[str, str, float] | None = None
    """DisruptionTarget condition that holds: reason, message, since (Unix seconds)."""
    containers: tuple[ContainerState, ...] = ()

    @property
    def is_terminal(self) -> bool:
        """Whether all its containers are over."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def planned_node(self) -> str | None:
        """Node reserved for it, from its annotation."""
        return self.annotations.get(ANNOTATION_NODE)

    def container(self, name: str) -> ContainerState | None:
        """A container by name."""
        return next((c for c in self.containers if c.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node."""

    name: str
    uid: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, int]
    """Extended resources (names with a slash)."""
    ready: Literal["True", "False", "Unknown"]
    ready_since_s: float
    """When `ready` last changed, by the node's own record."""
    is_cordoned: bool = False
    is_deleting: bool = False
    taints: tuple[Taint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The heartbeat of a job and since when it stands, by the operator's own clock."""

    heartbeat: JobHeartbeat
    renewed_s: float
    """When the Lease was last seen to be renewed."""
    step_since_s: float
    """When (attempt, generation, phase, step) last changed."""
    fault_since_s: float
    """When (attempt, generation, fault told) last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a queue asks of the nodes of a job that it admitted, and lets it tolerate there."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()


QUEUE_REASONS: Final[tuple[str, ...]] = get_args(QueueReason)
"""Reasons of condition Placed of a job that its queue holds back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a queue says about a job."""

    reason: QueueReason | None
    """Why no pod of the job may run; None: it is admitted."""
    message: str = ""
    bounds: Bounds = Bounds()
    """Where an admitted job may run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All that a decision about one job reads."""

    now_s: float
    """Unix seconds."""
    job: JobState
    pods: tuple[PodState, ...]
    """All pods of the job's uid, of every attempt."""
    placement: JobPlacement | None
    """Of the attempt in the job's status; None: not made yet."""
    previous: JobPlacement | None
    """Of the attempt before."""
    plan: JobPlan | None
    """The plan of the attempt in the job's status, where it is known."""
    progress: Progress | None
    nodes: Mapping[str, NodeState]
    used: Mapping[str, Mapping[str, int]]
    """Extended resources held or reserved on each node by all but this job."""
    occupied: Mapping[str, int]
    """Pods of other jobs of ours planned or running on each node that ask for no GPU."""
    admission: Admission | None = None
    watch_is_healthy: bool = True
    """Whether what was read can be taken as now; False: nothing is declared lost or hung."""
    refusal: str = ""
    """Why the API server takes no pod of the spec of now, with the field; empty: none is known."""

    @property
    def bounds(self) -> Bounds:
        """What the job's queue asks of its nodes."""
        return Bounds() if self.admission is None else self.admission.bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFault:
    """One thing wrong with one pod, read from records."""

    fault: FaultClass
    pod: str
    index: int | None
    node: str | None
    time_s: float
    message: str
    exit_code: int | None = None
    """Of the container that ended, where one did."""
    end: PodEnd | None = None
    """What its supervisor said when it ended."""
