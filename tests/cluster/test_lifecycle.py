"""What users and clusters do to jobs, on the real control plane with the operator as a process.
Each story is a case; most of them are played side by side."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest

from omni_contract.names import ANNOTATION_RESTART, LABEL_JOB, TRAINER_CONTAINER
from omni_contract.spec_run import FaultClass, RestartAction
from tests.cluster.api import Api, Object, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.history import History, JobFact, PodFact
from tests.cluster.job_kind import jobs_path
from tests.cluster.jobs import (
    RANKS_PER_NODE,
    JobHandle,
    attempt_of,
    index_of,
    is_gated,
    job_document,
    name_of,
    uid_of,
)
from tests.cluster.nodes import GPU, LABEL_LEAF, Grid, Nodes
from tests.cluster.operators import OperatorProcess, running_operator
from tests.cluster.stories import Seen, Story, Wait, play, returned

LABEL_POOL: Final = "test.megascale-omni.dev/pool"
WITHIN_S: Final = 90.0
NAMESPACE: Final = "lifecycle"
_GRACE_S: Final = 77
_OWNED: Final = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/serviceaccounts",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a story is played: nodes of its own in one namespace for all."""

    name: str
    api: Api
    nodes: Nodes
    node_names: list[str]
    seen: Seen
    operator: OperatorProcess
    control_plane: ControlPlane

    def job(self, name: str = "") -> JobHandle:
        """A job of the story, by the end of its name."""
        return JobHandle(self.api, NAMESPACE, self.name + name, seen=self.seen)

    def document(self, *, nodes: int = 2, **spec: Any) -> Object:
        """A job on the nodes of the story."""
        template = {"nodeSelector": {LABEL_POOL: self.name}, **spec.pop("podTemplate", {})}
        restart = {"nodeLostAfterSeconds": 2, **spec.pop("restart", {})}
        return job_document(self.name, nodes=nodes, podTemplate=template, restart=restart, **spec)

    def fill(self, node: str) -> str:
        """A pod of somebody else takes a node's GPUs, past the scheduler."""
        name = f"foreign-{node}"
        limits = {"limits": {GPU: str(RANKS_PER_NODE)}, "requests": {GPU: str(RANKS_PER_NODE)}}
        container = {"name": "main", "image": "other:1", "resources": limits}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"nodeName": node, "containers": [container]},
        }
        self.job().act.create(pod)
        return name

    def left_of(self, job: str) -> list[str]:
        """All that is in the API of a job and its own."""
        return [
            f"{path.rsplit('/', 1)[1]}/{name_of(found)}"
            for path in _OWNED
            for found in self.api.list(path.format(NAMESPACE), labelSelector=f"{LABEL_JOB}={job}")
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A story and the nodes it wants."""

    play: Callable[[Scene], Story[None]]
    nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the story, as tests are named."""
        return self.play.__name__

    @property
    def short(self) -> str:
        """Of its jobs and nodes."""
        return f"s{CASES.index(self)}"


CASES: Final[list[Case]] = []


def story(
    **nodes: int,
) -> Callable[[Callable[[Scene], Story[None]]], Callable[[Scene], Story[None]]]:
    """Have a story played, on a grid of nodes of its own."""

    def register(function: Callable[[Scene], Story[None]]) -> Callable[[Scene], Story[None]]:
        CASES.append(Case(play=function, nodes=nodes))
        return function

    return register


def until(what: str, is_so: Callable[[], object], within_s: float = WITHIN_S) -> Wait:
    """Wait for something."""
    return Wait(what=what, is_so=is_so, within_s=within_s)


def running(job: JobHandle, attempt: int = 1) -> Wait:
    """Wait until a job runs in an attempt of at least this number."""

    def is_so() -> bool:
        return job.exists() and job.status.attempt >= attempt and job.status.holds("Running")

    return until(f"{job.name} running in attempt {attempt}", is_so)


def in_phase(job: JobHandle, phase: str) -> Wait:
    """Wait for a phase."""
    return until(f"{job.name} {phase}", lambda: job.is_phase(phase))


def uids(job: JobHandle) -> Mapping[int | None, str]:
    """Living pods by index."""
    return {index_of(pod): uid_of(pod) for pod in job.living}


@story(nodes=3)
def c31_a_dead_node_whose_pods_terminate_for_ever_holds_up_nothing(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    lost = job.pod(1)
    scene.nodes.kill(lost["spec"]["nodeName"])
    yield running(job, 2)
    assert job.status.incidents[-1].fault is FaultClass.NODE_LOST
    assert job.node_of[1] != lost["spec"]["nodeName"]
    yield until("the old pod gone", lambda: name_of(lost) not in map(name_of, job.pods))
    job.complete()
    yield in_phase(job, "Completed")
    yield until("no pod left", lambda: not job.pods)


@story(nodes=2)
def c32_one_slot_stolen_withdraws_the_whole_attempt(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    for pod in job.living:
        job.act.stick(name_of(pod))
    job.patch({"metadata": {"annotations": {ANNOTATION_RESTART: "1"}}})
    yield until("the gang held", lambda: job.reason("GangReady") == "WaitingForOldPods")
    filler = scene.fill(scene.node_names[1])
    yield until("a new attempt", lambda: job.status.attempt >= 3)
    for pod in job.act.list(f"{LABEL_JOB}={job.name}"):
        job.act.unstick(name_of(pod))
    yield until("nothing held", lambda: not job.pods and job.reason("Placed") == "NotEnoughNodes")
    assert job.status.incidents[-1].fault is FaultClass.PENDING_TIMEOUT
    assert job.status.restarts == 0
    job.act.delete(filler, grace_s=0)
    yield running(job, 3)


@story(nodes=3)
def c33_no_gate_opens_while_a_pod_of_the_attempt_before_lives(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    old = job.pod(0)
    job.act.terminate_slowly(name_of(old), 5)
    job.patch({"metadata": {"annotations": {ANNOTATION_RESTART: "1"}}})
    early: list[str] = []

    def is_old_gone() -> bool:
        there = {uid_of(pod) for pod in job.pods}
        new = [pod for pod in job.pods if attempt_of(pod) == 2]
        if uid_of(old) in there:
            early.extend(name_of(pod) for pod in new if not is_gated(pod))
        return uid_of(old) not in there

    yield until("the old pod gone", is_old_gone)
    yield running(job, 2)
    assert early == []


@story(nodes=2)
def c34_a_finished_job_stays_finished_when_its_pods_are_deleted(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(keepPods="All"))
    yield running(job)
    job.complete()
    yield in_phase(job, "Completed")
    assert {pod["status"]["phase"] for pod in job.pods} == {"Succeeded"}
    job.act.delete(*map(name_of, job.pods))
    job.patch({"metadata": {"annotations": {ANNOTATION_RESTART: "1"}}})
    began_s = time.monotonic()
    yield until("some seconds over", lambda: time.monotonic() > began_s + 5)
    assert job.pods == [] and job.status.phase == "Completed" and job.status.attempt == 1


@story(racks=2, nodes=3)
def c36_a_replacement_stays_in_its_rack_and_then_the_group_moves(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"reorderGroupWithin": "rack", "jobWithin": "rack"}))
    racks = {
        name: scene.api.get(f"/api/v1/nodes/{name}")["metadata"]["labels"][LABEL_LEAF]
        for name in scene.node_names
    }
    yield running(job)
    (rack,) = {racks[node] for node in job.node_of.values()}
    kept = job.pod(0)
    scene.nodes.remove(job.node_of[1])
    yield running(job, 2)
    assert {racks[node] for node in job.node_of.values()} == {rack}
    assert uid_of(job.pod(0)) == uid_of(kept)
    scene.nodes.remove(job.node_of[1])
    yield running(job, 3)
    (other,) = {racks[node] for node in job.node_of.values()}
    assert other != rack
    assert job.status.holds("TopologySatisfied")


@story(nodes=5)
def c37_rank_r_runs_where_the_plan_says_also_after_a_replacement(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(nodes=4))
    yield running(job)
    for attempt in (1, 2):
        yield running(job, attempt)
        planned = {index: pod.node for index, pod in enumerate(job.placement.pods)}
        assert job.node_of == planned
        if attempt == 1:
            scene.nodes.remove(job.node_of[2])


@story(nodes=5)
def c39_a_pod_deleted_by_hand_takes_its_group_along(scene: Scene) -> Story[None]:
    job = scene.job()
    body = scene.document(nodes=4)
    body["spec"]["data"]["reorder"] = {"groupReplicas": 2}
    job.create(body)
    yield running(job)
    before, units = uids(job), job.placement.units
    (unit,) = (unit for unit in units if 1 in unit)
    assert 1 < len(unit) < 4
    job.act.delete(name_of(job.pod(1)))
    yield running(job, 2)
    kept = {index for index, uid in uids(job).items() if before[index] == uid}
    assert kept == set(range(4)) - set(unit)
    assert job.status.incidents[-1].action is RestartAction.RESTART_GROUP


@story(nodes=2)
def a_suspended_job_gets_its_grace_and_resumes_without_being_counted(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(podTemplate={"terminationGraceSeconds": _GRACE_S}))
    yield running(job)
    slow = job.pod(1)
    job.act.terminate_slowly(name_of(slow), 4)
    job.patch({"spec": {"suspend": True}})
    yield until("it ends", lambda: uid_of(slow) not in uids(job).values())
    (ending,) = (pod for pod in job.pods if uid_of(pod) == uid_of(slow))
    assert ending["metadata"]["deletionGracePeriodSeconds"] == _GRACE_S
    assert job.reason("Suspended") == "Suspending" and not job.status.holds("Suspended")
    yield in_phase(job, "Suspended")
    assert job.pods == [] and not job.status.holds("Running")
    job.patch({"spec": {"suspend": False}})
    yield running(job, 2)
    assert job.status.restarts == 0 and job.status.incidents == []
    assert job.status.phase == "Running"


@story(nodes=2)
def a_finished_job_is_deleted_after_its_time_with_all_it_owned(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(ttlSecondsAfterFinished=2))
    yield running(job)
    assert len(scene.left_of(job.name)) >= 8
    job.complete()
    yield until("the job gone", lambda: not job.exists())
    yield until("all of it gone", lambda: not scene.left_of(job.name))


@story(nodes=2)
def a_job_that_runs_too_long_fails_and_frees_its_nodes(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(activeDeadlineSeconds=3))
    yield running(job)
    yield in_phase(job, "Failed")
    assert job.reason("Failed") == "DeadlineExceeded"
    yield until("no pod left", lambda: not job.pods)


@story(nodes=2)
def pods_of_a_failed_job_are_kept_only_where_they_are_asked_for(scene: Scene) -> Story[None]:
    kept, gone = scene.job("-kept"), scene.job("-gone")
    for job, keep in ((kept, "Failed"), (gone, "None")):
        job.create(scene.document(keepPods=keep, restart={"limit": 0}))
        yield running(job)
        job.act.end_container(name_of(job.pod(1)), exit_code=1, container=TRAINER_CONTAINER)
        yield in_phase(job, "Failed")
        yield until("no GPU held", lambda job=job: not job.living)  # type: ignore[misc]
    yield until("no pod kept", lambda: not gone.pods)
    assert [index_of(pod) for pod in kept.pods] == [1]


@story(nodes=3)
def a_job_that_may_shrink_runs_on_the_nodes_there_are(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(nodes=4, topology={"onUnsatisfied": "Shrink"}))
    yield running(job)
    assert job.status.num_nodes == 2 and len(job.living) == 2
    assert job.raw["spec"]["batch"]["globalSequences"] == 16


@story(racks=2, nodes=1)
def a_job_that_may_relax_says_that_its_topology_is_not_met(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "rack", "onUnsatisfied": "Relax"}))
    yield running(job)
    assert job.reason("TopologySatisfied") == "Relaxed"


