"""`JobStatus`: what a job's status holds. The operator writes it, `kubectl get mmtj` shows it."""

from typing import Annotated, Literal

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
    """Accepted, PodsReady, Suspended, Restarting, Completed or Failed."""
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


class JobProgress(StatusModel):
    """How far training is."""

    step: int = 0
    """Optimizer steps finished."""
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
    """Seconds by stage: detect, restart, restore, firstStep."""


class JobStatus(StatusModel):
    """What is true about a job now."""

    observed_generation: int | None = None
    """metadata.generation of the spec that this status answers."""
    phase: Phase = "Pending"
    """The conditions in one word."""
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
    """Accepted, PodsReady, Suspended, Restarting, Completed, Failed."""
    attempt: int = 0
    """Placements so far; grows whenever pods are replaced."""
    generation: int = 0
    """Restarts in place within the attempt."""
    restarts: int = 0
    """Restarts in all, of both kinds."""
    progress: JobProgress = JobProgress()
    """How far training is."""
    incidents: Annotated[list[Incident], Field(max_length=32)] = []
    """The newest faults, oldest first."""
    plan_hash: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the compiled plan that the pods run."""
