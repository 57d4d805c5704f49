"""Where a job's pods may run, at first and after a fault."""

from typing import Final

from tests.cluster.jobs import uid_of
from tests.cluster.lifecycle.scene import Case, Scene, in_phase, running, some_seconds, story, until
from tests.cluster.nodes import LABEL_LEAF
from tests.cluster.stories import Story

CASES: Final[list[Case]] = []


@story(CASES, racks=2, nodes=3)
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


@story(CASES, nodes=5)
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


@story(CASES, nodes=3)
def a_job_that_may_shrink_runs_on_the_nodes_there_are(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(nodes=4, topology={"onUnsatisfied": "Shrink"}))
    yield running(job)
    assert job.status.num_nodes == 2 and len(job.living) == 2
    assert job.raw["spec"]["batch"]["globalSequences"] == 16


@story(CASES, racks=2, nodes=1)
def a_job_that_may_relax_says_that_its_topology_is_not_met(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "rack", "onUnsatisfied": "Relax"}))
    yield running(job)
    assert job.reason("TopologySatisfied") == "Relaxed"


@story(CASES, racks=2, nodes=1)
def a_job_that_may_not_wait_fails_with_the_reason(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "rack", "onUnsatisfied": "Fail"}))
    yield in_phase(job, "Failed")
    assert "onUnsatisfied is Fail" in job.message("Failed")
    assert job.pods == []


@story(CASES, nodes=2)
def an_unknown_level_is_told_and_waited_for(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(topology={"jobWithin": "hall"}))
    yield until("it said so", lambda: "hall" in job.message("Placed"))
    assert job.pods == [] and not job.status.holds("Placed") and job.status.phase == "Pending"


@story(CASES, nodes=3)
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
    yield from some_seconds(3)
    (first,) = (job for job in jobs if job.status.holds("Running"))
    (second,) = (job for job in jobs if job is not first)
    assert halves == [] and second.pods == []
    first.complete()
    yield running(second)
