"""The running part of a job: resources, pods, topology, restarts."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, Field, StrictFloat, StrictInt, model_validator

from omni_contract.base import Clash, SpecModel
from omni_contract.names import DATA_CONTAINER, GROUP, TRAINER_CONTAINER

_SET_BY_OPERATOR: Final = ("command", "args", "restartPolicy", "image", "workingDir")
"""Fields of our two containers that a job may not set (images: podTemplate.image, .dataImage)."""
_OUR_PREFIX: Final = f"{GROUP}/"
"""Of the names of labels and annotations that the operator keeps for itself."""
_SUBDOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
"""What Kubernetes calls most objects."""
_RESOURCE: Final = rf"^{_SUBDOMAIN}/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_REPOSITORY: Final = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE: Final = (
    r"^((\[[a-fA-F0-9:]+\]|[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?)(:[0-9]+)?/)?"
    rf"{_REPOSITORY}(/{_REPOSITORY})*(:[A-Za-z0-9_][-A-Za-z0-9_.]*)?(@[A-Za-z0-9+._-]+:[a-fA-F0-9]+)?$"
)
"""The grammar of image references: the API server takes any text, and kubelets refuse it."""
_Image = Annotated[str, Field(max_length=512, pattern=_REFERENCE)]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


PodPart = Annotated[dict[str, Any], AfterValidator(_without_nulls)]
"""A part of a pod in Kubernetes' own form, where null means left out; some clients drop it on the
way, and the plan must be the same."""


class FaultClass(StrEnum):
    """What went wrong, classified from exit records and states, never from logs."""

    APP_ERROR = "AppError"
    OOM = "OOM"
    HANG = "Hang"
    NODE_LOST = "NodeLost"
    NODE_TAINTED = "NodeTainted"
    GPU_HARDWARE = "GpuHardware"
    DATA_SERVICE = "DataService"
    RENDEZVOUS = "Rendezvous"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    POD_DELETED = "PodDeleted"
    START_ERROR = "StartError"
    PENDING_TIMEOUT = "PendingTimeout"
    UNKNOWN = "Unknown"


class RestartAction(StrEnum):
    """What is done about a fault, cheapest first."""

    RESTART_IN_PLACE = "RestartInPlace"
    REPLACE_POD = "ReplacePod"
    RESTART_GROUP = "RestartGroup"
    RESTART_JOB = "RestartJob"
    FAIL_JOB = "FailJob"


class ResourcesSpec(SpecModel):
    """What the job runs on."""

    immutable: ClassVar[tuple[str, ...]] = ("nodes", "ranksPerNode", "device")

    nodes: Annotated[StrictInt, Field(ge=1, le=10_000)] = 1
    """Pods, one a node; `omni run` starts as many groups of processes."""
    ranks_per_node: Annotated[StrictInt, Field(ge=1, le=64)] = 1
    """Trainer ranks, and so GPUs, of a node."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes CUDA where there is a GPU, else the CPU with gloo."""
    gpu_resource: Annotated[str, Field(max_length=128, pattern=_RESOURCE)] = "nvidia.com/gpu"
    """Name of the extended resource that counts GPUs: DOMAIN/NAME."""
    spares: Annotated[StrictInt, Field(ge=0, le=1000)] = 0
    """Running pods without a rank that hold a node for a replacement."""


