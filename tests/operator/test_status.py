"""The conditions of a job tell the truth, from the first look to the last."""

import time
from collections.abc import Callable

import pytest

from omni_contract.errors import SpecError
from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER
from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import (
    JobStatus,
    Phase,
    read_time,
)
from omni_operator.faults.detect import find
from omni_operator.state import Observed
from omni_operator.status.conditions import (
    active_s,
    history_of,
)
from omni_operator.status.incidents import open_incident
from omni_operator.status.life import (
    accept,
    complete,
    fail,
    hold_gang,
    place,
    refuse,
    release_gang,
    suspend,
    wait_for_room,
)
from omni_operator.status.progress import absorb_heartbeat
from tests.operator.looking import (
    BEGIN,
    NUM_PODS,
    Scene,
    look,
    message,
    opened,
    released,
    running_job,
    said,
)

A = RestartAction


# The life of a job.


def test_the_first_status_of_a_job_says_what_it_waits_for() -> None:
    scene = running_job()
    status = accept(BEGIN, scene.look(), "4 nodes of 1 rank")
    assert (status.phase, said(status, "Accepted")) == ("Pending", ("True", "Valid"))
    assert status.observed_generation == 1
    status = wait_for_room(opened(scene, status), scene.look(), "NotEnoughNodes", "2 of 4 free")
    assert (status.phase, status.attempt) == ("Pending", 1)
    assert said(status, "Placed") == ("False", "NotEnoughNodes")
    assert said(status, "TopologySatisfied") == ("Unknown", "NotPlaced")


def test_a_wrong_spec_is_refused_in_its_own_words_while_pods_go_on() -> None:
    scene = running_job()
    error = SpecError("spec.resources.nodes", "0 is less than 1")
    status = refuse(BEGIN, scene.look(), error)
    assert said(status, "Accepted") == ("False", "InvalidSpec")
    assert message(status, "Accepted") == "spec.resources.nodes: 0 is less than 1"
    status = refuse(look(scene, released(scene)), scene.look(), error)
    assert status.phase == "Running"
    assert message(status, "Accepted").endswith("attempt 1 goes on as it was planned")


def test_opening_an_attempt_resets_what_was_true_of_the_one_before() -> None:
    scene = running_job()
    status = look(scene, released(scene))
    assert (status.phase, status.placement is None) == ("Running", False)
    status = status.model_copy(update={"generation": 2})
    status = opened(scene, status, opened_by=A.REPLACE_POD, message="a fault")
    assert (status.attempt, status.generation, status.placement) == (2, 0, None)
    assert status.opened_by is A.REPLACE_POD
    for type_ in ("Placed", "GangReady", "DataServiceReady", "Running"):
        assert said(status, type_)[0] == "False", type_
    assert (status.phase, said(status, "Restarting")) == ("Restarting", ("True", "ReplacePod"))
    assert message(status, "Restarting") == (
        "attempt 2 with 4 pods is opened by ReplacePod after a fault"
    )


def test_c40_restarts_are_what_was_spent() -> None:
    scene = running_job()
    history = History(user_restarts=2, infrastructure_restarts=3, restarts_without_progress=1)
    status = opened(scene, opened_by=A.RESTART_JOB, history=history)
    assert status.restarts == 5
    assert history_of(status.budget) == history
    status = opened(scene, status, opened_by=A.RESTART_JOB)  # asked for by somebody: costs nothing
    assert (status.attempt, status.restarts) == (2, 5)


def test_c35_a_suspended_job_that_resumes_says_so() -> None:
    scene = running_job()
    running = look(scene, released(scene))
    start_s = read_time(running.start_time or "")
    status = suspend(running, scene.look(after_s=20), num_left=3)
    assert said(status, "Suspended") == ("False", "Suspending")
    assert "3 pods still save and end" in message(status, "Suspended")
    observed = scene.look(after_s=45)
    status = suspend(status, observed, num_left=0)
    assert (status.phase, said(status, "Suspended")) == ("Suspended", ("True", "Suspended"))
    assert said(status, "Running") == ("False", "Suspended")
    assert said(status, "TopologySatisfied") == ("Unknown", "NotPlaced"), "no pod has a node"
    assert status.start_time is None
    assert status.active_seconds == pytest.approx(observed.now_s - start_s, abs=0.01)
    assert active_s(status, observed.now_s + 1000) == status.active_seconds
    again = suspend(status, scene.look(after_s=100), num_left=0)
    assert again.active_seconds == status.active_seconds
    status = opened(scene, status)
    assert (status.phase, said(status, "Suspended")) == ("Pending", ("False", "Resumed"))
    assert status.condition("Restarting") is None


