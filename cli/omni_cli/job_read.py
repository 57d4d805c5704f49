"""A job, its pods, placement and events as the cluster holds them now, read through kubectl."""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, Self

from pydantic import ValidationError

from omni_cli.kubectl import Kubectl, KubectlError, NotFoundError
from omni_contract import names
from omni_contract.errors import OmniError, SpecError
from omni_contract.packed import unpack
from omni_contract.placement import JobPlacement
from omni_contract.spec_run import RestartSpec
from omni_contract.status import Condition, JobStatus

JOBS: Final = f"{names.PLURAL}.{names.GROUP}"
"""The kind as kubectl finds it whatever other kinds there are."""

PodWord = Literal[
    "running", "starting", "pending", "gated", "succeeded", "failed", "terminating", "unknown"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job as kubectl showed it."""

    name: str
    namespace: str
    uid: str
    generation: int
    created: datetime
    spec: Mapping[str, Any]
    status: JobStatus

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read one. Raises OmniError where an operator of another version wrote the status."""
        metadata = raw["metadata"]
        try:
            status = JobStatus.model_validate(raw.get("status") or {})
        except ValidationError as exc:
            where = ".".join(map(str, exc.errors()[0]["loc"]))
            raise OmniError(
                f"job {metadata['name']}: status.{where} is not what this version reads; use the "
                "plugin of the operator's version"
            ) from None
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata["generation"],
            created=time_of(metadata["creationTimestamp"]),
            spec=raw["spec"],
            status=status,
        )

    def condition(self, kind: str) -> Condition | None:
        """A condition by its type."""
        return next((c for c in self.status.conditions if c.type == kind), None)

    def holds(self, kind: str) -> bool:
        """Whether a condition is True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def end(self) -> Literal["Completed", "Failed"] | None:
        """How it ended; None while it has not."""
        if self.holds("Completed"):
            return "Completed"
        return "Failed" if self.holds("Failed") else None

    @property
    def is_suspended(self) -> bool:
        """Whether its spec asks for no pods."""
        return bool(self.spec.get("suspend"))

    @property
    def limits(self) -> RestartSpec | None:
        """Its restart policy with the defaults; None where that block is wrong."""
        try:
            return RestartSpec.parse(self.spec.get("restart") or {}, path="spec.restart")
        except SpecError:
            return None

    @property
    def grace_s(self) -> int:
        """Seconds its pods have for a last checkpoint."""
        template = self.spec.get("podTemplate") or {}
        return int(template.get("terminationGraceSeconds") or 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """A pod of a job."""

    name: str
    node: str | None
    attempt: int
    """Attempt it belongs to now."""
    index: int | None
    """Node of the plan; None for a spare."""
    word: PodWord
    detail: str = ""
    """Why it waits, in the kubelet's or the scheduler's words."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read one."""
        metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
        annotations = metadata.get("annotations") or {}
        index = annotations.get(names.ANNOTATION_INDEX, "")
        return cls(
            name=metadata["name"],
            node=spec.get("nodeName"),
            attempt=int(annotations.get(names.ANNOTATION_ATTEMPT) or 0),
            index=int(index) if index else None,
            word=_word(metadata, spec, status),
            detail=_detail(status),
        )


def _word(
    metadata: Mapping[str, Any], spec: Mapping[str, Any], status: Mapping[str, Any]
) -> PodWord:
    if metadata.get("deletionTimestamp"):
        return "terminating"
    if spec.get("schedulingGates"):
        return "gated"
    phase = status.get("phase", "Pending")
    if phase == "Pending":
        return "starting" if spec.get("nodeName") else "pending"
    words: Mapping[str, PodWord] = {
        "Running": "running",
        "Succeeded": "succeeded",
        "Failed": "failed",
    }
    return words.get(phase, "unknown")