class PodTemplateSpec(SpecModel):
    """What the user adds to the pods."""

    image: _Image | None = None
    """Trainer image, such as HOST/NAME:TAG. Left out: the operator's default."""
    data_image: _Image | None = None
    """Image of the data service, whatever `image` is. Left out: the operator's default."""
    labels: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]],
        Field(max_length=64),
    ] = {}
    """Labels added to the pods."""
    annotations: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=4096)]],
        Field(max_length=64),
    ] = {}
    """Annotations added to the pods."""
    image_pull_secrets: Annotated[
        list[Annotated[str, Field(max_length=253, pattern=rf"^{_SUBDOMAIN}$")]],
        Field(max_length=16),
    ] = []
    """Names of Secrets to pull the images with."""
    priority_class_name: Annotated[str, Field(max_length=253)] | None = None
    """Priority class of the pods."""
    env: Annotated[
        dict[Annotated[str, Field(max_length=128)], Annotated[str, Field(max_length=4096)]],
        Field(max_length=128),
    ] = {}
    """Variables of the trainer container."""
    node_selector: Annotated[
        dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=63)]],
        Field(max_length=64),
    ] = {}
    """Labels the nodes must have."""
    tolerations: Annotated[list[PodPart], Field(max_length=64)] = []
    """Taints the pods tolerate, as in a pod."""
    volumes: Annotated[list[PodPart], Field(max_length=64)] = []
    """Volumes added, as in a pod."""
    volume_mounts: Annotated[list[PodPart], Field(max_length=64)] = []
    """Where the trainer mounts them, as in a container."""
    containers: Annotated[list[PodPart], Field(max_length=16)] = []
    """Containers as in a pod. Those named `trainer` and `data` are merged into ours (resources, env
    by name, mounts by path), others are added."""
    security_context: PodPart = {}
    """Merged over the security context of the pods, which passes the `restricted` standard."""
    termination_grace_seconds: Annotated[StrictInt, Field(ge=1, le=86_400)] = 120
    """Time for a last checkpoint after SIGTERM."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = tuple(
        (
            f"!has(self.{field}) || self.{field}.all(k, !k.startsWith('{_OUR_PREFIX}'))",
            f"the operator keeps {field} with the prefix {_OUR_PREFIX} for itself",
        )
        for field in ("labels", "annotations")
    )

    @model_validator(mode="after")
    def _leaves_ours_alone(self) -> Self:
        named = {"labels": self.labels, "annotations": self.annotations}
        problems = [
            (
                f"{field}.{key}",
                f"the operator keeps {field} with the prefix {_OUR_PREFIX} for itself; take it "
                "out, or give it a prefix of your own",
            )
            for field, values in named.items()
            for key in values
            if key.startswith(_OUR_PREFIX)
        ]
        for at, container in enumerate(self.containers):
            path = f"containers[{at}]"
            name = container.get("name")
            if not isinstance(name, str) or not name:
                problems.append((f"{path}.name", "a container needs a name"))
            elif name in (TRAINER_CONTAINER, DATA_CONTAINER):
                problems += [
                    (
                        f"{path}.{field}",
                        f"the operator sets it for container {name!r}; take it out, or add a "
                        "container of another name",
                    )
                    for field in _SET_BY_OPERATOR
                    if field in container
                ]
        if problems:
            raise Clash(problems)
        return self


class TopologySpec(SpecModel):
    """How close pods must be in the network. Levels are region, zone, block, rack, node and those
    of `levels`; a label key of the nodes is a level, too."""

    reorder_group_within: Annotated[str, Field(max_length=64)] | None = None
    """Level of the topology one reorder group must share. Left out: none is asked."""
    job_within: Annotated[str, Field(max_length=64)] | None = None
    """Level the whole job must share. Left out: none is asked."""
    levels: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=317)]],
        Field(max_length=8),
    ] = {}
    """Node labels of levels with a name of your own, widest first."""
    on_unsatisfied: Literal["Wait", "Relax", "Fail", "Shrink"] = "Wait"
    """Wait for room, take a looser placement, fail, or run with fewer replicas and the same global
    batch."""


class FaultSelector(SpecModel):
    """Faults a rule applies to."""

    class_: Annotated[list[FaultClass], Field(alias="class", min_length=1, max_length=16)]
    """Classes of fault."""


class RestartRule(SpecModel):
    """One line of the restart policy; the first that matches counts."""

    when: FaultSelector
    """Which faults."""
    do: RestartAction
    """What then. Left to the default table where no rule matches."""


class RestartSpec(SpecModel):
    """What happens after a fault."""

    limit: Annotated[StrictInt, Field(ge=0, le=10_000)] = 3
    """Restarts for faults of the user's program; infrastructure faults do not count."""
    infrastructure_limit: Annotated[StrictInt, Field(ge=0, le=100_000)] = 100
    """Restarts for all other faults: killed processes, hangs, lost nodes."""
    no_progress_limit: Annotated[StrictInt, Field(ge=1, le=1000)] = 3
    """Restarts in a row that reach no new step before the job gives up."""
    hang_after_seconds: Annotated[StrictFloat, Field(ge=1, le=86_400)] = 600
    """A step may take this long before a rank that stands still counts as hung."""
    start_after_seconds: Annotated[StrictFloat, Field(ge=1, le=86_400)] = 900
    """The first step of a generation may take this long (imports, restore, warm-up), and so may a
    save that waits for the store."""
    node_lost_after_seconds: Annotated[StrictFloat, Field(ge=0, le=86_400)] = 30
    """A node may be not Ready this long, its pods making no step, before they are replaced."""
    ready_after_seconds: Annotated[StrictFloat, Field(ge=1, le=86_400)] = 900
    """All pods of an attempt must run this long after they were released (images to pull)."""
    exclude_node_seconds: Annotated[StrictInt, Field(ge=0, le=2_592_000)] = 86_400
    """A node whose GPU failed gets no pod of the job for this long."""
    rules: Annotated[list[RestartRule], Field(max_length=32)] = []
    """Overrides of the default action by fault class."""
