"""`JobStatus`: what a job's status holds. The operator writes it, `kubectl get mmtj` shows it."""

from datetime import UTC, datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from omni_contract.spec_run import FaultClass, RestartAction

Phase = Literal[
    "Pending", "Starting", "Running", "Restarting", "Suspended", "Completed", "Failed"
]  # fmt: skip
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Reason = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
Sentence = Annotated[str, Field(max_length=4096)]


class StatusModel(BaseModel):
    """A block of the status: camelCase outside; a newer writer may add fields."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="ignore",
        frozen=True,
        use_attribute_docstrings=True,
    )


class Condition(StatusModel):
    """One condition, as Kubernetes writes them."""

    type: Annotated[str, Field(max_length=64)]
    """One of `CONDITIONS`."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Reason
    """A constant CamelCase word for programs."""
    message: Sentence
    """A sentence with numbers for people."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: int | None = None
    """metadata.generation that this was decided for."""


CONDITIONS: Final = (
    "Accepted", "Placed", "GangReady", "DataServiceReady", "Running", "TopologySatisfied",
    "Degraded", "Restarting", "Suspended", "Completed", "Failed",
)  # fmt: skip
"""Every condition of a job, in the order in which they are told."""

STAGES: Final = ("detect", "decide", "terminate", "schedule", "start", "firstStep")
"""Stages of a recovery: fault to seen, to new attempt written, to old pods out of the way, to
new pods on their nodes, to all running, to the first step."""


class JobProgress(StatusModel):
    """How far training is."""

    step: int = 0
    """Optimizer steps finished; falls back where a restart goes on from an older checkpoint."""
    highest_step: int = 0
    """Most steps ever finished."""
    num_steps: int = 0
    """Steps of the whole job."""
    tokens: int = 0
    """Tokens consumed, padding not counted."""
    tokens_per_second: float | None = None
    """Over the last minute."""
    loss: float | None = None
    """Loss of the last step, per loss token."""
    checkpoint_step: int | None = None
    """Newest step a restart would resume from."""
    update_time: Time | None = None
    """When `step` last grew."""
    useful_seconds: float = 0
    """Time that the steps which were kept took, each counted once."""


class Incident(StatusModel):
    """A fault, what was done about it and how long each stage of that took."""

    time: Time
    """When it was seen."""
    fault: FaultClass
    """What went wrong."""
    action: RestartAction
    """What was done."""
    attempt: int
    """Attempt that ended by it."""
    generation: int
    """Generation, within the attempt, that ended by it."""
    node: int | None = None
    """Node of the first failure."""
    rank: int | None = None
    """Rank of the first failure."""
    message: Sentence
    """What was seen, in a sentence."""
    seconds: Annotated[dict[str, float], Field(max_length=16)] = {}
    """Seconds by stage, see `STAGES`; stages to come are left out."""
    pod: Annotated[str, Field(max_length=253)] | None = None
    """Pod of the first failure."""
    kubernetes_node: Annotated[str, Field(max_length=253)] | None = None
    """Where that pod ran."""


class GroupPlacement(StatusModel):
    """Where the nodes of some reorder groups are."""

    unit: int
    """Number of the set of plan nodes."""
    nodes: int
    """Pods in it."""
    domains: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=16)] = []
    """Domains of the asked level (else of the narrowest) that hold them."""
    span: int = 1
    """Domains it touches; 1 is best."""


class PlacementSummary(StatusModel):
    """The placement in short; the rank map is in the ConfigMap of the attempt."""

    config_map: Annotated[str, Field(max_length=253)]
    """Name of the ConfigMap."""
    data_image: Annotated[str, Field(max_length=1024)] | None = None
    """Image of data services and of what reads their logs, where the job names none."""
    nodes: int
    """Pods with ranks."""
    spares: int = 0
    """Pods without, which hold a node."""
    level: Annotated[str, Field(max_length=317)] | None = None
    """Level the spans are counted at."""
    job_domain: Annotated[str, Field(max_length=512)] | None = None
    """Domain that holds the whole job, where one does."""
    groups_in_one_domain: int = 0
    """Sets of reorder groups that touch one domain only."""
    num_groups: int = 0
    """Sets in all."""
    groups: Annotated[list[GroupPlacement], Field(max_length=64)] = []
    """The first of them, widest span first."""


class ExcludedNode(StatusModel):
    """A node that gets no pod of the job for a time."""

    name: Annotated[str, Field(max_length=253)]
    """The node."""
    until: Time
    """When it may again."""
    reason: Sentence
    """What it did."""


class RestartBudget(StatusModel):
    """Restarts spent, by what they count against."""

    user: int = 0
    """Of restart.limit."""
    infrastructure: int = 0
    """Of restart.infrastructureLimit."""
    without_progress: int = 0
    """In a row, of restart.noProgressLimit."""
    highest_step: int = 0
    """Most steps finished when a fault struck."""


class JobStatus(StatusModel):
    """What is true about a job now."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status answers."""
    phase: Phase = "Pending"
    """The conditions in one word."""
    reason: Reason | None = None
    """Reason of the condition that explains the phase."""
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=16,
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            },
        ),
    ] = []
    """One of each type of `CONDITIONS` that has something to say."""
    attempt: int = 0
    """Placements so far; grows whenever pods are replaced."""
    generation: int = 0
    """Restarts in place within the attempt."""
    restarts: int = 0
    """Restarts in all: in place, of pods and of the job."""
    budget: RestartBudget = RestartBudget()
    """What they counted against."""
    progress: JobProgress = JobProgress()
    """How far training is."""
    incidents: Annotated[list[Incident], Field(max_length=32)] = []
    """The newest faults, oldest first."""
    goodput: float | None = None
    """Useful seconds over seconds since the job first ran, suspended time left out."""
    plan_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the compiled plan that the attempt runs."""
    num_nodes: int | None = None
    """Nodes of that plan; fewer than asked for where the job was shrunk."""
    opened_by: RestartAction | None = None
    """What was done about the attempt before this one; null at a start or a resume."""
    opened_at: Time | None = None
    """When the attempt was opened."""
    placement: PlacementSummary | None = None
    """Where the attempt runs."""
    excluded_nodes: Annotated[list[ExcludedNode], Field(max_length=64)] = []
    """Nodes left out for now."""
    start_time: Time | None = None
    """When the job first ran, or ran again after it was suspended."""
    active_seconds: float = 0
    """Seconds it had run before `startTime`, suspended time left out."""
    completion_time: Time | None = None
    """When it was Completed or Failed."""
    restart_handled: Annotated[str, Field(max_length=256)] | None = None
    """The last value of the restart annotation that was acted upon."""

    def condition(self, type_: str) -> Condition | None:
        """The condition of a type, where it has something to say."""
        return next((c for c in self.conditions if c.type == type_), None)

    def holds(self, type_: str) -> bool:
        """Whether a condition is True."""
        found = self.condition(type_)
        return found is not None and found.status == "True"


def read_time(text: str) -> float:
    """Unix seconds of a time in a status."""
    return datetime.fromisoformat(text).timestamp()


def write_time(seconds: float) -> str:
    """Unix seconds as a status holds them, to the millisecond."""
    at = datetime.fromtimestamp(round(seconds, 3), UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
