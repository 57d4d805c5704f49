"""`JobSpec`: the `spec` of a MultimodalTrainingJob, parsed once, at the edge."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from omni_contract.base import Clash, SpecModel, divisors
from omni_contract.errors import SpecError
from omni_contract.names import KIND, TRAINER_CONTAINER
from omni_contract.spec_data import CheckpointSpec, DataSpec, StorageSpec
from omni_contract.spec_model import (
    BatchSpec,
    Modality,
    ModelSpec,
    ParallelismSpec,
    TrainSpec,
)
from omni_contract.spec_run import PodTemplateSpec, ResourcesSpec, RestartSpec, TopologySpec

JOB_NAME_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"

_MOST_MICROBATCHES = 4096
_MOST_SLOTS = 65_536
"""Microbatches of a replica times pipeline stages: compiling and checking a schedule of this size
takes about a second, and one a hundred times as large would hold up an operator for minutes."""

# In CEL a field left out has no default, so the rules say it.
_STAGES = (
    "(has(self.parallelism) && has(self.parallelism.llm) && has(self.parallelism.llm.pipeline) ? "
    "self.parallelism.llm.pipeline : 1)"
)
_RANKS = (
    "((has(self.resources) && has(self.resources.nodes) ? self.resources.nodes : 1) * "
    "(has(self.resources) && has(self.resources.ranksPerNode) ? self.resources.ranksPerNode : 1))"
)


_MICROBATCH = "(has(self.batch.microbatchSequences) ? self.batch.microbatchSequences : 1)"


class JobSpec(SpecModel):
    """Everything a user says about a job."""

    model: ModelSpec
    """What is trained."""
    batch: BatchSpec
    """What one step consumes."""
    train: TrainSpec
    """How long and how."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How it is spread over ranks."""
    storage: StorageSpec = StorageSpec()
    """Where s3:// is."""
    data: DataSpec
    """What it reads."""
    checkpoint: CheckpointSpec
    """Where it is saved."""
    resources: ResourcesSpec = ResourcesSpec()
    """What it runs on."""
    pod_template: PodTemplateSpec = PodTemplateSpec()
    """What its pods look like."""
    topology: TopologySpec = TopologySpec()
    """How close its pods must be."""
    restart: RestartSpec = RestartSpec()
    """What happens after a fault."""
    queue_name: Annotated[str, Field(max_length=253)] | None = None
    """Queue of a quota system. Left out: none."""
    suspend: StrictBool = False
    """True: end the pods, keep the checkpoint; false again resumes."""
    ttl_seconds_after_finished: Annotated[StrictInt, Field(ge=0)] | None = None
    """Seconds after which a finished job is deleted. Left out: never."""
    active_deadline_seconds: Annotated[StrictInt, Field(ge=1)] | None = None
    """Seconds after which a running job fails. Left out: never."""
    keep_pods: Literal["None", "Failed", "All"] | None = None
    """Pods that stay after the job has ended. Left out: those that failed."""

    # What decides which samples come and what they do to the weights stays as it was. Pods,
    # restarts, deadlines, topology and credentials may change; they count from the next attempt on.
    immutable: ClassVar[tuple[str, ...]] = (
        "model", "batch", "train", "parallelism", "data", "checkpoint",
    )  # fmt: skip
    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.data.sources.all(n, self.data.sources[n].parts.all(m, m == 'text' || "
            "(has(self.model.encoders) && ((m == 'image' && has(self.model.encoders.image)) || "
            "(m == 'audio' && has(self.model.encoders.audio))))))",
            "every modality of data.sources needs an encoder in model.encoders",
        ),
        (
            f"self.model.llm.layers % {_STAGES} == 0",
            "parallelism.llm.pipeline must divide model.llm.layers",
        ),
        (
            f"{_RANKS} % {_STAGES} == 0",
            "parallelism.llm.pipeline must divide resources.nodes x resources.ranksPerNode",
        ),
        (
            f"{_RANKS} % {_STAGES} != 0 || "
            f"self.batch.globalSequences % ({_RANKS} / {_STAGES} * {_MICROBATCH}) == 0",
            "batch.globalSequences must be a multiple of batch.microbatchSequences x replicas "
            "(resources.nodes x resources.ranksPerNode / parallelism.llm.pipeline)",
        ),
        (
            f"{_RANKS} % {_STAGES} != 0 || (self.batch.globalSequences <= "
            f"{_MOST_MICROBATCHES} * ({_RANKS} / {_STAGES}) * {_MICROBATCH} && "
            f"self.batch.globalSequences * {_STAGES} <= "
            f"{_MOST_SLOTS} * ({_RANKS} / {_STAGES}) * {_MICROBATCH})",
            "batch.globalSequences makes too many microbatches a replica (at most "
            f"{_MOST_MICROBATCHES}, and {_MOST_SLOTS} over all parallelism.llm.pipeline stages); "
            "raise batch.microbatchSequences, resources.nodes or resources.ranksPerNode",
        ),
        (
            f"{_RANKS} % {_STAGES} != 0 || !has(self.data.reorder) || "
            "!has(self.data.reorder.groupReplicas) || "
            f"({_RANKS} / {_STAGES}) % self.data.reorder.groupReplicas == 0",
            "data.reorder.groupReplicas must divide the number of replicas "
            "(resources.nodes x resources.ranksPerNode / parallelism.llm.pipeline)",
        ),
        (
            "!has(self.resources) || !has(self.resources.device) || self.resources.device != 'cpu' "
            "|| (has(self.train.precision) && self.train.precision == 'fp32')",
            "train.precision must be fp32 where resources.device is cpu",
        ),
        (
            # The rules inside resources sleep while the whole block comes or goes.
            "has(self.resources) == has(oldSelf.resources)",
            "resources cannot come or go in a job that exists; create a new job",
        ),
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = [
            *_parts_without_encoder(self),
            *_sizes_that_do_not_divide(self),
            *_gpus_counted_twice(self),
        ]
        if self.resources.device == "cpu" and self.train.precision == "bf16":
            problems.append(
                ("train.precision", "bf16 needs a GPU, but resources.device is cpu; write fp32")
            )
        if problems:
            raise Clash(problems)
        return self


def _parts_without_encoder(spec: JobSpec) -> Iterator[tuple[str, str]]:
    encoders = {modality for modality, _ in spec.model.encoders.items()}
    for name, source in spec.data.sources.items():
        for modality, extension in source.parts.items():
            if modality is not Modality.TEXT and modality not in encoders:
                yield (
                    f"data.sources.{name}.parts.{modality}",
                    f"{extension!r} needs an encoder; add model.encoders.{modality} or take the "
                    "source out",
                )


def _sizes_that_do_not_divide(spec: JobSpec) -> Iterator[tuple[str, str]]:
    stages, layers = spec.parallelism.llm.pipeline, spec.model.llm.layers
    ranks = spec.resources.nodes * spec.resources.ranks_per_node
    if layers % stages:
        yield (
            "parallelism.llm.pipeline",
            f"{stages} does not divide the {layers} layers of model.llm; "
            f"use one of {divisors(layers)}",
        )
    if ranks % stages:
        yield (
            "parallelism.llm.pipeline",
            f"{stages} does not divide the {ranks} ranks (resources.nodes x "
            f"resources.ranksPerNode); use one of {divisors(ranks)}",
        )
        return  # what follows counts replicas, and there is no whole number of them
    replicas = ranks // stages
    per_round = replicas * spec.batch.microbatch_sequences
    if spec.batch.global_sequences % per_round:
        yield (
            "batch.globalSequences",
            f"{spec.batch.global_sequences} does not divide among {replicas} replicas "
            "(resources.nodes x resources.ranksPerNode / parallelism.llm.pipeline) of "
            f"{spec.batch.microbatch_sequences} sequences a microbatch; "
            f"use a multiple of {per_round}",
        )
    num_microbatches = spec.batch.global_sequences // per_round
    most = min(_MOST_MICROBATCHES, _MOST_SLOTS // stages)
    if num_microbatches > most:
        yield (
            "batch.globalSequences",
            f"{spec.batch.global_sequences} makes {num_microbatches} microbatches a replica, but "
            f"{stages} pipeline stages can schedule {most}; use {most * per_round} or less, or "
            "raise batch.microbatchSequences, resources.nodes or resources.ranksPerNode",
        )
    if replicas % spec.data.reorder.group_replicas:
        yield (
            "data.reorder.groupReplicas",
            f"{spec.data.reorder.group_replicas} does not divide the {replicas} replicas "
            "(resources.nodes x resources.ranksPerNode / parallelism.llm.pipeline); "
            f"use one of {divisors(replicas)}",
        )


def _gpus_counted_twice(spec: JobSpec) -> Iterator[tuple[str, str]]:
    gpu = spec.resources.gpu_resource
    if spec.resources.device == "cpu":
        return
    for at, container in enumerate(spec.pod_template.containers):
        resources = container.get("resources")
        if container.get("name") != TRAINER_CONTAINER or not isinstance(resources, Mapping):
            continue
        for field in ("limits", "requests"):
            amounts = resources.get(field)
            if isinstance(amounts, Mapping) and gpu in amounts:
                yield (
                    f"podTemplate.containers[{at}].resources.{field}.{gpu}",
                    f"the operator sets it to resources.ranksPerNode "
                    f"({spec.resources.ranks_per_node}), one for each rank; take it out",
                )


class JobMetadata(SpecModel):
    """The part of Kubernetes metadata that a job file may carry here."""

    model_config = {**SpecModel.model_config, "extra": "ignore"}

    name: Annotated[str, Field(pattern=JOB_NAME_PATTERN)]
    """DNS label of at most 40 characters; pods get it as a prefix."""
    namespace: Annotated[str, Field(max_length=63)] = "default"
    """Namespace; `omni run` ignores it."""


class Job(SpecModel):
    """A whole job file."""

    api_version: Literal["megascale-omni.dev/v1alpha1"]
    """Group and version of the kind."""
    kind: Literal["MultimodalTrainingJob"]
    """The kind."""
    metadata: JobMetadata
    """Name of the job."""
    spec: JobSpec
    """The job."""

    @classmethod
    def read(cls, raw: Any) -> "Job":
        """Read a parsed YAML document. Raises SpecError that names every wrong field."""
        if not isinstance(raw, Mapping):
            raise SpecError("job", f"expected a mapping with apiVersion, kind {KIND} and spec")
        return cls.parse(raw, path="")