def test_c35_what_a_suspension_said_ends_with_it_and_is_not_said_again_by_later_attempts() -> None:
    scene = running_job()
    restarting = opened(scene, opened_by=A.RESTART_JOB)
    suspended = suspend(restarting, scene.look(), num_left=0)
    assert said(suspended, "Restarting") == ("False", "Suspended")
    resumed = opened(scene, suspended, message="a suspension")
    assert said(resumed, "Restarting") == ("False", "Opened")
    words = message(resumed, "Suspended")
    assert words == "attempt 2 with 4 pods is opened after a suspension"
    later = opened(scene, resumed, opened_by=A.REPLACE_POD, message="a fault")
    assert message(later, "Suspended") == words


def test_a_job_that_ends_while_it_waits_looks_for_no_nodes() -> None:
    scene = running_job()
    failed = fail(
        opened(scene), scene.look(), FaultClass.START_ERROR, "the API server refused a pod"
    )
    for type_ in ("Placed", "GangReady"):
        assert said(failed, type_) == ("False", "Failed")
        assert message(failed, type_) == "the job is Failed; condition Failed says why"
    assert said(fail(released(scene), scene.look(), "UserLimit", ""), "Placed")[0] == "True"


@pytest.mark.parametrize(
    ("end", "phase"),
    [
        (lambda status, observed: complete(status, observed, "20 steps"), "Completed"),
        (lambda status, observed: fail(status, observed, "UserLimit", "no more"), "Failed"),
    ],
    ids=["completed", "failed"],
)
def test_the_end_stops_the_clock_and_says_that_nothing_runs(
    end: Callable[[JobStatus, Observed], JobStatus], phase: Phase
) -> None:
    scene = running_job()
    scene.beat(step=10, step_s=1)
    status = look(scene, absorb_heartbeat(released(scene), scene.look()))
    status = end(status, scene.look(after_s=25))
    assert status.phase == phase
    for type_ in ("Running", "DataServiceReady", "Degraded"):
        assert said(status, type_) == ("False", phase)
    assert active_s(status, time.time() + 1000) == pytest.approx(20, abs=0.5)
    assert status.goodput == pytest.approx(10 / 20, abs=0.02)


# What the pods show.


def test_a_job_whose_pods_all_run_runs() -> None:
    scene = running_job()
    status = look(scene, released(scene))
    assert (status.phase, said(status, "Running")) == ("Running", ("True", "AllPodsRun"))
    assert message(status, "Running") == "4 of 4 pods of attempt 1 run"
    assert said(status, "DataServiceReady") == ("True", "AllReady")
    assert said(status, "Degraded") == ("False", "Healthy")
    assert status.start_time is not None
    assert status.progress.num_steps == scene.plan.num_steps


def test_c35_a_job_with_a_pending_pod_does_not_run_and_says_why() -> None:
    scene = running_job()
    words = 'Back-off pulling image "omni:none"'
    scene.pods.wait_in_container(
        scene.name(2), container=TRAINER_CONTAINER, reason="ImagePullBackOff", message=words
    )
    status = look(scene, released(scene))
    assert (status.phase, said(status, "Running")) == ("Starting", ("False", "PodsWait"))
    assert message(status, "Running") == (
        f"3 of 4 pods of attempt 1 run; pod {scene.name(2)} waits: ImagePullBackOff: {words}"
    )
    assert said(status, "Degraded") == ("True", "ImageCannotBePulled")
    assert status.start_time is None
    assert message(status, "DataServiceReady").startswith("3 of 4 data services are ready; that of")


