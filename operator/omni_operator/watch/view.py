"""What the watches said, kept by job and by node, with the room that placements reserve. No I/O.

Everything runs in one thread, the event loop's, and nothing here waits: what is read and then noted
without an `await` in between is seen by no other job's turn.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.records import JobHeartbeat
from omni_contract.status import Condition
from omni_operator.api import Raw
from omni_operator.kinds import JOB, NODE, POD, WORKLOAD, Kind
from omni_operator.state import (
    QUEUE_REASONS,
    Admission,
    JobKey,
    JobState,
    NodeState,
    Observed,
    PodState,
    Progress,
)
from omni_operator.watch.ledger import Ledger
from omni_operator.watch.observe import (
    StatusError,
    key_of,
    owner_uid,
    read_job,
    read_node,
    read_pod,
)
from omni_operator.watch.versions import Versions

Event = Literal["ADDED", "MODIFIED", "DELETED"] | None
"""Type of a watch event; None: found by a listing."""

_NOBODY: Final[frozenset[JobKey]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What one bound pod that is not over holds."""

    job_uid: str | None
    pod: str
    node: str
    requests: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reservation:
    """What a placement sets aside, by name of pod: node, and what its pod asks for."""

    attempt: int
    nodes: Mapping[str, str]
    requests: Mapping[str, int]
    counted: set[str] = field(default_factory=set)
    """Those that no pod holds yet or any more, and that are therefore in the ledger."""


