"""Reads jobs, pods and nodes as the API server says them into what decisions need."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, Final, Literal, cast

from pydantic import ValidationError

from omni_contract.names import GATE, GROUP, KIND
from omni_contract.status import JobStatus
from omni_operator.api import Raw
from omni_operator.state import ContainerState, JobKey, JobState, NodeState, PodState, Taint

_COUNTED: Final = frozenset({"attempt", "generation", "restarts", "budget", "activeSeconds"})
"""Fields of a status that decisions count on: guessing them would count twice or start anew."""
_SCALES: Final = {
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60,
}  # fmt: skip
_PHASES: Final = ("Pending", "Running", "Succeeded", "Failed")
_NOTHING: Final[Mapping[str, int]] = {}


class StatusError(Exception):
    """A job's status holds something this operator cannot read and must not guess. Nothing is done
    about the job then, and no condition tells it: writing one would need the rest of the status."""

    def __init__(self, key: JobKey, field: str, value: object) -> None:
        self.key = key
        super().__init__(
            f"status.{field} of job {key}: {value!r} is not what this version of the operator "
            f"writes there; run the version that wrote it, or take status.{field} out with "
            "kubectl edit --subresource=status"
        )


def read_job(raw: Raw) -> JobState:
    """A job. Raises StatusError."""
    meta = raw["metadata"]
    key = key_of(raw)
    return JobState(
        key=key,
        uid=meta["uid"],
        generation=meta.get("generation", 1),
        resource_version=meta["resourceVersion"],
        created_s=read_time(meta["creationTimestamp"]),
        is_deleting="deletionTimestamp" in meta,
        raw_spec=raw.get("spec") or {},
        annotations=meta.get("annotations") or {},
        status=read_status(key, raw.get("status") or {}),
    )


def key_of(raw: Raw) -> JobKey:
    """The key of a job."""
    meta = raw["metadata"]
    return JobKey(namespace=meta["namespace"], name=meta["name"])


def read_status(key: JobKey, raw: Raw) -> JobStatus:
    """A job's status, whichever version wrote it: a field or an item of a list that this version
    does not know how to read is left out. Raises StatusError for one that must not be guessed."""
    try:
        return JobStatus.model_validate(raw)
    except ValidationError as exc:
        rest = dict(raw)
        for at in sorted({error["loc"] for error in exc.errors()}, reverse=True, key=str):
            field = str(at[0])
            if field in _COUNTED:
                raise StatusError(key, field, raw[field]) from exc
            if len(at) > 1 and isinstance(rest.get(field), list) and isinstance(at[1], int):
                # By identity, as the items before it may be gone.
                bad = raw[field][at[1]]
                rest[field] = [item for item in rest[field] if item is not bad]
            else:
                rest.pop(field, None)
        return JobStatus.model_validate(rest)


def owner_uid(raw: Raw) -> str | None:
    """Uid of the job that controls an object. Labels are no proof: anybody can set them."""
    for owner in raw["metadata"].get("ownerReferences") or ():
        if (
            owner.get("controller")
            and owner["kind"] == KIND
            and owner["apiVersion"].startswith(f"{GROUP}/")
        ):
            return str(owner["uid"])
    return None


def read_pod(raw: Raw) -> PodState:
    """A pod; of one that no job of ours owns only what it holds."""
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    phase = status.get("phase", "Pending")
    uid = owner_uid(raw)
    base = PodState(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        created_s=read_time(meta["creationTimestamp"]),
        phase=phase if phase in _PHASES else "Unknown",
        node=spec.get("nodeName"),
        requests=read_requests(spec),
    )
    if uid is None:
        return base
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled")
    disruption = conditions.get("DisruptionTarget", {})
    return PodState(
        namespace=base.namespace,
        name=base.name,
        uid=base.uid,
        resource_version=base.resource_version,
        created_s=base.created_s,
        phase=base.phase,
        node=base.node,
        requests=base.requests,
        job_uid=uid,
        labels=meta.get("labels") or {},
        annotations=meta.get("annotations") or {},
        is_gated=any(gate["name"] == GATE for gate in spec.get("schedulingGates") or ()),
        deleting_since_s=_deleting_since(meta),
        reason=status.get("reason"),
        message=status.get("message", ""),
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        scheduled=scheduled and (scheduled["status"] == "True", *_words(scheduled)),
        disruption=(*_words(disruption), _since(disruption, base.created_s))
        if disruption.get("status") == "True"
        else None,
        containers=(
            *_read_containers(status.get("initContainerStatuses") or (), is_init=True),
            *_read_containers(status.get("containerStatuses") or (), is_init=False),
        ),
    )


def read_node(raw: Raw) -> NodeState:
    """A node."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    conditions = status.get("conditions") or ()
    ready: Raw = next((c for c in conditions if c["type"] == "Ready"), {})
    said = ready.get("status")
    return NodeState(
        name=meta["name"],
        uid=meta["uid"],
        labels=meta.get("labels") or {},
        allocatable=_extended(status.get("allocatable") or {}),
        ready=cast(Literal["True", "False"], said) if said in ("True", "False") else "Unknown",
        ready_since_s=_since(ready, read_time(meta["creationTimestamp"])),
        is_cordoned=bool(spec.get("unschedulable")),
        is_deleting="deletionTimestamp" in meta,
        taints=tuple(_read_taint(taint) for taint in spec.get("taints") or ()),
    )