@pytest.mark.parametrize(
    ("hit", "words"),
    [
        (lambda scene: scene.raw.pop(scene.name(1)), "does not exist"),
        (lambda scene: scene.pods.delete(scene.name(1)), "is being deleted"),
        (lambda scene: scene.pods.end_container(scene.name(1), exit_code=1), "with exit code 1"),
        (lambda scene: scene.pods.fail(scene.name(1), reason="Evicted"), "failed: Evicted"),
    ],
    ids=["gone", "deleted", "ended", "evicted"],
)
def test_c35_a_job_that_lost_a_pod_does_not_run(hit: Callable[[Scene], object], words: str) -> None:
    scene = running_job()
    status = look(scene, released(scene))
    assert status.holds("Running")
    hit(scene)
    status = look(scene, status)
    assert said(status, "Running") == ("False", "PodsWait")
    assert f"pod {scene.name(1)} " in message(status, "Running")
    assert words in message(status, "Running")


def test_gated_and_unschedulable_pods_are_told() -> None:
    scene = running_job(is_released=False)
    status = look(scene, hold_gang(opened(scene), scene.look(), "WaitingForOldPods", "2 end"))
    assert message(status, "Running").endswith(f"pod {scene.name(0)} is not released")
    scene = running_job(is_released=False)
    pod = scene.raw[scene.name(0)]
    del pod["spec"]["schedulingGates"]
    unschedulable = {"reason": "Unschedulable", "message": "0/9 nodes are available"}
    pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "False"} | unschedulable]
    status = look(scene, released(scene))
    assert message(status, "Running").endswith("waits: Unschedulable: 0/9 nodes are available")


def test_pods_that_are_done_count_as_running_until_the_last_is() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(0), exit_code=0)
    status = look(scene, released(scene))
    assert message(status, "Running") == "3 of 4 pods of attempt 1 run and 1 are done"
    assert status.holds("Running") and status.holds("DataServiceReady")
    for index in (1, 2, 3):
        scene.pods.end_container(scene.name(index), exit_code=0)
    status = look(scene, status)
    assert said(status, "Running") == ("False", "PodsAreDone")
    assert (status.phase, status.reason) == ("Running", "PodsAreDone")  # and not Starting again


def test_a_restart_is_over_when_all_pods_run_again() -> None:
    scene = running_job(attempt=2)
    status = JobStatus(attempt=1)
    status = opened(scene, status, opened_by=A.REPLACE_POD)
    status = release_gang(
        place(status, scene.look(), scene.placement, config_map="p"), scene.look()
    )
    gone = scene.raw.pop(scene.name(0))
    assert look(scene, status).phase == "Restarting"
    scene.raw[scene.name(0)] = gone
    status = look(scene, status)
    assert (status.phase, said(status, "Restarting")) == ("Running", ("False", "Restarted"))


def test_a_restart_in_place_is_told_while_it_lasts() -> None:
    scene = running_job()
    scene.beat(step=3, generation=1, phase="starting", last_message="rank 2 fell")
    status = look(scene, absorb_heartbeat(released(scene), scene.look()))
    assert (status.phase, said(status, "Restarting")) == ("Restarting", ("True", "RestartInPlace"))
    assert "after rank 2 fell" in message(status, "Restarting")
    assert status.holds("Running")  # its pods do
    scene.beat(step=3, generation=1, phase="training")
    status = look(scene, absorb_heartbeat(status, scene.look()))
    assert (status.phase, said(status, "Restarting")) == ("Running", ("False", "Restarted"))