def _detail(status: Mapping[str, Any]) -> str:
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
                return str(waiting["reason"])
    return str(status.get("reason") or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """A Kubernetes Event about a job."""

    time: datetime
    """When it last happened."""
    is_warning: bool
    reason: str
    message: str
    count: int

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read one, whichever of the two ways of telling time and number its writer chose."""
        series = raw.get("series") or {}
        seen = (
            series.get("lastObservedTime")
            or raw.get("lastTimestamp")
            or raw.get("eventTime")
            or raw["metadata"]["creationTimestamp"]
        )
        return cls(
            time=time_of(seen),
            is_warning=raw.get("type") == "Warning",
            reason=raw.get("reason") or "",
            message=raw.get("message") or "",
            count=series.get("count") or raw.get("count") or 1,
        )


def time_of(text: str) -> datetime:
    """A time of the API server, such as 2026-01-01T00:00:00Z."""
    return datetime.fromisoformat(text)


def find_job(kubectl: Kubectl, name: str | None) -> JobRecord:
    """The job of this name; without one, the only job of the namespace.

    Raises KubectlError that says which jobs there are where it is none or not the only one.
    """
    if name is not None:
        try:
            return JobRecord.of(kubectl.get(JOBS, name))
        except NotFoundError as exc:
            if f'"{name}" not found' not in str(exc):
                raise
            there = _listed(kubectl.get(JOBS)["items"])
            raise NotFoundError(f"there is no job {name}{_where(kubectl)}; {there}") from None
    items = kubectl.get(JOBS)["items"]
    if len(items) == 1:
        return JobRecord.of(items[0])
    if items:
        raise KubectlError(f"say which job: {_listed(items)}")
    raise NotFoundError(
        f"there is no job{_where(kubectl)}; choose a namespace with -n (kubectl get mmtj -A "
        "lists the jobs of all)"
    )


def _where(kubectl: Kubectl) -> str:
    return f" in namespace {kubectl.namespace}" if kubectl.namespace else " in this namespace"


def _listed(items: list[dict[str, Any]]) -> str:
    found = [item["metadata"]["name"] for item in items]
    if not found:
        return "there are no jobs at all; choose a namespace with -n"
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    return f"there are {', '.join(found[:10])}{more}" if len(found) > 1 else f"there is {found[0]}"


def read_pods(kubectl: Kubectl, job: JobRecord) -> list[PodRecord]:
    """The pods of a job, those of earlier attempts included."""
    items = kubectl.get("pods", f"--selector={names.LABEL_JOB_UID}={job.uid}")["items"]
    return [PodRecord.of(item) for item in items]


def read_events(kubectl: Kubectl, job: JobRecord) -> list[EventRecord]:
    """What the operator told about a job, oldest first. Kubernetes forgets it after an hour."""
    items = kubectl.get("events", f"--field-selector=involvedObject.uid={job.uid}")["items"]
    return sorted((EventRecord.of(item) for item in items), key=lambda event: event.time)


def read_placement(kubectl: Kubectl, job: JobRecord) -> JobPlacement:
    """The rank map of the current attempt. Raises OmniError where there is none or a broken one."""
    summary = job.status.placement
    if summary is None:
        placed = job.condition("Placed")
        why = f": {placed.message}" if placed is not None and placed.message else ""
        raise OmniError(f"job {job.name} has no placement yet{why}")
    try:
        data = kubectl.get("configmap", summary.config_map).get("binaryData") or {}
    except NotFoundError:
        raise OmniError(
            f"ConfigMap {summary.config_map} with the placement of job {job.name} is gone; "
            f"kubectl mmtj restart {job.name} places it anew"
        ) from None
    try:
        text = unpack(names.PLACEMENT_FILE, {k: base64.b64decode(v) for k, v in data.items()})
        return JobPlacement.model_validate(json.loads(text))
    except (KeyError, ValueError, OSError, EOFError, zlib.error) as exc:
        raise OmniError(
            f"ConfigMap {summary.config_map} holds no placement that this version reads "
            f"({type(exc).__name__}); use the plugin of the operator's version"
        ) from None
