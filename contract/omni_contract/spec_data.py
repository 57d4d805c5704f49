"""The data part of a job: storage, sources, mixture schedule, checkpoints."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StrictBool, StrictFloat, StrictInt, model_validator

from omni_contract.base import SpecModel
from omni_contract.quantity import Steps, Tokens
from omni_contract.spec_model import Modality

_S3 = r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^/]+)*$"
_MARK = re.compile(r"(<[a-z]+>|\{[a-z]+\})")
_SOURCE_NAME = r"^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$"

SourceName = Annotated[str, Field(pattern=_SOURCE_NAME, max_length=32)]


def _check_s3(uri: str) -> str:
    if not re.fullmatch(_S3, uri):
        raise ValueError("write it as s3://BUCKET/KEY, without a slash at the end")
    return uri


S3Uri = Annotated[
    str,
    AfterValidator(_check_s3),
    Field(max_length=512, json_schema_extra={"pattern": _S3}),
]


class StorageSpec(SpecModel):
    """Where s3:// is. What is left out comes from the standard AWS chain."""

    endpoint: Annotated[str, Field(pattern=r"^https?://.+", max_length=512)] | None = None
    """URL of an S3-compatible server. Left out: AWS_ENDPOINT_URL, then AWS itself."""
    region: Annotated[str, Field(max_length=64)] = "us-east-1"
    """Region of the buckets."""
    credentials_secret: Annotated[str, Field(max_length=253)] | None = None
    """Kubernetes secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; `omni run` uses the
    AWS chain of the shell instead."""


class SourceSpec(SpecModel):
    """One folder of WebDataset shards, all samples alike."""

    uri: S3Uri
    """s3:// folder that holds the shards and their index."""
    parts: Annotated[
        dict[Modality, Annotated[str, Field(pattern=r"^[a-z0-9.]+$", max_length=16)]],
        Field(min_length=1, max_length=3),
    ]
    """Files of a sample by modality: {image: png, text: txt}."""
    template: Annotated[str, Field(max_length=64)] = "{text}"
    """Order of a sample's tokens: <image> and <audio> stand for encoder outputs, {text} for text
    tokens. An end token follows."""
    loss_on: Literal["text"] = "text"
    """Tokens that are learnt. Modality tokens are given, never predicted."""
    when_exhausted: Literal["repeat", "stop"] = "repeat"
    """After every sample was drawn: start the next epoch in a new order, or end the training."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        ("'text' in self.parts", "parts must name text; every sample needs text to learn from"),
        (
            "self.parts.all(p, (has(self.template) ? self.template : '{text}').contains("
            "p == 'text' ? '{text}' : '<' + p + '>')) && "
            "size(has(self.template) ? self.template : '{text}') == 7 * size(self.parts) - 1",
            "template must name each part once and nothing else, such as <image>{text}",
        ),
    )

    @model_validator(mode="after")
    def _template_names_parts(self) -> Self:
        if Modality.TEXT not in self.parts:
            raise ValueError("parts: text is missing; every sample needs text to learn from")
        marks = _MARK.findall(self.template)
        wanted = sorted(f"{{{m}}}" if m is Modality.TEXT else f"<{m}>" for m in self.parts)
        if sorted(marks) != wanted or "".join(marks) != self.template:
            raise ValueError(
                f"template: {self.template!r} must name each part once and nothing else; "
                f"use {''.join(sorted(wanted))!r} or another order of it"
            )
        return self

    @property
    def order(self) -> tuple[Modality, ...]:
        """The parts in template order."""
        return tuple(Modality(mark.strip("<>{}")) for mark in _MARK.findall(self.template))


class MixtureStage(SpecModel):
    """Weights of the sources for one stretch of training."""

    weights: Annotated[
        dict[SourceName, Annotated[StrictFloat, Field(ge=0, le=10**6)]],
        Field(min_length=1, max_length=256),
    ]
    """Share of each source by tokens; only ratios matter. A source left out has weight 0."""
    until: Tokens | None = None
    """Planned tokens at which the stage ends. Only the last stage may leave it out."""
    ramp: Literal["none", "linear"] = "none"
    """linear: weights move from those of the stage before to these over this stage."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.weights.exists(n, self.weights[n] > 0.0)",
            "weights must give at least one source a weight above 0",
        ),
    )

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if not any(self.weights.values()):
            raise ValueError("weights: all are 0; give at least one source a weight above 0")
        return self