@pytest.mark.parametrize(
    ("hit", "reason", "words"),
    [
        (
            lambda scene: scene.change_node(1, ready="Unknown", ready_since_s=time.time()),
            "NodeNotReady",
            "node node-1 has Ready=Unknown since ",
        ),
        (
            lambda scene: scene.change_node(1, is_cordoned=True),
            "NodeTainted",
            "on node node-1: the node is cordoned; the job leaves it once another node is free",
        ),
        (
            lambda scene: scene.pods.end_container(scene.name(4), exit_code=1),
            "SpareLost",
            "a spare is of no use: pod ",
        ),
        (
            lambda scene: scene.pods.wait_in_container(
                scene.name(4), container=DATA_CONTAINER, reason="CreateContainerConfigError"
            ),
            "ContainerCannotStart",
            "waits: CreateContainerConfigError",
        ),
    ],
    ids=["silent-node", "cordoned-node", "spare", "spare-waits"],
)
def test_what_does_not_stop_the_job_degrades_it(
    hit: Callable[[Scene], object], reason: str, words: str
) -> None:
    scene = running_job()
    hit(scene)
    status = look(scene, released(scene))
    assert (status.phase, said(status, "Degraded")) == ("Running", ("True", reason))
    assert words in message(status, "Degraded")


def test_the_first_start_is_no_restart() -> None:
    scene = running_job()
    scene.beat(step=0, phase="starting")
    status = look(scene, absorb_heartbeat(released(scene), scene.look()))
    assert (status.phase, status.condition("Restarting")) == ("Running", None)


def test_a_heartbeat_of_an_older_attempt_is_not_missed() -> None:
    scene = running_job()
    scene.beat(step=4, attempt=0)
    assert said(look(scene, released(scene), after_s=500), "Degraded") == ("False", "Healthy")


def test_a_silent_heartbeat_degrades_a_running_job() -> None:
    scene = running_job()
    status = released(scene)
    assert said(look(scene, status, after_s=100), "Degraded") == ("False", "Healthy")
    scene.beat(step=4)
    assert said(look(scene, status, after_s=50), "Degraded") == ("False", "Healthy")
    assert said(look(scene, status, after_s=70), "Degraded") == ("True", "NoHeartbeat")
    scene.watch_is_healthy = False
    assert said(look(scene, status, after_s=70), "Degraded") == ("False", "Healthy")


def test_a_shrunk_job_is_degraded() -> None:
    scene = running_job()
    status = released(scene).model_copy(update={"num_nodes": 2})
    assert said(look(scene, status), "Degraded") == ("True", "Shrunk")
    told = message(look(scene, status), "Degraded")
    assert told.startswith("runs on 2 of 4 nodes: more had no room; kubectl mmtj restart ")


def test_many_concerns_are_counted() -> None:
    scene = running_job()
    for index in range(NUM_PODS + 1):
        scene.change_node(index, is_cordoned=True)
    status = look(scene, released(scene).model_copy(update={"num_nodes": 2}))
    assert message(status, "Degraded").endswith("; and 2 more")


@pytest.mark.parametrize("is_broken", [False, True], ids=["well", "degraded"])
def test_a_second_look_later_changes_nothing(is_broken: bool) -> None:
    """A quiet job costs no write, however long one looks."""
    scene = running_job()
    scene.beat(step=4, step_s=2)
    if is_broken:
        scene.change_node(1, ready="Unknown", ready_since_s=time.time() + 1000)
        scene.change_node(2, is_cordoned=True)
        scene.pods.end_container(scene.name(4), exit_code=1)
    status = look(scene, absorb_heartbeat(released(scene), scene.look()), after_s=2)
    for after_s in (3, 30, 50):
        again = absorb_heartbeat(status, scene.look(after_s=after_s, status=status))
        assert look(scene, again, after_s=after_s) == status


def test_a_placement_of_an_older_attempt_says_nothing() -> None:
    scene = running_job()
    status = opened(scene, released(scene), opened_by=A.RESTART_JOB)
    assert look(scene, status).conditions == status.conditions


def test_an_incident_of_an_attempt_is_told_in_the_conditions() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(1), exit_code=1, message="out of luck")
    observed = scene.look(status=released(scene))
    (cause,) = find(observed, scene.plan.spec)
    incident = open_incident(cause, A.REPLACE_POD, observed=observed)
    status = opened(scene, observed.job.status, opened_by=A.REPLACE_POD, incident=incident)
    assert status.incidents == [incident]
    assert message(status, "Restarting") == (
        f"attempt 2 with 4 pods is opened by ReplacePod after AppError: pod {scene.name(1)} on "
        "node node-1: trainer ended with exit code 1: out of luck"
    )
