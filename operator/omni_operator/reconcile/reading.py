"""Reads what no watch brings: placements, plans, the progress Lease, and single objects of which
the view may be behind."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from omni_contract.errors import SpecError
from omni_contract.names import ANNOTATION_ATTEMPT, ANNOTATION_PROGRESS
from omni_contract.placement import JobPlacement
from omni_contract.records import JobHeartbeat
from omni_contract.spec_run import ResourcesSpec
from omni_operator.api import Api, NotFound, Raw
from omni_operator.decisions.kueue import Workload, admission_of, bounds_of, no_queue_system
from omni_operator.faults.detect import released_since_s
from omni_operator.kinds import CONFIG_MAP, JOB, LEASE, POD, PRIORITY_CLASS, RESOURCE_FLAVOR
from omni_operator.render.names import ObjectNames
from omni_operator.render.objects import read_placement, read_plan
from omni_operator.render.pod import has_gpus
from omni_operator.state import Bounds, JobKey, JobState, Observed, PodState
from omni_operator.watch.observe import owner_uid
from omni_operator.watch.view import View

_NUM_ASKED = 16
"""Pods asked for at most before their absence is believed: it takes one that exists to disprove."""


@dataclass(slots=True, kw_only=True)
class JobMemory:
    """What this process knows of a job beside the view. Losing it costs requests only."""

    uid: str
    published: int = 0
    """Newest attempt whose placement is known to be in the API. One that was only chosen may not be
    acted upon: after a crash another one would be chosen."""
    asked: int = 0
    """Newest attempt whose placement was asked for."""
    tidied: int = 0
    """Newest attempt whose placement is of no use any more and was deleted."""
    plan_hash: str | None = None
    objects_s: float = 0.0
    """When the objects that pods need were made sure of, for that plan."""
    lease_s: float = 0.0
    """When the progress Lease was read."""
    decided_s: float = 0.0
    """How long the last decision took."""
    turn_s: float = 0.0
    """When the last look at it began, or the first of those whose steps were not told yet."""
    is_untold: bool = False
    """Steps were taken that go on, and no status tells of them yet."""
    rests_until_s: float = 0.0
    """When the job is looked at again at the soonest, by the timer of decisions."""
    status_s: float = 0.0
    """When the status was written."""
    admitted: tuple[str, ...] | None = None
    """The admission whose flavors were read."""
    bounds: Bounds = Bounds()
    """What it asks of nodes."""
    judged: int | None = None
    """Generation of the spec whose pods the API server was asked about."""
    judged_s: float = 0.0
    """When it was."""
    refusal: str = ""
    """Why it takes none of them; empty: it does."""
    trouble: str = ""
    """Why Kueue could not be asked at the last try."""
    tend_s: float = 0.0
    """It is not tried again before."""


class Reader:
    """Asks the API server and tells the view."""

    def __init__(self, *, view: View, cluster: Api) -> None:
        self._view = view
        self._cluster = cluster

    async def read_attempt(self, job: JobState, memory: JobMemory) -> None:
        """Make the placements and the plan of a job's attempt known, where they are not."""
        status = job.status
        if not status.attempt:
            return
        if memory.asked < status.attempt:
            is_there = await self.read_placement(job, status.attempt, memory)
            if not is_there and status.attempt > 1:
                await self.read_placement(job, status.attempt - 1, memory)
            memory.asked = status.attempt
        await self.read_plan(job)

    async def read_plan(self, job: JobState) -> None:
        """Make the plan of a job's attempt known, where it is not."""
        status = job.status
        if status.plan_hash is not None and self._view.plan(status.plan_hash) is None:
            name = ObjectNames.of(job).plan(status.plan_hash)
            raw = await self._cluster.get(CONFIG_MAP, job.key.namespace, name)
            if raw is not None and owner_uid(raw) == job.uid:
                self._view.note_plan(read_plan(raw))

    async def read_admission(self, job: JobState, memory: JobMemory, *, with_kueue: bool) -> None:
        """Make known what the job's queue says."""
        queue = job.raw_spec.get("queueName")
        admission = None
        if queue and not with_kueue:
            admission = no_queue_system(queue, job.status)
        elif queue:
            raw = self._view.workload(job.uid)
            workload = None if raw is None else Workload.read(raw)
            bounds, trouble = Bounds(), memory.trouble
            if workload is not None and workload.is_admitted:
                trouble = await self._read_flavors(workload, memory)
                bounds = memory.bounds
            admission = admission_of(queue, workload, bounds, trouble=trouble)
        self._view.note_admission(job.uid, admission)

    async def _read_flavors(self, workload: Workload, memory: JobMemory) -> str:
        """Read what an admission asks of nodes, once. Returns what is wrong."""
        if memory.admitted == workload.admitted_since:
            return ""
        names = workload.flavors
        found = [await self._cluster.get(RESOURCE_FLAVOR, None, name) for name in names]
        flavors = [flavor for flavor in found if flavor is not None]
        if len(flavors) < len(names):
            gone = [name for name, raw in zip(names, found, strict=True) if raw is None]
            return f"Kueue assigned ResourceFlavor {gone[0]}, which was deleted; create it again"
        memory.admitted, memory.bounds = workload.admitted_since, bounds_of(workload, flavors)
        return ""

    async def read_priority(self, name: str) -> int:
        """Value of a priority class. Raises NotFound."""
        raw = await self._cluster.get(PRIORITY_CLASS, None, name)
        if raw is None:
            message = f"there is no PriorityClass {name!r}; create it, or name another one in "
            message += "podTemplate.priorityClassName"
            raise NotFound(reason="NotFound", message=message, code=404)
        return int(raw["value"])

    async def read_progress(self, job: JobState, now_s: float) -> None:
        """Read the heartbeat of a job."""
        name = ObjectNames.of(job).progress_lease
        raw = await self._cluster.get(LEASE, job.key.namespace, name)
        beat, renewed = None, None
        if raw is not None and owner_uid(raw) == job.uid:
            text = (raw["metadata"].get("annotations") or {}).get(ANNOTATION_PROGRESS)
            renewed = (raw.get("spec") or {}).get("renewTime")
            try:
                beat = None if text is None else JobHeartbeat.model_validate_json(text)
            except ValidationError:
                beat = None  # Written by a trainer of another version: as good as silence.
        self._view.note_progress(job.uid, beat, renewed, now_s)

    async def read_job(self, job: JobState) -> frozenset[JobKey]:
        """See a job as it is now."""
        raw = await self._cluster.get(JOB, job.key.namespace, job.key.name)
        if raw is None:
            return self._view.see_job("DELETED", _end_of(job.uid))
        return self._view.see_job(None, raw)

    async def read_pods(self, observed: Observed, names: Sequence[str]) -> frozenset[JobKey]:
        """See pods as they are now, or that they are not."""
        known = {pod.name: pod.uid for pod in observed.pods}
        asked = names[:_NUM_ASKED]
        namespace = observed.job.key.namespace
        answers = await asyncio.gather(*(self._cluster.get(POD, namespace, n) for n in asked))
        keys = frozenset[JobKey]()
        for name, raw in zip(asked, answers, strict=True):
            uid = known.get(name)
            if uid is not None and (raw is None or raw["metadata"]["uid"] != uid):
                keys |= self._view.see_pod("DELETED", _end_of(uid))
            if raw is not None:
                keys |= self._view.see_pod(None, raw)
        return keys

    def note_placement(self, job: JobState, placement: JobPlacement) -> None:
        """Remember and reserve what an attempt takes."""
        resource, amount = _claim(job)
        self._view.note_placement(job.uid, placement, resource=resource, amount=amount)

    async def read_placement(self, job: JobState, attempt: int, memory: JobMemory) -> bool:
        """Go by the placement of an attempt that is in the API, if one is."""
        name = ObjectNames.of(job).placement(attempt)
        raw = await self._cluster.get(CONFIG_MAP, job.key.namespace, name)
        if raw is None or owner_uid(raw) != job.uid:
            return False
        self.note_placement(job, read_placement(raw))
        memory.published = max(memory.published, attempt)
        return True


def doubtful_pods(observed: Observed) -> Sequence[str]:
    """Pods of a released attempt that the view lacks or shows with a gate: it may be behind."""
    if observed.placement is None or released_since_s(observed) is None:
        return ()
    sound = {pod.name for pod in observed.pods if not pod.is_gated}
    return [pod.name for pod in observed.placement.all_pods if pod.name not in sound]


def attempt_of(pod: PodState) -> int:
    """The attempt that a pod belongs to by its annotation; 0 where somebody took that away."""
    text = pod.annotations.get(ANNOTATION_ATTEMPT, "")
    return int(text) if text.isdecimal() else 0


def _claim(job: JobState) -> tuple[str, int]:
    """Resource and amount that a pod of the job holds; the other fields may be wrong meanwhile."""
    try:
        resources = ResourcesSpec.parse(job.raw_spec.get("resources") or {}, path="spec.resources")
    except SpecError:
        resources = ResourcesSpec()
    amount = resources.ranks_per_node if has_gpus(resources) else 0
    return resources.gpu_resource, amount


def _end_of(uid: str) -> Raw:
    return {"metadata": {"uid": uid}}
