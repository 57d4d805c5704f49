"""What users and clusters do to jobs, on the real control plane with the operator as a process.
Each story is a case; most of them are played side by side."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import pytest

from omni_contract.names import TRAINER_CONTAINER
from tests.cluster.api import Object, wait_for
from tests.cluster.control_plane import ControlPlane
from tests.cluster.history import History, JobFact, PodFact
from tests.cluster.job_kind import jobs_path
from tests.cluster.jobs import RANKS_PER_NODE, JobHandle, job_document, name_of
from tests.cluster.lifecycle import ends, faults, placing
from tests.cluster.lifecycle.scene import LABEL_POOL, NAMESPACE, Case, Scene, left_of, runs
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.operators import OperatorProcess, running_operator
from tests.cluster.stories import Seen, Story, play, returned

CASES: Final = [*faults.CASES, *placing.CASES, *ends.CASES]


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
        for number, case in enumerate(cases):
            short = f"s{number}"
            grid = Grid(**case.nodes, gpus=RANKS_PER_NODE, name=short)  # type: ignore[arg-type]
            names = nodes.add(
                replace(spec, labels={**spec.labels, LABEL_POOL: short}) for spec in grid
            )
            scene = Scene(
                name=short,
                api=api,
                nodes=nodes,
                node_names=names,
                seen=seen,
                operator=operator,
                control_plane=control_plane,
            )
            stories[case.name] = _told(case.play(scene), scene)
        yield Played(ends=play(stories, seen, num_at_once=len(stories)), history=history)
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
        wait_for(lambda: not left_of(control_plane.api, job.name), "all of it gone", 60)
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
    job.wait(lambda: runs(job, 2), "the job running again", 90)
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
        return runs(job, 2)

    job.wait(runs_again, "the job running again", 90)
    assert job.status.restarts == 1
