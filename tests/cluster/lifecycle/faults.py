"""What befalls a job that runs, and how it goes on."""

import itertools
import time
from typing import Final

from omni_contract.names import ANNOTATION_RESTART, LABEL_JOB, TRAINER_CONTAINER
from omni_contract.spec_run import FaultClass, RestartAction
from tests.cluster.jobs import attempt_of, is_gated, name_of, uid_of
from tests.cluster.lifecycle.scene import Case, Scene, in_phase, running, runs, story, uids, until
from tests.cluster.stories import Story

CASES: Final[list[Case]] = []


@story(CASES, nodes=3)
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


@story(CASES, nodes=2)
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


@story(CASES, nodes=3)
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


@story(CASES, nodes=5)
def c39_a_pod_deleted_by_hand_takes_its_group_along(scene: Scene) -> Story[None]:
    job = scene.job()
    # A node that is late with its heartbeat on a busy machine is not what this is about.
    body = scene.document(nodes=4, restart={"nodeLostAfterSeconds": 60})
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


@story(CASES, nodes=3)
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


@story(CASES, nodes=2)
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


@story(CASES, nodes=3)
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


@story(CASES, nodes=2)
def a_fault_that_comes_back_without_a_step_is_answered_dearer(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(restart={"limit": 9, "noProgressLimit": 3}))
    for attempt in itertools.count(1):
        yield until("an answer", lambda n=attempt: job.is_phase("Failed") or runs(job, n))  # type: ignore[misc]
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
