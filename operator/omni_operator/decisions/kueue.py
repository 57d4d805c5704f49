"""Jobs that wait for Kueue: the Workload that asks for a job's quota, what Kueue answers in it, and
what Kueue has to be told, as its own controllers tell it for the kinds they know. Pure.

To Kueue the operator is an external framework. It never sets Kueue's finalizer on a Workload, so
that nothing of a job outlives it, even while Kueue is down.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from omni_contract.names import GROUP
from omni_contract.spec import JobSpec
from omni_contract.status import JobStatus, read_time, write_time
from omni_operator.api import Raw
from omni_operator.decisions.case import Case
from omni_operator.decisions.ending import is_over, living_pods
from omni_operator.decisions.steps import Create, Delete, Patch, PatchStatus, Write
from omni_operator.kinds import WORKLOAD
from omni_operator.render.names import ObjectNames, metadata
from omni_operator.render.pod import priority_class_of, render_template
from omni_operator.settings import Settings
from omni_operator.state import QUEUE_REASONS, Admission, Bounds, JobState
from omni_operator.status.conditions import clip

ANNOTATION_ASKS: Final = f"{GROUP}/asks"
"""On a Workload: hash of what it asks for. The API server fills defaults in, so that what it holds
cannot be compared with what was written."""
ANNOTATION_SUSPENDED: Final = f"{GROUP}/suspended"
"""On a Workload that is inactive because its job is suspended. One that Kueue or an administrator
made inactive stays so."""

_POD_SET: Final = "main"
_KEEPS_TURN: Final = ("Preempted", "NodeFailures")
"""Evictions after which a Workload may be admitted again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition of a Workload, but for its type."""

    status: str
    reason: str
    message: str = ""
    since: str = ""
    """When the status last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A Workload of a job, as far as the operator reads it."""

    raw: Raw
    conditions: Mapping[str, Condition] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: Raw) -> "Workload":
        """A Workload as the API server says it."""
        found = (raw.get("status") or {}).get("conditions") or ()
        return cls(
            raw=raw,
            conditions={
                one["type"]: Condition(
                    status=one["status"],
                    reason=one["reason"],
                    message=one.get("message", ""),
                    since=one["lastTransitionTime"],
                )
                for one in found
            },
        )

    def holds(self, type_: str) -> bool:
        """Whether a condition is True."""
        return type_ in self.conditions and self.conditions[type_].status == "True"

    def words(self, type_: str) -> str:
        """The message of a condition."""
        return self.conditions[type_].message if type_ in self.conditions else ""

    @property
    def is_usable(self) -> bool:
        """Whether quota can still come of it."""
        return "deletionTimestamp" not in self.raw["metadata"] and not self.holds("Finished")

    @property
    def is_active(self) -> bool:
        """Whether it may be admitted."""
        return bool(self.raw["spec"].get("active", True))

    @property
    def is_admitted(self) -> bool:
        """Whether its pods may run."""
        return self.is_usable and self.holds("Admitted") and not self.holds("Evicted")

    @property
    def admitted_since(self) -> tuple[str, ...]:
        """Tells one admission from another."""
        return (self.raw["metadata"]["uid"], self.conditions["Admitted"].since, *self.flavors)

    @property
    def annotations(self) -> Mapping[str, str]:
        """Its annotations."""
        return self.raw["metadata"].get("annotations") or {}

    @property
    def status(self) -> Mapping[str, Any]:
        """Its status."""
        return self.raw.get("status") or {}

    @property
    def flavors(self) -> tuple[str, ...]:
        """ResourceFlavors that it was given."""
        admission = self.status.get("admission") or {}
        sets = admission.get("podSetAssignments") or ()
        names = {name for one in sets for name in (one.get("flavors") or {}).values()}
        return tuple(sorted(names))


def bounds_of(workload: Workload, flavors: Iterable[Raw]) -> Bounds:
    """Where an admitted job may run: what its flavors and the admission checks say of nodes."""
    checks = workload.status.get("admissionChecks") or ()
    updates = [one for check in checks for one in check.get("podSetUpdates") or ()]
    specs = [flavor.get("spec") or {} for flavor in flavors]
    found = [(spec.get("nodeLabels"), spec.get("tolerations")) for spec in specs]
    found += [(update.get("nodeSelector"), update.get("tolerations")) for update in updates]
    tolerations = [toleration for _, some in found for toleration in some or ()]
    return Bounds(
        node_selector={key: value for labels, _ in found for key, value in (labels or {}).items()},
        tolerations=tuple(one for i, one in enumerate(tolerations) if one not in tolerations[:i]),
    )


def admission_of(
    queue: str, workload: Workload | None, bounds: Bounds, *, trouble: str
) -> Admission:
    """What Kueue says about a job; `trouble`: why it could not be asked, where it could not."""
    if workload is not None and workload.is_admitted and not trouble:
        return Admission(reason=None, bounds=bounds)
    if workload is not None and workload.holds("Evicted") and workload.holds("QuotaReserved"):
        words = workload.words("Evicted") or workload.conditions["Evicted"].reason
        return Admission(
            reason="QueueEvicted",
            message=f"queue {queue!r} took the job's quota back: {words}; it goes on when it is "
            "admitted again",
        )
    words = trouble or _why_pending(workload)
    return Admission(reason="QueueWaiting", message=f"queue {queue!r}: {words}")


def no_queue_system(queue: str, status: JobStatus) -> Admission | None:
    """What is said about a job with a queue where the operator serves none. One that was admitted
    before, by an operator that did, and runs, goes on."""
    placed = status.condition("Placed")
    is_held = placed is not None and placed.reason in QUEUE_REASONS
    if status.attempt and not status.holds("Suspended") and not is_held:
        return None
    return Admission(
        reason="NoQueueSystem",
        message=f"spec.queueName: {queue!r} names a queue of Kueue, but this operator runs without "
        "it; start it with --with-kueue (chart value kueue.enabled), or take queueName out",
    )


def pods_asked(spec: JobSpec) -> int:
    """Pods that hold quota; spares do as well."""
    return spec.resources.nodes + spec.resources.spares


def render_workload(
    job: JobState, spec: JobSpec, settings: Settings, *, priority: int | None
) -> Raw:
    """The Workload that asks for the quota of all pods of a job at once."""
    asked = _spec(job, spec, settings, priority=priority)
    meta = metadata(job, ObjectNames.of(job).workload)
    meta["annotations"] = {ANNOTATION_ASKS: _hash(asked)}
    return {
        "apiVersion": WORKLOAD.api_version,
        "kind": WORKLOAD.kind,
        "metadata": meta,
        "spec": {**asked, "queueName": spec.queue_name, "active": True},
    }


def needs_priority(case: Case, raw: Raw | None) -> bool:
    """Whether the value of the job's priority class has to be known: a Workload is to be made, or
    may be changed."""
    if is_over(case) or case.spec.queue_name is None:
        return False
    if raw is None:
        return _asks_first(case)
    return bool(_changes(case, Workload.read(raw), priority=None))


def tend(case: Case, raw: Raw | None, *, priority: int | None) -> tuple[Write, ...]:
    """What has to be written about the Workload of a job now; `priority`: the value of its
    priority class, where `needs_priority`."""
    observed, spec, settings = case.observed, case.spec, case.settings
    job = observed.job
    if raw is None:
        if not _asks_first(case):
            return ()
        body = render_workload(job, spec, settings, priority=priority)
        return (Create(kind=WORKLOAD, body=body),)
    workload = Workload.read(raw)
    name, uid = raw["metadata"]["name"], raw["metadata"]["uid"]
    if "deletionTimestamp" in raw["metadata"]:
        return ()
    if not is_over(case):
        is_spent = workload.holds("Finished") and not living_pods(case)
        if spec.queue_name is None or is_spent:
            return (Delete(kind=WORKLOAD, name=name, uid=uid),)
        if operations := _changes(case, workload, priority=priority):
            test = {"op": "test", "path": "/metadata/uid", "value": uid}
            return (Patch(kind=WORKLOAD, name=name, uid=uid, operations=[test, *operations]),)
    status = _news(case, workload)
    if status is None:
        return ()
    version = raw["metadata"]["resourceVersion"]
    return (PatchStatus(kind=WORKLOAD, name=name, resource_version=version, status=status),)


def _asks_first(case: Case) -> bool:
    """Whether a Workload is to be made. Not while pods of a time before still hold something: Kueue
    does not count them and would give their room away."""
    is_asked = case.spec.queue_name is not None and not case.spec.suspend and not is_over(case)
    return is_asked and not living_pods(case)


def _why_pending(workload: Workload | None) -> str:
    if workload is None:
        return "Kueue is being asked for quota"
    if not workload.is_usable:
        return "the job's Workload is over or being deleted; a new one is made"
    if not workload.is_active:
        why = workload.words("Evicted")
        return (
            f"the job's Workload was made inactive{f' ({why})' if why else ''}; set its "
            "spec.active to true, or suspend and resume the job"
        )
    if workload.holds("QuotaReserved"):
        checks = workload.status.get("admissionChecks") or ()
        waits = [one for one in checks if one["state"] != "Ready"]
        said = ", ".join(f"{one['name']} {one.get('message', '')}".strip() for one in waits)
        return f"quota is reserved; admission checks are not ready: {said}"
    return workload.words("QuotaReserved") or "Kueue has not said anything about the job yet"


def _spec(
    job: JobState, spec: JobSpec, settings: Settings, *, priority: int | None
) -> dict[str, Any]:
    """What a Workload asks for, but for the queue."""
    template = render_template(job, spec, settings)
    asked: dict[str, Any] = {
        "podSets": [{"name": _POD_SET, "count": pods_asked(spec), "template": template}]
    }
    name = priority_class_of(spec, settings)
    if name is not None:
        reference = {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": name}
        asked |= {"priorityClassRef": reference, "priority": priority}
    return asked


def _hash(asked: Mapping[str, Any]) -> str:
    # The value of a class never changes, and is not read at every look.
    kept = {key: value for key, value in asked.items() if key != "priority"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def _changes(case: Case, workload: Workload, *, priority: int | None) -> list[dict[str, Any]]:
    """What in a Workload's spec is not as the job asks. While it holds quota Kueue lets only
    `active` change; the rest follows when it waits again."""
    spec, raw = case.spec, workload.raw
    changes: list[dict[str, Any]] = []
    annotations = dict(workload.annotations)
    if spec.suspend and workload.is_active:
        changes.append({"op": "add", "path": "/spec/active", "value": False})
        annotations[ANNOTATION_SUSPENDED] = "true"
    elif not spec.suspend and ANNOTATION_SUSPENDED in annotations:
        changes.append({"op": "add", "path": "/spec/active", "value": True})
        del annotations[ANNOTATION_SUSPENDED]
    if not workload.holds("QuotaReserved"):
        if raw["spec"].get("queueName") != spec.queue_name:
            changes.append({"op": "add", "path": "/spec/queueName", "value": spec.queue_name})
        asked = _spec(case.observed.job, spec, case.settings, priority=priority)
        if annotations.get(ANNOTATION_ASKS) != _hash(asked):
            annotations[ANNOTATION_ASKS] = _hash(asked)
            for key in ("podSets", "priorityClassRef", "priority"):
                if key in asked:
                    changes.append({"op": "add", "path": f"/spec/{key}", "value": asked[key]})
                elif key in raw["spec"]:
                    changes.append({"op": "remove", "path": f"/spec/{key}"})
    if annotations != workload.annotations:
        changes.append({"op": "add", "path": "/metadata/annotations", "value": annotations})
    return changes


def _news(case: Case, workload: Workload) -> dict[str, Any] | None:
    """What Kueue does not know yet, as a merge patch of the Workload's status."""
    news: dict[str, Any] = {}
    told: dict[str, Condition] = {}
    if not workload.holds("Finished"):
        told["PodsReady"] = _pods_ready(case, workload)
        if not living_pods(case):
            # Before that the pods hold what Kueue would give to others.
            if is_over(case):
                told["Finished"] = _finished(case)
            elif workload.holds("Evicted") and workload.holds("QuotaReserved"):
                news = {"admission": None}
                told |= _returned(workload)
                news |= _time_admitted(workload, case.observed.now_s)
    old = workload.conditions
    changed = {
        type_: condition
        for type_, condition in told.items()
        if type_ not in old
        or (old[type_].status, old[type_].reason) != (condition.status, condition.reason)
    }
    if not changed and not news:
        return None
    now = write_time(case.observed.now_s)
    conditions = {one["type"]: one for one in workload.status.get("conditions") or ()}
    for type_, condition in changed.items():
        is_turned = type_ not in old or old[type_].status != condition.status
        conditions[type_] = {
            "type": type_,
            "status": condition.status,
            "reason": condition.reason,
            "message": clip(condition.message),
            "lastTransitionTime": now if is_turned else old[type_].since,
            "observedGeneration": workload.raw["metadata"].get("generation", 1),
        }
    return news | {"conditions": list(conditions.values())}