@story(racks=2, nodes=1)
def a_job_that_may_not_wait_fails_with_the_reason(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "rack", "onUnsatisfied": "Fail"}))
    yield in_phase(job, "Failed")
    assert "onUnsatisfied is Fail" in job.message("Failed")
    assert job.pods == []


@story(nodes=2)
def an_unknown_level_is_told_and_waited_for(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "hall"}))
    yield until("it said so", lambda: "hall" in job.message("Placed"))
    assert job.pods == [] and not job.status.holds("Placed") and job.status.phase == "Pending"


@story(nodes=3)
def a_drained_node_moves_its_pod_once_and_costs_nothing(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    pod = job.pod(1)
    job.act.terminate_slowly(name_of(pod), 3)
    scene.nodes.cordon(pod["spec"]["nodeName"])
    job.act.evict(name_of(pod))
    yield running(job, 2)
    began_s = time.monotonic()
    yield until("some seconds over", lambda: time.monotonic() > began_s + 5)
    assert job.status.attempt == 2 and job.status.restarts == 0
    assert len(job.status.incidents) == 1
    assert job.node_of[1] != pod["spec"]["nodeName"]


@story(nodes=2)
def c40_a_restart_that_is_asked_for_happens_once_and_is_not_counted(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    before = uids(job)
    job.patch({"metadata": {"annotations": {ANNOTATION_RESTART: "please"}}})
    yield running(job, 2)
    began_s = time.monotonic()
    yield until("some seconds over", lambda: time.monotonic() > began_s + 5)
    assert not set(before.values()) & set(uids(job).values())
    status = job.status
    assert (status.attempt, status.restarts, status.restart_handled) == (2, 0, "please")


@story(nodes=2)
def a_quiet_job_has_nothing_written(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    yield from _some_seconds(10)
    began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    yield from _some_seconds(30)
    assert _writes_about(scene, job.name, since=began) == []


@story(nodes=2)
def a_job_deleted_in_any_phase_leaves_nothing(scene: Scene) -> Story[None]:
    def dies(job: JobHandle) -> Story[None]:
        job.delete()
        yield until(f"{job.name} gone", lambda: not job.exists())
        yield until(f"all of {job.name} gone", lambda: not scene.left_of(job.name))

    job = scene.job("-waits")
    job.create(scene.document(nodes=4))
    yield until("it waits", lambda: job.reason("Placed") == "NotEnoughNodes")
    yield from dies(job)
    for phase in ("Starting", "Running", "Restarting", "Suspended", "Completed", "Failed"):
        job = scene.job(f"-{phase.lower()}")
        job.create(scene.document(keepPods="All", restart={"limit": 0}))
        if phase == "Starting":
            yield until("placed", lambda job=job: job.status.holds("Placed"))  # type: ignore[misc]
            yield from dies(job)
            continue
        yield running(job)
        pod = name_of(job.pod(1))
        if phase == "Restarting":
            job.act.stick(pod)
            job.act.delete(pod)
            yield until("new", lambda job=job: job.status.attempt == 2)  # type: ignore[misc]
        elif phase == "Suspended":
            job.patch({"spec": {"suspend": True}})
        elif phase == "Completed":
            job.complete()
        elif phase == "Failed":
            job.act.end_container(pod, exit_code=1, container=TRAINER_CONTAINER)
        yield in_phase(job, phase)
        job.delete()
        for left in job.act.list(f"{LABEL_JOB}={job.name}"):
            job.act.unstick(name_of(left))
        yield from dies(job)


@story(nodes=3)
def of_two_jobs_that_want_the_same_nodes_none_holds_half(scene: Scene) -> Story[None]:
    jobs = scene.job("-a"), scene.job("-b")
    for job in jobs:
        job.create(scene.document())
    halves: list[str] = []

    def is_one_running() -> bool:
        bound = [sum("nodeName" in pod["spec"] for pod in job.living) for job in jobs]
        if all(bound):
            halves.append(f"{bound}")
        return any(job.status.holds("Running") for job in jobs)

    yield until("one running", is_one_running)
    yield from _some_seconds(3)
    (first,) = (job for job in jobs if job.status.holds("Running"))
    (second,) = (job for job in jobs if job is not first)
    assert halves == [] and second.pods == []
    first.complete()
    yield running(second)


@story(nodes=3)
def a_spare_takes_the_rank_of_a_pod_whose_node_is_gone(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(resources={"spares": 1}))
    yield running(job)
    yield until("the spare runs", lambda: len(job.living) == 3)
    spare = job.pod(None)
    scene.nodes.remove(job.node_of[1])
    yield running(job, 2)
    assert uid_of(job.pod(1)) == uid_of(spare)
    job.complete()
    yield in_phase(job, "Completed")
    yield until("the spare gone", lambda: not job.living)


@story(nodes=2)
def a_job_of_the_same_name_that_comes_later_is_another_one(scene: Scene) -> Story[None]:
    job = scene.job()
    seen = set()
    for _ in range(2):
        job.create(scene.document())
        yield running(job)
        assert job.status.attempt == 1
        seen.add(job.uid5)
        assert all(job.uid5 in name_of(pod) for pod in job.living)
        job.delete()
        yield until("the job gone", lambda: not job.exists())
    assert len(seen) == 2


@story(nodes=2)
def a_fault_that_comes_back_without_a_step_is_answered_dearer(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(restart={"limit": 9, "noProgressLimit": 3}))
    for attempt in itertools.count(1):
        yield until("an answer", lambda n=attempt: job.is_phase("Failed") or _runs(job, n))  # type: ignore[misc]
        if job.is_phase("Failed"):
            break
        job.act.end_container(name_of(job.pod(1)), exit_code=1, container=TRAINER_CONTAINER)
    done = [incident.action for incident in job.status.incidents]
    assert done == [
        RestartAction.REPLACE_POD,
        RestartAction.RESTART_GROUP,
        RestartAction.RESTART_JOB,
        RestartAction.FAIL_JOB,
    ]
    assert job.reason("Failed") == "NoProgress"


def _runs(job: JobHandle, attempt: int) -> bool:
    return job.status.attempt == attempt and job.status.holds("Running")


def _some_seconds(seconds: float) -> Story[None]:
    until_s = time.monotonic() + seconds
    yield until("some seconds over", lambda: time.monotonic() > until_s, seconds + WITHIN_S)


def _writes_about(scene: Scene, job: str, *, since: str) -> list[str]:
    """What the operator wrote about a job since then, by the API server's audit log."""
    found = []
    for line in scene.control_plane.audit_log.read_text().splitlines():
        if scene.operator.user not in line or f"{job}" not in line:
            continue
        event = json.loads(line)
        name = event.get("objectRef", {}).get("name", "")
        is_ours = name == job or name.startswith(f"{job}-")
        is_write = event["verb"] not in ("get", "list", "watch")
        if is_ours and is_write and event["requestReceivedTimestamp"] > since:
            found.append(f"{event['verb']} {event['requestURI']}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """All stories, as they came out."""

    ends: Mapping[str, object]
    history: History


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane) -> Iterator[OperatorProcess]:
    """One for all stories."""
    control_plane.create_namespace(NAMESPACE)
    with running_operator(control_plane, NAMESPACE) as process:
        yield process
    control_plane.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


@pytest.fixture(scope="module")
def played(
    control_plane: ControlPlane, operator: OperatorProcess, request: pytest.FixtureRequest
) -> Iterator[Played]:
    """All stories that are asked for, played at once."""
    asked = {item.name for item in request.session.items}
    cases = [case for case in CASES if any(f"[{case.name}]" in name for name in asked)]
    api, seen = control_plane.api, Seen(control_plane.api, NAMESPACE)
    with Nodes(control_plane) as nodes, History(api) as history:
        stories = {}
        for case in cases:
            grid = Grid(**case.nodes, gpus=RANKS_PER_NODE, name=case.short)  # type: ignore[arg-type]
            names = nodes.add(
                replace(spec, labels={**spec.labels, LABEL_POOL: case.short}) for spec in grid
            )
            scene = Scene(
                name=case.short,
                api=api,
                nodes=nodes,
                node_names=names,
                seen=seen,
                operator=operator,
                control_plane=control_plane,
            )
            stories[case.name] = _told(case.play(scene), scene)
        ends = play(stories, seen, num_at_once=len(stories))
        yield Played(ends=ends, history=history)
        for job in api.list(jobs_path(NAMESPACE)):
            JobHandle(api, NAMESPACE, name_of(job)).delete()


def _told(story: Story[None], scene: Scene) -> Story[None]:
    """A story that shows its jobs where it fails."""
    try:
        yield from story
    except AssertionError as exc:
        names = [name_of(job) for job in scene.seen.jobs]
        names = [name for name in names if name.split("-")[0] == scene.name]
        told = [JobHandle(scene.api, NAMESPACE, name).describe() for name in names]
        raise AssertionError("\n".join([str(exc), *told])) from exc


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_story(case: Case, played: Played) -> None:
    returned(played.ends[case.name])


def test_c35_no_job_is_said_to_run_while_a_pod_of_it_pends(played: Played) -> None:
    """At every moment of the watch history."""
    pods: dict[str, PodFact] = {}
    wrong, num_running = [], 0
    for fact in played.history.facts():
        if isinstance(fact, PodFact):
            pods[fact.uid] = fact
        elif isinstance(fact, JobFact) and fact.is_there and fact.status.holds("Running"):
            num_running += 1
            status = fact.status
            assert status.phase in ("Running", "Restarting"), fact
            wrong += [
                f"{fact.name} attempt {status.attempt}: {pod.name} {pod.phase}"
                for pod in pods.values()
                if pod.job_uid == fact.uid
                and pod.is_there
                and pod.index is not None
                and pod.attempt == status.attempt
                and pod.phase == "Pending"
            ]
    assert num_running > 0
    assert wrong == []


@pytest.fixture
def lone(
    control_plane: ControlPlane, operator: OperatorProcess, nodes: Nodes
) -> Callable[[str], tuple[JobHandle, Object]]:
    """A job on three nodes for a test that breaks more than the job."""

    def make(name: str) -> tuple[JobHandle, Object]:
        nodes.add(
            replace(spec, labels={**spec.labels, LABEL_POOL: name})
            for spec in Grid(nodes=3, gpus=RANKS_PER_NODE, name=name)
        )
        template = {"nodeSelector": {LABEL_POOL: name}}
        job = JobHandle(control_plane.api, NAMESPACE, name)
        return job, job_document(name, podTemplate=template)

    return make


def test_c38_a_job_deleted_while_no_operator_runs_leaves_nothing(
    control_plane: ControlPlane,
    operator: OperatorProcess,
    lone: Callable[[str], tuple[JobHandle, Object]],
) -> None:
    job, body = lone("c38")
    job.create(body)
    job.wait_for_phase("Running")
    operator.stop()
    try:
        job.delete()
        job.wait(lambda: not job.exists(), "the job gone")

        def left() -> list[str]:
            return [
                name_of(found)
                for path in _OWNED
                for found in control_plane.api.list(
                    path.format(NAMESPACE), labelSelector=f"{LABEL_JOB}={job.name}"
                )
            ]

        wait_for(lambda: not left(), "all of it gone", 60)
    finally:
        operator.start_again()


def test_c34_a_restarted_operator_makes_nothing_of_a_finished_job_again(
    operator: OperatorProcess, lone: Callable[[str], tuple[JobHandle, Object]]
) -> None:
    job, body = lone("c34")
    job.create(body)
    job.wait_for_phase("Running")
    job.complete()
    job.wait_for_phase("Completed")
    job.wait(lambda: not job.pods, "no pod left")
    before = job.raw
    operator.stop()
    starts = operator.log.count("Leading.")
    operator.start_again()
    wait_for(lambda: operator.log.count("Leading.") > starts, "the operator leading", 60)
    time.sleep(3)
    assert job.pods == []
    assert job.raw["status"] == before["status"]
    assert job.raw["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]


def test_c40_an_operator_killed_in_the_middle_counts_a_fault_once(
    operator: OperatorProcess, lone: Callable[[str], tuple[JobHandle, Object]]
) -> None:
    job, body = lone("c40")
    job.create(body)
    job.wait_for_phase("Running")
    job.act.end_container(name_of(job.pod(1)), exit_code=1, container=TRAINER_CONTAINER)
    job.wait(lambda: job.status.attempt == 2, "the fault answered")
    operator.kill()
    operator.start_again()
    job.wait(lambda: _runs(job, 2), "the job running again", 90)
    assert (job.status.restarts, len(job.status.incidents)) == (1, 1)


def test_an_api_server_restarted_in_the_middle_costs_the_job_nothing(
    control_plane: ControlPlane,
    operator: OperatorProcess,
    lone: Callable[[str], tuple[JobHandle, Object]],
) -> None:
    job, body = lone("restarted")
    job.create(body)
    job.wait_for_phase("Running")
    control_plane.restart_api_server(down_s=2)
    time.sleep(5)
    assert job.status.attempt == 1 and job.status.holds("Running")
    job.act.end_container(name_of(job.pod(1)), exit_code=1, container=TRAINER_CONTAINER)

    def runs_again() -> bool:
        operator.keep()  # one that cannot renew its Lease in time ends
        return _runs(job, 2)

    job.wait(runs_again, "the job running again", 90)
    assert job.status.restarts == 1