def read_requests(spec: Raw) -> Mapping[str, int]:
    """Extended resources a pod holds for its whole life: those of its containers and sidecars, or
    of an init container that needs more before them."""
    sidecars: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        asked = _requests_of(container)
        if container.get("restartPolicy") == "Always":
            _add(sidecars, asked)
            _raise_to(peak, sidecars)
        elif asked:
            _raise_to(peak, {name: sidecars.get(name, 0) + n for name, n in asked.items()})
    total = dict(sidecars)
    for container in spec.get("containers") or ():
        _add(total, _requests_of(container))
    _raise_to(total, peak)
    return total or _NOTHING


def read_time(text: str) -> float:
    """Unix seconds of a time as the API server writes it."""
    return datetime.fromisoformat(text).timestamp()


def _read_containers(statuses: tuple[Raw, ...], *, is_init: bool) -> Iterator[ContainerState]:
    for status in statuses:
        state, last = status.get("state") or {}, status.get("lastState") or {}
        waiting, running = state.get("waiting") or {}, state.get("running") or {}
        over = state.get("terminated") or {}
        ended = over or last.get("terminated") or {}
        yield ContainerState(
            name=status["name"],
            is_init=is_init,
            is_ready=bool(status.get("ready")),
            is_started=bool(status.get("started")),
            restarts=status.get("restartCount", 0),
            waiting_reason=waiting.get("reason"),
            waiting_message=waiting.get("message", ""),
            running_since_s=_time_or_none(running.get("startedAt")),
            exit_code=ended.get("exitCode"),
            is_terminated=bool(over),
            reason=ended.get("reason"),
            message=ended.get("message", ""),
            finished_s=_time_or_none(ended.get("finishedAt")),
        )


def _read_taint(raw: Raw) -> Taint:
    return Taint(
        key=raw["key"],
        value=raw.get("value", ""),
        effect=raw["effect"],
        since_s=_time_or_none(raw.get("timeAdded")),
    )


def _deleting_since(meta: Raw) -> float | None:
    if "deletionTimestamp" not in meta:
        return None
    # The API server writes when the grace period is over, not when it began.
    return read_time(meta["deletionTimestamp"]) - (meta.get("deletionGracePeriodSeconds") or 0)


def _words(condition: Raw) -> tuple[str, str]:
    return condition.get("reason", ""), condition.get("message", "")


def _since(condition: Raw, otherwise: float) -> float:
    changed = _time_or_none(condition.get("lastTransitionTime"))
    return otherwise if changed is None else changed


def _time_or_none(text: str | None) -> float | None:
    return read_time(text) if text else None


def _requests_of(container: Raw) -> Mapping[str, int]:
    return _extended((container.get("resources") or {}).get("requests") or {})


def _extended(quantities: Mapping[str, Any]) -> Mapping[str, int]:
    # Native resources (cpu, memory, hugepages-2Mi, ...) have no slash.
    found = {name: _count(value) for name, value in quantities.items() if "/" in name}
    return found or _NOTHING


def _count(quantity: str | int) -> int:
    """Extended resources are whole numbers; the API server may still write 1000 as `1k`."""
    text = str(quantity)
    digits = text.rstrip("kKMGTPEi")
    return int(Decimal(digits)) * _SCALES.get(text[len(digits) :], 1)


def _add(into: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count


def _raise_to(into: dict[str, int], least: Mapping[str, int]) -> None:
    for name, count in least.items():
        into[name] = max(into.get(name, 0), count)
