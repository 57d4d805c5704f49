"""`JobPlan`: what a job file means, compiled once. Trainer and sidecar read this same document."""

import hashlib
import json
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from omni_contract.dataflow import Window
from omni_contract.errors import SpecError
from omni_contract.spec import JobSpec
from omni_contract.topology import Layout

PLAN_VERSION = 1


class JobPlan(BaseModel):
    """A compiled job. Written by `omni_planner.compile.compile_plan`, never by hand."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    name: str
    """Name of the job."""
    spec: JobSpec
    """The job as validated, defaults filled in."""
    layout: Layout
    num_steps: int
    """Optimizer steps, counted from 1 to num_steps."""
    num_microbatches: int
    """LLM microbatches of one replica in a step, counted from 1."""
    dataflow: dict[str, Window]
    """When and where each encoder microbatch of a replica runs; the same in every replica."""

    _read: str | None = PrivateAttr(default=None)
    """What it was read from, where that is not what this version would write."""

    def to_json(self) -> str:
        """Canonical text: the same plan is the same bytes. One that an older version wrote stays as
        it is: were a field that is new here filled in, it would be another plan, and its job would
        start anew."""
        if self._read is not None:
            return self._read
        document = self.model_dump(mode="json", by_alias=True)
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @property
    def hash(self) -> str:
        """First 16 hex digits of the SHA-256 of the canonical text."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def microbatch_tokens(self) -> int:
        """Token positions of one LLM microbatch (its sequences lie one behind the other)."""
        return self.spec.batch.microbatch_sequences * self.spec.batch.sequence_tokens

    def save(self, path: Path) -> None:
        """Write the canonical text."""
        path.write_text(self.to_json())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a plan's text. Raises ValidationError where it is none of this version."""
        plan = cls.model_validate_json(text)
        if text != plan.to_json():
            plan._read = text
        return plan

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a plan file. Raises SpecError where it is no plan of this version."""
        try:
            return cls.parse(path.read_text())
        except (OSError, UnicodeError, ValidationError) as exc:
            raise SpecError(
                str(path), f"no job plan of version {PLAN_VERSION}: {exc}; compile the job again"
            ) from None
