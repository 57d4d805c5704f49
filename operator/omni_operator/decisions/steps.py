"""What a decision asks for, as values: the next status and the writes that bring the job nearer to
its spec. `reconcile` carries them out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.status import JobStatus
from omni_operator.kinds import POD, Kind

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """POST an object. One of this name that is there already is as good."""

    kind: Kind
    body: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """Change an object, if it is still the one that was looked at."""

    kind: Kind = POD
    name: str
    uid: str
    operations: Sequence[Object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """Merge into the status of an object, if nobody changed it since it was looked at."""

    kind: Kind
    name: str
    resource_version: str
    status: Object


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Ask for the end of an object, if it is still the one that was looked at."""

    kind: Kind
    name: str
    uid: str
    grace_s: int | None = None
    """Seconds it has to end; None: its own. 0 takes it out of the API at once."""


Write = Create | Patch | PatchStatus | Delete


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is to be done about a job now."""

    status: JobStatus
    """What its status is to be."""
    writes: tuple[tuple[Write, ...], ...] = ()
    """Groups in order; those of one group at once."""
    is_transition: bool = False
    """The status counts something or ends something: it is written first, alone and only over the
    version it was decided from, and what follows from it is decided anew."""
    plan: JobPlan | None = None
    """Compiled for this step, to be remembered."""
    placement: JobPlacement | None = None
    """Made for this step, to be reserved before anything else is decided and then published."""
    gives_up_room: bool = False
    """What an attempt before reserved is free for others."""
    goes_on: bool = False
    """The next step follows from this one alone: it is taken at once, and the status of both, which
    counts nothing, is written once."""
    needs_objects: bool = False
    """Pods are created or run: their Service, plan and rights must be there."""
    requeue_after_s: float | None = None
    """When to look again, if nothing happens before; None: the next resync is soon enough."""
