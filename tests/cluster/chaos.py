"""Everything at once: jobs on a control plane whose nodes, pods, API server and operators fail at
random, by a seed, until time is up. Then all is mended, and the history is held to its laws."""

import argparse
import contextlib
import itertools
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from omni_contract.names import LABEL_JOB
from tests.cluster.api import Api, ApiError, Object, wait_for
from tests.cluster.chaos_faults import FAULTS, URGENT, Fault, Grounds, NothingThere
from tests.cluster.chart import install_chart
from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.history import History, JobFact, NodeFact, PodFact
from tests.cluster.job_kind import jobs_path
from tests.cluster.jobs import job_document, name_of
from tests.cluster.laws import Breach, Facts, breaches, unfinished
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.operator_pair import OperatorPair
from tests.cluster.pods import Pods
from tests.cluster.ranks import Ranks

OUT: Final = Path(__file__).resolve().parents[2] / "out" / "chaos"
NUM_AT_ONCE: Final = 22
"""Jobs that are under way."""

_NAMESPACE: Final = "chaos"
_RELEASE: Final = "omni-system"
_GRID: Final = Grid(zones=2, blocks=2, racks=2, nodes=4, gpus=8)
_PAUSE_S: Final = (0.5, 8.0)
"""Between two faults."""
_CALM_S: Final = 300.0
"""For all jobs to be done, once nothing befalls them any more."""
_SWEEP_S: Final = 60.0
"""For the garbage collector."""
_TOKENS_OF_STEP: Final = 16 * 512
_OWNED: Final = (
    "/api/v1/pods",
    "/api/v1/configmaps",
    "/api/v1/services",
    "/api/v1/serviceaccounts",
    "/apis/rbac.authorization.k8s.io/v1/roles",
    "/apis/rbac.authorization.k8s.io/v1/rolebindings",
    "/apis/coordination.k8s.io/v1/leases",
)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """A fault that was brought about."""

    at_s: float
    """Unix seconds."""
    number: int
    fault: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a run came to."""

    seed: int
    blows: Sequence[Blow]
    facts: Facts
    """Up to the moment when all jobs were done."""
    breaches: Sequence[Breach]
    seconds: float
    """In which faults came."""

    @property
    def jobs(self) -> Sequence[JobFact]:
        """Each job as it was last."""
        return list({fact.uid: fact for fact in self.facts if isinstance(fact, JobFact)}.values())

    @property
    def longest_gap_s(self) -> float:
        """Longest time in which nothing was done to the cluster."""
        times = [blow.at_s for blow in self.blows]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

    def story(self, job: str) -> str:
        """What happened to the jobs of a name, line by line."""
        uids = {fact.uid for fact in self.facts if isinstance(fact, JobFact) and fact.name == job}
        lines = [(blow.at_s, f"## {blow.fault}: {blow.target}") for blow in self.blows]
        nodes = set[str]()
        for fact in self.facts:
            if isinstance(fact, PodFact) and fact.job_uid in uids:
                nodes.add(fact.node or "")
        for fact in self.facts:
            if (
                (isinstance(fact, JobFact) and fact.uid in uids)
                or (isinstance(fact, PodFact) and fact.job_uid in uids)
                or (isinstance(fact, NodeFact) and fact.name in nodes)
            ):
                lines.append((fact.time_s, f"{fact.version} {_shown(fact)}"))
        first_s = min((at_s for at_s, _ in lines), default=0.0)
        return "\n".join(f"{at_s - first_s:8.2f} {line}" for at_s, line in sorted(lines))

    def __str__(self) -> str:
        done = [job for job in self.jobs if job.status.holds("Completed")]
        head = (
            f"seed {self.seed}: {len(self.blows)} faults in {self.seconds:.0f} s, at most "
            f"{self.longest_gap_s:.0f} s apart; {len(self.jobs)} jobs, {len(done)} completed; "
            f"{len(self.facts)} facts, {len(self.breaches)} breaches"
        )
        return "\n".join([head, *map(str, self.breaches)])


def run(*, seed: int, minutes: float, out: Path, say: Say) -> Report:
    """One run on a control plane of its own. What is needed to understand it goes into `out`."""
    options = Options(heartbeat_s=2, node_monitor_grace_s=10, kube_api_qps=200, patience_s=90)
    out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane(options))
        nodes = Nodes(control_plane)
        nodes.add(_GRID)
        control_plane.create_namespace(_NAMESPACE)
        control_plane.create_namespace(_RELEASE)
        _create_priority(control_plane.api)
        installed = install_chart(control_plane, _RELEASE)
        history = stack.enter_context(History(control_plane.api))
        operators = stack.enter_context(OperatorPair(control_plane, installed))
        dark = set[str]()
        ranks = stack.enter_context(Ranks(control_plane.api, history, dark))
        grounds = Grounds(
            control_plane=control_plane,
            namespace=_NAMESPACE,
            nodes=nodes,
            specs={spec.name: spec for spec in _GRID},
            operators=operators,
            history=history,
            pods=Pods(control_plane.api, _NAMESPACE),
            dark=dark,
            is_over=threading.Event(),
        )
        begin_s = time.time()
        chaos = _Chaos(grounds, seed, begin_s, say)
        try:
            chaos.play(60 * minutes)
            seconds = time.time() - begin_s
            say(f"{seconds:5.0f} s  all is mended; the jobs are waited for")
            late = _wait_for_jobs(history, ranks)
            facts = history.facts()
            left = _sweep(control_plane.api)
        finally:
            for name, log in operators.logs().items():
                (out / f"{name}.log").write_text(log)
            (out / "audit.log").write_bytes(control_plane.audit_log.read_bytes())
        report = Report(
            seed=seed,
            blows=chaos.blows,
            facts=facts,
            breaches=[
                *late,
                *breaches(facts),
                *_overspent(facts, grounds.user_faults),
                *left,
                *_crashes(operators),
            ],
            seconds=seconds,
        )
    _write(report, out)
    return report


class _Chaos:
    """Brings faults about, and jobs."""

    def __init__(self, grounds: Grounds, seed: int, begin_s: float, say: Say) -> None:
        self._grounds = grounds
        self._seed = seed
        self._begin_s = begin_s
        self._say = say
        self._numbers = itertools.count()
        self._num_jobs = 0
        self._failures: list[BaseException] = []
        self.blows: list[Blow] = []
        """What was done."""

    def play(self, seconds: float) -> None:
        """Strike until time is up, then wait until all is mended."""
        draw = random.Random(self._seed)
        until_s = time.monotonic() + seconds
        with ThreadPoolExecutor(max_workers=12) as pool:
            while time.monotonic() < until_s and not self._failures:
                self._submit_jobs(draw)
                if self._num_jobs < NUM_AT_ONCE:
                    time.sleep(0.2)
                    continue
                pool.submit(self._strike, self._draw_fault(draw), next(self._numbers))
                time.sleep(draw.uniform(*_PAUSE_S))
            self._grounds.is_over.set()
        if self._failures:
            raise self._failures[0]
        self.blows.sort(key=lambda blow: blow.at_s)

    def _draw_fault(self, draw: random.Random) -> Fault:
        return draw.choices(list(FAULTS), weights=list(FAULTS.values()))[0]

    def _submit_jobs(self, draw: random.Random) -> None:
        under_way = len(self._grounds.jobs())
        while under_way < NUM_AT_ONCE:
            body = _draw_job(draw, self._num_jobs)
            self._grounds.control_plane.api.create(jobs_path(_NAMESPACE), body)
            self._num_jobs += 1
            under_way += 1
            if self._num_jobs >= NUM_AT_ONCE:
                break

    def _strike(self, fault: Fault, number: int) -> None:
        draw = random.Random(f"{self._seed}-{number}")
        try:
            for target in fault(self._grounds, draw):
                self.blows.append(
                    Blow(at_s=time.time(), number=number, fault=fault.__name__, target=target)
                )
                since_s = time.time() - self._begin_s
                self._say(f"{since_s:5.0f} s  {fault.__name__}: {target}")
        except NothingThere:
            pass
        except ApiError as exc:
            if exc.status not in (404, 409, 422):  # what it was to strike has changed meanwhile
                self._failures.append(exc)
        except BaseException as exc:
            self._failures.append(exc)


def _draw_job(draw: random.Random, number: int) -> Object:
    """A small job: some in one rack, some with a spare, some that keep their pods."""
    nodes, ranks = draw.choice(((1, 2), (1, 8), (2, 2), (2, 4), (2, 8), (4, 2), (4, 8), (8, 2)))
    topology = draw.choice(({}, {}, {"reorderGroupWithin": "rack"}, {"jobWithin": "zone"}))
    body = job_document(
        f"job-{number}",
        nodes=nodes,
        resources={"ranksPerNode": ranks, "spares": draw.choice((0, 0, 0, 1))},
        topology={**topology, "onUnsatisfied": "Relax"},
        # Faults come far more often than steps here, and none may use up a job's patience.
        restart={
            "limit": 1000,
            "infrastructureLimit": 10_000,
            "noProgressLimit": 1000,
            "nodeLostAfterSeconds": 5,
            "readyAfterSeconds": 60,
        },
        podTemplate={"terminationGraceSeconds": 10},
        keepPods=draw.choice(("None", "Failed", "All")),
    )
    body["spec"]["train"]["tokens"] = _TOKENS_OF_STEP * draw.randint(20, 50)
    body["spec"]["checkpoint"]["uri"] = f"s3://omni/runs/job-{number}"
    return body


def _create_priority(api: Api) -> None:
    body = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": URGENT},
        "value": 1_000_000,
    }
    api.create("/apis/scheduling.k8s.io/v1/priorityclasses", body)


def _wait_for_jobs(history: History, ranks: Ranks) -> list[Breach]:
    """Wait until every job is done; those that are not in time."""

    def are_done() -> bool:
        ranks.check()
        jobs = history.now("job")
        return all(job.get("status", {}).get("phase") in ("Completed", "Failed") for job in jobs)

    with contextlib.suppress(AssertionError):  # told job by job
        wait_for(are_done, "every job done", _CALM_S, every_s=1)
    return unfinished(history.facts())


def _sweep(api: Api) -> list[Breach]:
    """Delete all jobs; what is left of them, when the garbage collector had its time."""
    path = jobs_path(_NAMESPACE)
    for job in api.list(path):
        api.delete(f"{path}/{name_of(job)}")

    def orphans() -> list[Breach]:
        return [
            Breach(law="nothing outlives its job", name=name_of(raw), version=0, message=kind)
            for kind in _OWNED
            for raw in api.list(f"{kind.replace('/v1/', f'/v1/namespaces/{_NAMESPACE}/')}")
            if LABEL_JOB in raw["metadata"].get("labels", {}) or name_of(raw).startswith("job-")
        ]

    try:
        wait_for(lambda: not orphans(), "nothing left of the jobs", _SWEEP_S, every_s=1)
    except AssertionError:
        return orphans()
    return []


def _overspent(facts: Facts, injected: Mapping[str, int]) -> list[Breach]:
    """Jobs that were charged for more faults of their program than there were."""
    last = {fact.uid: fact for fact in facts if isinstance(fact, JobFact)}
    return [
        Breach(
            law="budgets pay for what happened",
            name=job.name,
            version=job.version,
            message=f"{job.status.budget.user} restarts for faults of the user's program, of which "
            f"there were {injected.get(uid, 0)}",
        )
        for uid, job in last.items()
        if job.status.budget.user > injected.get(uid, 0)
    ]


def _crashes(operators: OperatorPair) -> list[Breach]:
    return [
        Breach(law="the operator never crashes", name=name, version=0, message="see its log")
        for name, log in operators.logs().items()
        if "Traceback" in log
    ]


def _shown(fact: JobFact | PodFact | NodeFact) -> str:
    """A fact in a line."""
    gone = "" if fact.is_there else " GONE"
    ending = " ending" if fact.is_deleting else ""
    if isinstance(fact, NodeFact):
        return f"node {fact.name}: {'lost' if fact.is_lost else 'ready'}{gone}"
    if isinstance(fact, PodFact):
        gate = " gated" if fact.is_gated else ""
        where = f"on {fact.node} index {fact.index} attempt {fact.attempt}"
        return f"pod {fact.name}: {fact.phase} {fact.reason}{gate}{ending}{gone} {where}"
    status = fact.status
    told = {c.type: c for c in status.conditions}
    words = " ".join(
        f"{kind}={c.status}({c.reason})" for kind, c in told.items() if kind != "Accepted"
    )
    newest = status.incidents[-1] if status.incidents else None
    incident = "" if newest is None else f" last: {newest.fault} {newest.action} {newest.message}"
    return (
        f"job {fact.uid[:5]} {status.phase} attempt {status.attempt} step {status.progress.step} "
        f"{status.budget}{ending}{gone} {words}{incident}"
    )


def _write(report: Report, out: Path) -> None:
    with (out / "facts.jsonl").open("w") as file:
        for fact in report.facts:
            file.write(json.dumps({"kind": type(fact).__name__} | asdict(fact), default=str) + "\n")
    (out / "report.txt").write_text(f"{report}\n")
    for name in {breach.name for breach in report.breaches}:
        (out / f"{name}.txt").write_text(report.story(name))


def main() -> int:
    """Run from the command line. Returns 1 where a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=30, help="of faults (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, help="of all draws (default: a new one)")
    parser.add_argument("--out", type=Path, default=OUT, help="for logs (default: %(default)s)")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    report = run(
        seed=seed, minutes=given.minutes, out=given.out, say=lambda line: print(line, flush=True)
    )
    print(report)
    print(f"Logs and the history are in {given.out}.")
    return 1 if report.breaches else 0


if __name__ == "__main__":
    sys.exit(main())
