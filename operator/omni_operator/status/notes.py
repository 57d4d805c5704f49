"""What is worth telling on a job as a Kubernetes Event: transitions between two statuses. Pure.

A note comes of a difference alone, so a reconcile that changes nothing tells nothing. An Event is
for people: one lost between the write of the status and its own is not sent again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from omni_contract.names import API_VERSION, KIND
from omni_contract.spec_run import RestartAction
from omni_contract.status import Condition, JobStatus, write_time
from omni_operator.state import JobState
from omni_operator.status.conditions import count

_MESSAGE_CHARACTERS: Final = 1024
"""The API server refuses a longer message."""
_REMEMBERED: Final = 4096
_COMPONENT: Final = "megascale-omni-operator"
_WARNS_WHEN_FALSE: Final = ("Accepted", "Placed", "TopologySatisfied")
_SILENT_REASONS: Final = ("Placing", "Suspended", "Completed", "Failed")
"""What every start, suspension or end goes through; an end is told by its own condition."""
_WAITS_CALMLY: Final = ("QueueWaiting", "QueueEvicted")
"""What a queue is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One thing that happened to a job."""

    reason: str
    """CamelCase, constant."""
    type: Literal["Normal", "Warning"]
    message: str


def notes_between(old: JobStatus, new: JobStatus) -> tuple[Note, ...]:
    """What happened between two statuses of a job, in the order in which it did."""
    return tuple(_incidents(old, new)) + tuple(_attempt(old, new)) + tuple(_conditions(old, new))


def _incidents(old: JobStatus, new: JobStatus) -> Iterator[Note]:
    known = {(i.attempt, i.generation, i.time) for i in old.incidents}
    for incident in new.incidents:
        if (incident.attempt, incident.generation, incident.time) in known:
            continue
        message = f"{incident.message} -> {incident.action}"
        yield Note(reason=str(incident.fault), type="Warning", message=message)


def _attempt(old: JobStatus, new: JobStatus) -> Iterator[Note]:
    if new.attempt > old.attempt:
        message = f"attempt {new.attempt} with {count(new.num_nodes or 0, 'pod')} is opened"
        restarting = new.condition("Restarting")
        if new.opened_by is not None:
            message += f" by {new.opened_by}"
            if restarting is not None and old.incidents == new.incidents:
                message = restarting.message  # It says why; else the incident's own note does.
        yield Note(reason="AttemptOpened", type="Normal", message=message)
    elif new.generation > old.generation:
        message = f"generation {new.generation} of attempt {new.attempt} was started in place"
        yield Note(reason=str(RestartAction.RESTART_IN_PLACE), type="Normal", message=message)


def _conditions(old: JobStatus, new: JobStatus) -> Iterator[Note]:
    said: Note | None = None
    for condition in new.conditions:
        before = old.condition(condition.type)
        was = (None, None) if before is None else (before.status, before.reason)
        if was == (condition.status, condition.reason):
            continue
        note = _of_condition(condition)
        # Pods that are let go as soon as they have a place waited for nothing.
        if note is None or (note.reason == "GangReady" and said and said.reason == "Placed"):
            continue
        said = note
        yield note


def _of_condition(condition: Condition) -> Note | None:
    """What a condition tells whose status or reason is new."""
    type_, holds = condition.type, condition.status == "True"
    if type_ in _WARNS_WHEN_FALSE and condition.status == "False":
        if condition.reason in _SILENT_REASONS:
            return None
        type_of_note: Literal["Normal", "Warning"] = (
            "Normal" if condition.reason in _WAITS_CALMLY else "Warning"
        )
        return Note(reason=condition.reason, type=type_of_note, message=condition.message)
    if type_ == "Degraded" and holds:
        return Note(reason=condition.reason, type="Warning", message=condition.message)
    if type_ == "Failed" and holds:
        return Note(reason="Failed", type="Warning", message=condition.message)
    if type_ == "Suspended" and condition.reason in ("Suspending", "Suspended", "Resumed"):
        return Note(reason=condition.reason, type="Normal", message=condition.message)
    if type_ in ("Placed", "GangReady", "Running", "Completed") and holds:
        return Note(reason=type_, type="Normal", message=condition.message)
    if type_ == "Restarting" and not holds and condition.reason == "Restarted":
        return Note(reason="Restarted", type="Normal", message=condition.message)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventWrite:
    """How a note reaches the API: a new Event, or one more of an Event that is there."""

    name: str
    body: Mapping[str, Any] | None = None
    """To POST; None: there is one."""
    operations: Sequence[Mapping[str, Any]] = ()
    """JSON patch of the one that is there."""


class EventBook:
    """Remembers which Events stand, so that a note told again counts one up."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def write_of(self, job: JobState, note: Note, now_s: float) -> EventWrite:
        """How to tell a note. The same note of a job has the same name at any time."""
        message = note.message[:_MESSAGE_CHARACTERS]
        said = "\0".join((job.uid, note.type, note.reason, message))
        # Another operator process names it alike: what both tell stands once.
        name = f"{job.key.name}.{hashlib.sha256(said.encode()).hexdigest()[:16]}"
        number = self._counts.get(name, 0) + 1
        self._remember(name, number)
        time = write_time(now_s).partition(".")[0] + "Z"  # metav1.Time: whole seconds
        if number > 1:
            operations = (
                {"op": "replace", "path": "/count", "value": number},
                {"op": "replace", "path": "/lastTimestamp", "value": time},
            )
            return EventWrite(name=name, operations=operations)
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.key.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": job.key.namespace,
                "name": job.key.name,
                "uid": job.uid,
                "resourceVersion": job.resource_version,
            },
            "type": note.type,
            "reason": note.reason,
            "message": message,
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": "",
            "firstTimestamp": time,
            "lastTimestamp": time,
            "count": 1,
        }
        return EventWrite(name=name, body=body)

    def forget(self, name: str) -> None:
        """The Event is gone: the API server keeps them for an hour. The next note makes it anew."""
        self._counts.pop(name, None)

    def _remember(self, name: str, number: int) -> None:
        self._counts[name] = number
        self._counts.move_to_end(name)
        while len(self._counts) > _REMEMBERED:
            self._counts.popitem(last=False)
