"""What must be true of every history of jobs, whatever befell them. Pure: it reads recorded facts
and knows neither the operator nor what was done to the cluster."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from omni_contract.status import JobStatus
from tests.cluster.history import JobFact, NodeFact, PodFact

Facts = Sequence[JobFact | PodFact | NodeFact]

FREED_WITHIN_S = 45.0
"""A finished job's pods are gone by then: what the operator, the API server, or both, may be away,
and the pods' grace period."""
BACK_WITHIN_S = 45.0
"""So long a pod may live on beside the one that replaced it, once its lost node is back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A law that did not hold."""

    law: str
    name: str
    """Of the job, or the node."""
    version: int
    message: str

    def __str__(self) -> str:
        return f"{self.law}: {self.name} at {self.version}: {self.message}"


@dataclass(slots=True, kw_only=True)
class _World:
    """All objects at one moment of the history."""

    jobs: dict[str, JobFact] = field(default_factory=dict)
    pods: dict[str, PodFact] = field(default_factory=dict)
    nodes: dict[str, NodeFact] = field(default_factory=dict)
    by_job: dict[str, dict[str, PodFact]] = field(default_factory=lambda: defaultdict(dict))
    by_node: dict[str, dict[str, PodFact]] = field(default_factory=lambda: defaultdict(dict))
    gaps: Mapping[str, Sequence[tuple[int, JobFact]]] = field(default_factory=dict)
    """By job, the versions from which on nobody was told of it, and what was found afterwards."""

    def attempt_of(self, job: JobFact, version: int) -> int:
        """The newest attempt that the status of a job may have had."""
        found = (after for since, after in self.gaps.get(job.uid, ()) if since <= version)
        return max([job.status.attempt, *(a.status.attempt for a in found if version < a.version)])

    def is_lost(self, node: str | None) -> bool:
        """Whether nobody answers for what runs on a node."""
        found = self.nodes.get(node or "")
        return node is not None and (found is None or found.is_lost)

    def see(self, fact: JobFact | PodFact | NodeFact) -> None:
        """Go on to the next moment."""
        if isinstance(fact, JobFact):
            self.jobs[fact.uid] = fact
        elif isinstance(fact, NodeFact):
            self.nodes[fact.name] = fact
        else:
            before = self.pods.get(fact.uid)
            if before is not None and before.node is not None:
                self.by_node[before.node].pop(fact.uid, None)
            self.pods[fact.uid] = fact
            if fact.node is not None and fact.is_live:
                self.by_node[fact.node][fact.uid] = fact
            if fact.job_uid is not None:
                self.by_job[fact.job_uid][fact.uid] = fact


def breaches(facts: Facts) -> list[Breach]:
    """All that is wrong with a history."""
    world, found = _World(gaps=_gaps(facts)), list[Breach]()
    doubles: dict[tuple[str, str], float | None] = {}
    for fact in facts:
        before = world.jobs.get(fact.uid) if isinstance(fact, JobFact) else None
        old = world.pods.get(fact.uid) if isinstance(fact, PodFact) else None
        world.see(fact)
        if isinstance(fact, JobFact):
            found += _goes_on(before, fact)
        elif isinstance(fact, PodFact):
            found += _belongs(world, old, fact)
            found += _fits(world, fact)
            found += _is_alone(world, old, fact, doubles)
    return found + _freed(facts) + _doubles_end(facts, doubles)


def _gaps(facts: Facts) -> Mapping[str, Sequence[tuple[int, JobFact]]]:
    """An API server that was away tells the watch of one kind again sooner than that of another."""
    last, found = dict[str, JobFact](), defaultdict[str, list[tuple[int, JobFact]]](list)
    for fact in facts:
        if isinstance(fact, JobFact):
            if fact.is_after_gap and fact.uid in last:
                found[fact.uid].append((last[fact.uid].version, fact))
            last[fact.uid] = fact
    return found


def unfinished(facts: Facts) -> list[Breach]:
    """Jobs that are neither completed nor deleted at the end."""
    last = {fact.uid: fact for fact in facts if isinstance(fact, JobFact)}
    return [
        Breach(
            law="every job completes",
            name=job.name,
            version=job.version,
            message=f"it is {job.status.phase} in attempt {job.status.attempt}",
        )
        for job in last.values()
        if job.is_there and not job.is_deleting and not job.status.holds("Completed")
    ]


def _goes_on(before: JobFact | None, now: JobFact) -> Iterator[Breach]:
    """Counters never fall, attempts come one by one, and an end is for ever."""

    def breach(law: str, message: str) -> Breach:
        return Breach(law=law, name=now.name, version=now.version, message=message)

    new = now.status
    old = JobStatus() if before is None else before.status
    for name, count in _counters(new).items():
        if count < (was := _counters(old)[name]):
            yield breach("counters never fall", f"{name} fell from {was} to {count}")
    if new.attempt == old.attempt and new.generation < old.generation:
        yield breach("counters never fall", f"generation of attempt {new.attempt} fell")
    if new.attempt > old.attempt + 1 and before is not None and not now.is_after_gap:
        yield breach("attempts come one by one", f"{old.attempt} was followed by {new.attempt}")
    if new.attempt < 1 + new.restarts and new.attempt:
        yield breach(
            "a restart opens an attempt", f"{new.restarts} restarts in attempt {new.attempt}"
        )
    spent = new.budget.user + new.budget.infrastructure
    if new.restarts != spent:
        yield breach("restarts are what was spent", f"{new.restarts} restarts, {spent} spent")
    if new.budget.without_progress > spent:
        yield breach("restarts are what was spent", "more were in vain than were made")
    for end in ("Completed", "Failed"):
        if old.holds(end) and not new.holds(end):
            yield breach("an end is for ever", f"{end} was taken back")