class View:
    """The cluster as the operator knows it. `see_*` take what comes from the API server, in any
    order and any number of times, and return the jobs that have to look at it."""

    def __init__(self) -> None:
        self.watch_is_healthy = True
        """Whether what was seen can be taken as now."""
        self._versions = {kind: Versions() for kind in (JOB, POD, NODE, WORKLOAD)}
        self._jobs: dict[JobKey, JobState] = {}
        self._unreadable: dict[JobKey, StatusError] = {}
        self._key_of: dict[str, JobKey] = {}  # by job uid
        self._uid_at: dict[JobKey, str] = {}
        self._waiting: set[JobKey] = set()
        self._pods: dict[str, dict[str, PodState]] = {}  # by job uid, by pod uid
        self._nodes: dict[str, NodeState] = {}

        self._ledger = Ledger()
        self._claims: dict[str, _Claim] = {}  # by pod uid
        self._holders: Counter[tuple[str, str]] = Counter()  # claims by (job uid, pod name)
        self._reservations: dict[str, _Reservation] = {}
        self._released: dict[str, int] = {}  # by job uid: newest attempt that reserves no more

        self._placements: dict[str, dict[int, JobPlacement]] = {}
        self._plans: dict[str, JobPlan] = {}
        self._progress: dict[str, Progress] = {}
        self._renew_times: dict[str, str | None] = {}
        self._admissions: dict[str, Admission] = {}
        self._workloads: dict[str, Raw] = {}  # by job uid
        self._readers: Mapping[Kind, Callable[[Raw], frozenset[JobKey]]] = {
            JOB: self._see_job,
            POD: self._see_pod,
            NODE: self._see_node,
            WORKLOAD: self._see_workload,
        }

    # What the API server says.

    def see(self, kind: Kind, event: Event, raw: Raw) -> frozenset[JobKey]:
        """A job, pod, node or Workload was listed, made, changed or deleted, or is the answer to a
        write."""
        meta, versions = raw["metadata"], self._versions[kind]
        if event == "DELETED":
            return self._drop(kind, meta["uid"]) if versions.end(meta["uid"]) else _NOBODY
        if not versions.is_news(meta["uid"], meta["resourceVersion"]):
            return _NOBODY
        return self._readers[kind](raw)

    def see_job(self, event: Event, raw: Raw) -> frozenset[JobKey]:
        """`see` for a job."""
        return self.see(JOB, event, raw)

    def see_pod(self, event: Event, raw: Raw) -> frozenset[JobKey]:
        """`see` for a pod of any owner."""
        return self.see(POD, event, raw)

    def see_node(self, event: Event, raw: Raw) -> frozenset[JobKey]:
        """`see` for a node."""
        return self.see(NODE, event, raw)

    def see_listed(self, kind: Kind, uids: Collection[str], version: str) -> frozenset[JobKey]:
        """A listing of all objects of a kind at a resource version held these: the others ended
        while nobody watched."""
        keys, versions = set[JobKey](), self._versions[kind]
        for uid in versions.missing_in(uids, version):
            versions.end(uid)
            keys |= self._drop(kind, uid)
        return frozenset(keys)

    # What decisions read.

    def keys(self) -> tuple[JobKey, ...]:
        """All jobs."""
        return tuple({**self._jobs, **self._unreadable})

    def job(self, key: JobKey) -> JobState | None:
        """A job as last seen. Raises StatusError where it cannot be read."""
        if key in self._unreadable:
            raise self._unreadable[key]
        return self._jobs.get(key)

    def observe(self, key: JobKey, *, now_s: float) -> Observed | None:
        """Everything about one job; None where there is no such job. Raises StatusError.

        `nodes`, `used` and `occupied` are live and not copied, as jobs look often and nodes are
        many: they hold until the next `await`.
        """
        job = self.job(key)
        if job is None:
            return None
        uid, status = job.uid, job.status
        return Observed(
            now_s=now_s,
            job=job,
            pods=tuple(self._pods.get(uid, {}).values()),
            placement=self.placement(uid, status.attempt),
            previous=self._placement_before(uid, status.attempt),
            plan=self.plan(status.plan_hash) if status.plan_hash else None,
            progress=self._progress.get(uid),
            nodes=MappingProxyType(self._nodes),
            used=self._ledger.used_without(uid),
            occupied=self._ledger.occupied_without(uid),
            admission=self._admissions.get(uid),
            watch_is_healthy=self.watch_is_healthy,
        )

    def placement(self, uid: str, attempt: int) -> JobPlacement | None:
        """A noted placement; those of the newest two attempts of a job are kept."""
        return self._placements.get(uid, {}).get(attempt)

    def plan(self, plan_hash: str) -> JobPlan | None:
        """A noted plan."""
        return self._plans.get(plan_hash)

    def workload(self, uid: str) -> Raw | None:
        """What was asked of Kueue for a job, and what it says."""
        return self._workloads.get(uid)

    # What was decided, or read on demand.

    def note_placement(
        self, uid: str, placement: JobPlacement, *, resource: str, amount: int
    ) -> None:
        """Remember a placement. The newest of a job reserves `amount` of `resource` (0: a place as
        an occupant) on the node of each of its pods, as long as the pod does not hold it and the
        job is neither over nor suspended."""
        job = self._jobs.get(self._key_of[uid]) if uid in self._key_of else None
        if job is None:
            return  # It ended while it was read about.
        kept = self._placements.setdefault(uid, {})
        kept[placement.attempt] = placement
        for attempt in sorted(kept)[:-2]:
            del kept[attempt]
        newest = self._released.get(uid, -1)
        if (old := self._reservations.get(uid)) is not None:
            newest = max(newest, old.attempt - 1)
        if placement.attempt <= newest or not _holds_room(job):
            return
        self._unreserve(uid)
        reservation = self._reservations[uid] = _Reservation(
            attempt=placement.attempt,
            nodes={pod.name: pod.node for pod in placement.all_pods},
            requests={resource: amount} if amount else {},
        )
        for name in reservation.nodes:
            self._set_counted(uid, name)

    def release(self, uid: str) -> frozenset[JobKey]:
        """End what a job reserves, for good for the attempt it was reserved for. Returns the jobs
        that wait for room, if any was freed."""
        if (reservation := self._reservations.get(uid)) is None:
            return _NOBODY
        self._released[uid] = reservation.attempt
        self._unreserve(uid)
        return frozenset(self._waiting) if reservation.counted else _NOBODY

    def note_plan(self, plan: JobPlan) -> None:
        """Remember a plan, as long as a job runs by it."""
        self._plans[plan.hash] = plan

    def note_progress(
        self, uid: str, heartbeat: JobHeartbeat | None, renew_time: str | None, now_s: float
    ) -> None:
        """Remember what the progress Lease of a job says now. How long it has been saying so is
        judged by `now_s` alone, as clocks of machines differ, and this one may be set back."""
        if heartbeat is None or uid not in self._key_of:
            self._progress.pop(uid, None)
            return
        old, is_renewed = self._progress.get(uid), self._renew_times.get(uid) != renew_time
        self._renew_times[uid] = renew_time
        self._progress[uid] = Progress(
            heartbeat=heartbeat,
            renewed_s=now_s if old is None or is_renewed else min(old.renewed_s, now_s),
            step_since_s=min(old.step_since_s, now_s)
            if old is not None and _stage(old.heartbeat) == _stage(heartbeat)
            else now_s,
            fault_since_s=min(old.fault_since_s, now_s)
            if old is not None and _told(old.heartbeat) == _told(heartbeat)
            else now_s,
        )

    def note_admission(self, uid: str, admission: Admission | None) -> frozenset[JobKey]:
        """Remember what a queue says about a job. Returns the job where that is new."""
        if uid not in self._key_of or self._admissions.get(uid) == admission:
            return _NOBODY
        if admission is None:
            del self._admissions[uid]
        else:
            self._admissions[uid] = admission
        return self._keys_of(uid)

    def skip_blind_time(self, seconds: float) -> None:
        """Leave a time in which nothing could be seen out of how long each job has stood still."""
        for uid, progress in self._progress.items():
            self._progress[uid] = replace(
                progress,
                renewed_s=progress.renewed_s + seconds,
                step_since_s=progress.step_since_s + seconds,
                fault_since_s=progress.fault_since_s + seconds,
            )

    def forget(self, uid: str) -> None:
        """Drop what was noted about a job that is gone."""
        self._unreserve(uid)
        for noted in (
            self._placements,
            self._progress,
            self._renew_times,
            self._admissions,
            self._workloads,
            self._released,
        ):
            noted.pop(uid, None)
        self._forget_plans()

    # Inside.

    def _forget_plans(self) -> None:
        in_use = {job.status.plan_hash for job in self._jobs.values() if not _is_over(job)}
        for plan_hash in [found for found in self._plans if found not in in_use]:
            del self._plans[plan_hash]

    def _placement_before(self, uid: str, attempt: int) -> JobPlacement | None:
        kept = self._placements.get(uid, {})
        return kept[max(earlier)] if (earlier := [n for n in kept if n < attempt]) else None

    def _see_job(self, raw: Raw) -> frozenset[JobKey]:
        key, uid = key_of(raw), raw["metadata"]["uid"]
        freed = _NOBODY
        known = self._uid_at.get(key, uid)
        if known != uid:
            if not self._replaces(JOB, known, uid):
                return _NOBODY
            freed = self._drop_job(known)
        self._key_of[uid], self._uid_at[key] = key, uid
        try:
            job = read_job(raw)
        except StatusError as exc:
            # The last state that could be read stays, and with it what the job reserves.
            self._unreadable[key] = exc
            return freed | {key}
        self._unreadable.pop(key, None)
        self._jobs[key] = job
        if _waits(job):
            self._waiting.add(key)
        else:
            self._waiting.discard(key)
        if not _holds_room(job):
            freed |= self.release(uid)
        if _is_over(job) and self._placements.pop(uid, None) is not None:
            # Many that are over may be kept, and nothing of them is ever made again.
            self._forget_plans()
        return freed | {key}

    def _replaces(self, kind: Kind, known: str, uid: str) -> bool:
        """Whether an object took the place of a known one of its name; else it is the one before
        it, of which something is told late. The older one has ended, whatever more is told."""
        versions = self._versions[kind]
        is_late = versions.is_older(uid, known)
        versions.end(uid if is_late else known)
        return not is_late

    def _see_pod(self, raw: Raw) -> frozenset[JobKey]:
        pod = read_pod(raw)
        claim = None
        if pod.node is not None and not pod.is_terminal and (pod.job_uid or pod.requests):
            claim = _Claim(job_uid=pod.job_uid, pod=pod.name, node=pod.node, requests=pod.requests)
        keys = self._set_claim(pod.uid, claim)
        if pod.job_uid is None:
            return keys
        self._pods.setdefault(pod.job_uid, {})[pod.uid] = pod
        return keys | self._keys_of(pod.job_uid)

    def _see_node(self, raw: Raw) -> frozenset[JobKey]:
        node = read_node(raw)
        known = self._nodes.get(node.name, node)
        if known.uid != node.uid and not self._replaces(NODE, known.uid, node.uid):
            return _NOBODY
        if self._nodes.get(node.name) == node:
            return _NOBODY  # It only said that it is alive.
        self._nodes[node.name] = node
        return self._concerned_by(node.name)

    def _see_workload(self, raw: Raw) -> frozenset[JobKey]:
        job_uid = owner_uid(raw)
        if job_uid is None:
            return _NOBODY
        self._workloads[job_uid] = raw
        return self._keys_of(job_uid)

    def _drop(self, kind: Kind, uid: str) -> frozenset[JobKey]:
        if kind == NODE:
            gone = [node.name for node in self._nodes.values() if node.uid == uid]
            for name in gone:
                del self._nodes[name]
            return frozenset[JobKey]().union(*(self._concerned_by(name) for name in gone))
        if kind == WORKLOAD:
            owners = [n for n, raw in self._workloads.items() if raw["metadata"]["uid"] == uid]
            for job_uid in owners:
                del self._workloads[job_uid]
            return frozenset[JobKey]().union(*(self._keys_of(job_uid) for job_uid in owners))
        return self._drop_job(uid) if kind == JOB else self._drop_pod(uid)

    def _drop_job(self, uid: str) -> frozenset[JobKey]:
        key = self._key_of.pop(uid, None)
        if key is None:
            return _NOBODY
        del self._uid_at[key]
        self._jobs.pop(key, None)
        self._unreadable.pop(key, None)
        self._waiting.discard(key)
        freed = self.release(uid)
        self.forget(uid)
        return freed | {key}

    def _drop_pod(self, uid: str) -> frozenset[JobKey]:
        keys = self._set_claim(uid, None)
        for job_uid, pods in self._pods.items():
            if pods.pop(uid, None) is not None:
                keys |= self._keys_of(job_uid)
                if not pods:
                    del self._pods[job_uid]
                break
        return keys

    def _keys_of(self, job_uid: str) -> frozenset[JobKey]:
        return frozenset({self._key_of[job_uid]}) if job_uid in self._key_of else _NOBODY

    def _concerned_by(self, node: str) -> frozenset[JobKey]:
        there = (self._keys_of(uid) for uid in self._ledger.owners_on(node))
        return frozenset(self._waiting).union(*there)

    def _set_claim(self, pod_uid: str, claim: _Claim | None) -> frozenset[JobKey]:
        """Replace what a pod holds. Returns the jobs that wait for room, if any was freed."""
        old = self._claims.get(pod_uid)
        if old == claim:
            return _NOBODY
        if claim is not None:
            self._claims[pod_uid] = claim
            self._ledger.add(claim.job_uid, claim.node, claim.requests)
            self._count_holder(claim, 1)
        if old is None:
            return _NOBODY
        if claim is None:
            del self._claims[pod_uid]
        self._ledger.remove(old.job_uid, old.node, old.requests)
        is_kept = self._count_holder(old, -1)
        return frozenset(self._waiting) if claim is None and not is_kept else _NOBODY

    def _count_holder(self, claim: _Claim, change: int) -> bool:
        """Returns whether a reservation stands in for the claim."""
        if claim.job_uid is None:
            return False
        at = (claim.job_uid, claim.pod)
        self._holders[at] += change
        if not self._holders[at]:
            del self._holders[at]
        return self._set_counted(*at)

    def _set_counted(self, uid: str, pod: str) -> bool:
        """Enter a reserved place in the ledger, or take it out, as its pod holds it or not. Returns
        whether it is in."""
        reservation = self._reservations.get(uid)
        if reservation is None or pod not in reservation.nodes:
            return False
        is_due, is_counted = (uid, pod) not in self._holders, pod in reservation.counted
        if is_due and not is_counted:
            reservation.counted.add(pod)
            self._ledger.add(uid, reservation.nodes[pod], reservation.requests)
        elif is_counted and not is_due:
            reservation.counted.discard(pod)
            self._ledger.remove(uid, reservation.nodes[pod], reservation.requests)
        return is_due

    def _unreserve(self, uid: str) -> None:
        reservation = self._reservations.pop(uid, None)
        if reservation is not None:
            for pod in reservation.counted:
                self._ledger.remove(uid, reservation.nodes[pod], reservation.requests)