class CorruptSpec(SpecModel):
    """What to do with a sample that cannot be decoded."""

    action: Literal["skip", "stop"] = "skip"
    """skip: mask its tokens and count it. stop: end the job with its name."""
    limit: Annotated[StrictInt, Field(ge=0, le=10**9)] = 100
    """Skipped samples after which the job stops all the same: the data is bad, not a sample."""


class ReorderSpec(SpecModel):
    """Exchange of packed sequences between replicas for balance."""

    group_replicas: Annotated[StrictInt, Field(ge=1, le=4096)] = 1
    """Replicas that exchange sequences; must divide the number of replicas."""
    algorithm: Literal["identity"] = "identity"
    """identity: sequences stay in the order they were packed."""
    mode: Literal["plan"] = "plan"
    """plan: every sidecar computes the same exchange from the index, without messages."""


class DataSpec(SpecModel):
    """What the model reads, in which mixture."""

    sources: Annotated[dict[SourceName, SourceSpec], Field(min_length=1, max_length=256)]
    """Sources by name."""
    mixture: Annotated[list[MixtureStage], Field(max_length=64)] = []
    """Stages in order; each begins where the one before ended. Left out: equal weights."""
    reorder: ReorderSpec = ReorderSpec()
    """Balance between replicas."""
    corrupt_samples: CorruptSpec = CorruptSpec()
    """Policy for samples that cannot be decoded."""

    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "!has(self.mixture) || self.mixture.all(s, s.weights.all(n, n in self.sources))",
            "mixture weights must name sources",
        ),
        (
            "!has(self.mixture) || size(self.mixture) == 0 || !has(self.mixture[0].ramp) || "
            "self.mixture[0].ramp == 'none'",
            "the first stage of mixture has no weights to ramp from",
        ),
        (
            "!has(self.mixture) || self.mixture.filter(s, !has(s.until)).size() == 0 || "
            "(self.mixture.filter(s, !has(s.until)).size() == 1 && "
            "!has(self.mixture[size(self.mixture) - 1].until))",
            "only the last stage of mixture may leave until out",
        ),
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for i, stage in enumerate(self.mixture):
            unknown = sorted(set(stage.weights) - set(self.sources))
            if unknown:
                raise ValueError(
                    f"mixture[{i}].weights.{unknown[0]}: no source has this name; "
                    f"the sources are {', '.join(sorted(self.sources))}"
                )
            if stage.until is None and i < len(self.mixture) - 1:
                raise ValueError(
                    f"mixture[{i}].until: only the last stage may leave it out; say at how many "
                    "tokens this stage ends"
                )
            before = self.mixture[i - 1].until or 0 if i else 0
            if stage.until is not None and stage.until <= before:
                raise ValueError(
                    f"mixture[{i}].until: {stage.until} is not above the {before} where the stage "
                    "before ends"
                )
        if self.mixture and self.mixture[0].ramp != "none":
            raise ValueError("mixture[0].ramp: the first stage has no weights to ramp from")
        return self


class CheckpointSpec(SpecModel):
    """Where and how often training is saved."""

    uri: S3Uri
    """s3:// folder of this run. One that another job holds is refused, a deleted job of the same
    name too; resumeFrom takes it over."""
    resume_from: S3Uri | None = None
    """s3:// folder of a run to go on from until this one has saved. The same as uri: take that run
    over; its job may then save no more. Left out: begin anew, or go on with this job's own run."""
    every: Steps = 100
    """Steps between saves; the last step is always saved."""
    keep: Annotated[StrictInt, Field(ge=1, le=10**6)] = 3
    """Newest checkpoints that stay; older ones are deleted after a new one is committed."""
    async_: Annotated[StrictBool, Field(alias="async")] = True
    """Training goes on while a copy is written."""
    failed_saves: Annotated[StrictInt, Field(ge=0, le=1000)] = 2
    """Saves in a row that may fail before the job stops. The last save of a job must succeed."""