def _counters(status: JobStatus) -> Mapping[str, int]:
    return {
        "attempt": status.attempt,
        "restarts": status.restarts,
        "budget.user": status.budget.user,
        "budget.infrastructure": status.budget.infrastructure,
        "budget.highestStep": status.budget.highest_step,
        "progress.highestStep": status.progress.highest_step,
    }


def _belongs(world: _World, old: PodFact | None, pod: PodFact) -> Iterator[Breach]:
    """A pod's attempt is in the status before the pod is made, all pods of an attempt are there
    before a gate opens, and nothing is made for a job that is over."""
    if pod.job_uid is None or not pod.is_there or pod.job_uid not in world.jobs:
        return
    job = world.jobs[pod.job_uid]

    def breach(law: str, message: str) -> Breach:
        said = f"pod {pod.name} of attempt {pod.attempt}: {message}"
        return Breach(law=law, name=job.name, version=pod.version, message=said)

    if pod.attempt > (attempt := world.attempt_of(job, pod.version)):
        yield breach("attempts are written before their pods", f"the status has {attempt}")
    if old is None and _is_over(job):
        yield breach("an end is for ever", f"made when the job was {job.status.phase}")
    if (old is None or old.is_gated) and not pod.is_gated and not pod.is_deleting:
        # By number: a spare that takes a rank is told so in the same moment.
        made = sum(
            other.attempt == pod.attempt or (other.is_there and not other.is_gated)
            for other in world.by_job[pod.job_uid].values()
        )
        if made < job.num_nodes:
            said = f"{made} of {job.num_nodes} pods were made"
            yield breach("gates open for all at once", said)


def _fits(world: _World, pod: PodFact) -> Iterator[Breach]:
    """Pods on a node never ask for more than it has."""
    node = world.nodes.get(pod.node or "")
    if node is None or not node.is_there or not pod.is_live:
        return
    held = world.by_node[node.name].values()
    if (asked := sum(one.gpus for one in held)) > node.gpus:
        names = ", ".join(sorted(one.name for one in held if one.gpus))
        yield Breach(
            law="nodes are never overcommitted",
            name=node.name,
            version=pod.version,
            message=f"{asked} GPUs asked for of {node.gpus} by {names}",
        )


def _is_alone(
    world: _World,
    old: PodFact | None,
    pod: PodFact,
    doubles: dict[tuple[str, str], float | None],
) -> Iterator[Breach]:
    """Of one job and index only one pod may run, but for one on a lost node."""
    if pod.job_uid is None or pod.index is None or pod.is_gated or not pod.is_live:
        return
    if old is not None and not old.is_gated and old.index == pod.index:
        return  # It was looked at before.
    for other in world.by_job[pod.job_uid].values():
        if other.uid == pod.uid or other.index != pod.index or other.is_gated or not other.is_live:
            continue
        if world.is_lost(other.node):
            doubles[other.uid, pod.uid] = None
            continue
        yield Breach(
            law="one pod for each job and index",
            name=world.jobs[pod.job_uid].name if pod.job_uid in world.jobs else pod.job_uid,
            version=pod.version,
            message=f"{pod.name} was let go while {other.name} was {other.phase} on node "
            f"{other.node}, which is not lost{' (ending)' if other.is_deleting else ''}",
        )


def _doubles_end(facts: Facts, doubles: Mapping[tuple[str, str], float | None]) -> list[Breach]:
    """The pod of a lost node goes soon after its node is back."""
    world, found = _World(), []
    since: dict[tuple[str, str], float] = {}
    for fact in facts:
        world.see(fact)
        for pair in doubles:
            older, newer = (world.pods.get(uid) for uid in pair)
            if older is None or newer is None or pair in found:
                continue
            is_double = older.is_live and newer.is_live and not world.is_lost(older.node)
            if not is_double:
                since.pop(pair, None)
            elif fact.time_s - since.setdefault(pair, fact.time_s) > BACK_WITHIN_S:
                found.append(pair)
    return [
        Breach(
            law="one pod for each job and index",
            name=world.pods[older].name,
            version=world.pods[older].version,
            message=f"it still ran {BACK_WITHIN_S:.0f} s after its node was back, beside "
            f"{world.pods[newer].name}",
        )
        for older, newer in found
    ]


def _freed(facts: Facts) -> list[Breach]:
    """A job that is over holds no GPU."""
    world, found = _World(), dict[str, Breach]()
    over: dict[str, float] = {}
    watched: dict[
        str, float
    ] = {}  # live pods of jobs that are over, and since when they may not be
    for fact in facts:
        world.see(fact)
        if isinstance(fact, JobFact) and _is_over(fact) and fact.uid not in over:
            over[fact.uid] = fact.time_s
            watched |= {uid: fact.time_s for uid in world.by_job[fact.uid]}
        elif isinstance(fact, PodFact) and fact.job_uid in over:
            watched.setdefault(fact.uid, fact.time_s)
        for uid, since_s in list(watched.items()):
            pod = world.pods[uid]
            if not pod.is_live:
                del watched[uid]
            elif world.is_lost(pod.node):
                watched[uid] = fact.time_s
            elif fact.time_s - since_s > FREED_WITHIN_S and pod.job_uid is not None:
                job = world.jobs[pod.job_uid]
                del watched[uid]
                found[uid] = Breach(
                    law="finished jobs hold nothing",
                    name=job.name,
                    version=fact.version,
                    message=f"pod {pod.name} is {pod.phase} on node {pod.node} "
                    f"{fact.time_s - over[job.uid]:.0f} s after the job was {job.status.phase}",
                )
    return list(found.values())


def _is_over(job: JobFact) -> bool:
    return job.status.holds("Completed") or job.status.holds("Failed")