def _pods_ready(case: Case, workload: Workload) -> Condition:
    before = workload.conditions.get("PodsReady")
    was_ready = before is not None and (
        before.status == "True" or before.reason in ("WaitForRecovery", "Recovered")
    )
    if case.status.holds("Running") or case.status.holds("Completed"):
        recovered = before is not None and before.reason in ("WaitForRecovery", "Recovered")
        reason = "Recovered" if recovered else "Started"
        return Condition(status="True", reason=reason, message="all pods of the job run")
    reason = "WaitForRecovery" if workload.is_admitted and was_ready else "WaitForStart"
    return Condition(status="False", reason=reason, message="not all pods of the job run")


def _finished(case: Case) -> Condition:
    for type_, reason in (("Completed", "Succeeded"), ("Failed", "Failed")):
        condition = case.status.condition(type_)
        if condition is not None and condition.status == "True":
            return Condition(status="True", reason=reason, message=condition.message)
    raise AssertionError("only a job that is over is finished")


def _returned(workload: Workload) -> dict[str, Condition]:
    """The pods are gone: an evicted Workload gives its quota back, and waits again."""
    evicted = workload.conditions["Evicted"]
    keeps_turn = "True" if evicted.reason in _KEEPS_TURN else "False"
    told = {
        "QuotaReserved": Condition(status="False", reason="Pending", message=evicted.message),
        "Requeued": Condition(status=keeps_turn, reason=evicted.reason, message=evicted.message),
    }
    if workload.holds("Admitted"):
        checks = workload.status.get("admissionChecks") or ()
        is_ready = all(one["state"] == "Ready" for one in checks)
        told["Admitted"] = Condition(
            status="False",
            reason="NoReservation" if is_ready else "NoReservationUnsatisfiedChecks",
            message="The workload has no reservation",
        )
    return told


def _time_admitted(workload: Workload, now_s: float) -> dict[str, int]:
    """Kueue adds up how long a Workload was admitted."""
    if not workload.holds("Admitted"):
        return {}
    key = "accumulatedPastExecutionTimeSeconds"
    past = workload.status.get(key) or 0
    return {key: past + max(0, int(now_s - read_time(workload.conditions["Admitted"].since)))}