def _is_over(job: JobState) -> bool:
    return job.status.holds("Completed") or job.status.holds("Failed")


def _holds_room(job: JobState) -> bool:
    """Whether a job has a right to what its placement reserves."""
    conditions = {condition.type: condition for condition in job.status.conditions}
    suspended, placed = conditions.get("Suspended"), conditions.get("Placed")
    return not (
        job.is_deleting
        or _is_over(job)
        or _is_true(suspended)
        or (suspended is not None and suspended.reason == "Suspending")
        or (placed is not None and placed.reason in QUEUE_REASONS)
    )


def _waits(job: JobState) -> bool:
    """Whether free room is news for a job: it has not all its places, or not those it should."""
    conditions = {condition.type: condition for condition in job.status.conditions}
    is_whole = _is_true(conditions.get("GangReady")) and not _is_true(conditions.get("Degraded"))
    return _holds_room(job) and not is_whole


def _is_true(condition: Condition | None) -> bool:
    return condition is not None and condition.status == "True"


def _stage(heartbeat: JobHeartbeat) -> tuple[int, int, str, int]:
    return (heartbeat.attempt, heartbeat.generation, heartbeat.phase, heartbeat.step)


def _told(heartbeat: JobHeartbeat) -> tuple[int, int, str | None, str]:
    return (
        heartbeat.attempt, heartbeat.generation, heartbeat.last_fault, heartbeat.last_message,
    )  # fmt: skip
