"""An incident says what happened and how long each stage of its repair took, each told once."""

import time
from dataclasses import replace

import pytest

from omni_contract.records import PodEnd
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import STAGES, JobStatus, read_time, write_time
from omni_operator.faults.detect import find, find_cause
from omni_operator.state import PodFault
from omni_operator.status.incidents import add_incident, advance_incidents, open_incident
from omni_operator.status.progress import absorb_heartbeat
from omni_operator.watch.observe import read_pod
from tests.operator.looking import Scene, opened, running_job

A = RestartAction
LOST = PodFault(
    fault=FaultClass.NODE_LOST, pod="p-1", index=1, node="n-1", time_s=100, message="it is gone"
)


def recovering(scene: Scene, *, opened_ago_s: float, action: A = A.REPLACE_POD) -> JobStatus:
    """Attempt 2 was opened by a lost node so long ago."""
    now_s = time.time()
    observed = replace(scene.look(status=JobStatus(attempt=1)), now_s=now_s - opened_ago_s)
    cause = replace(LOST, time_s=observed.now_s - 30)
    incident = open_incident(cause, action, observed=observed)
    status = opened(scene, JobStatus(attempt=1), opened_by=action, incident=incident)
    return status.model_copy(update={"opened_at": write_time(observed.now_s)})


def seconds(scene: Scene, status: JobStatus, *, after_s: float = 0) -> dict[str, float]:
    observed = scene.look(after_s=after_s, status=status)
    return dict(advance_incidents(status, observed, scene.plan.spec).incidents[-1].seconds)


def started(scene: Scene, index: int, at_s: float) -> None:
    trainer = scene.raw[scene.name(index)]["status"]["containerStatuses"][0]
    trainer["state"] = {"running": {"startedAt": write_time(at_s).partition(".")[0] + "Z"}}


def test_a_decision_tells_how_long_it_took_to_see_and_to_decide() -> None:
    scene = running_job()
    observed = replace(scene.look(status=JobStatus(attempt=4, generation=2)), now_s=140)
    incident = open_incident(LOST, A.REPLACE_POD, observed=observed, seen_s=130)
    assert incident.seconds == {"detect": 30, "decide": 10}
    assert (incident.attempt, incident.generation, read_time(incident.time)) == (4, 2, 130)
    assert (incident.node, incident.pod, incident.kubernetes_node) == (1, "p-1", "n-1")
    assert incident.message == "pod p-1 on node n-1: it is gone"
    at_once = open_incident(LOST, A.REPLACE_POD, observed=observed)
    assert at_once.seconds == {"detect": 40, "decide": 0}


def test_a_clock_that_is_behind_gives_no_negative_seconds() -> None:
    observed = replace(running_job().look(), now_s=90)
    assert open_incident(LOST, A.REPLACE_POD, observed=observed).seconds["detect"] == 0


def test_the_last_lines_outlive_the_pod() -> None:
    scene = running_job()
    end = PodEnd(
        attempt=1,
        generation=3,
        exit_code=1,
        fault=FaultClass.APP_ERROR,
        rank=7,
        message="out of luck",
        tail=("line 1", "line 2"),
    )
    scene.pods.end_container(scene.name(2), exit_code=1, message=end.model_dump_json())
    observed = scene.look()
    incident = open_incident(
        find_cause(find(observed, scene.plan.spec)), A.REPLACE_POD, observed=observed
    )
    assert incident.message.endswith("out of luck\nlast lines:\nline 1\nline 2")
    assert (incident.rank, incident.node, incident.generation) == (7, 2, 3)


def test_a_fault_of_no_pod_names_none() -> None:
    hang = replace(LOST, fault=FaultClass.HANG, pod="", index=None, node=None, message="no step")
    incident = open_incident(hang, A.RESTART_IN_PLACE, observed=running_job().look())
    assert (incident.pod, incident.node, incident.message) == (None, None, "no step")


def test_the_newest_ten_are_kept() -> None:
    status = JobStatus()
    for number in range(25):
        cause = replace(LOST, message=f"fault {number}")
        incident = open_incident(cause, A.REPLACE_POD, observed=running_job().look())
        status = add_incident(status, incident)
    kept = [incident.message.split()[-1] for incident in status.incidents]
    assert kept == [str(number) for number in range(15, 25)]


def test_stages_are_filled_in_as_they_end() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=20)
    old = replace(read_pod(scene.raw[scene.name(0)]), name="old-pod", node="node-0")
    scene.strangers = [old]
    late = scene.raw.pop(scene.name(3))
    assert set(seconds(scene, status)) == {"detect", "decide"}
    scene.strangers = []
    assert seconds(scene, status)["terminate"] == pytest.approx(20, abs=0.3)
    assert set(seconds(scene, status)) == {"detect", "decide", "terminate"}
    scene.raw[scene.name(3)] = late
    late["status"]["containerStatuses"] = []
    told = seconds(scene, status, after_s=2)
    assert set(told) == {"detect", "decide", "terminate", "schedule"}
    late["status"] = scene.raw[scene.name(0)]["status"]
    assert set(seconds(scene, status)) == {"detect", "decide", "terminate", "schedule", "start"}
    scene.beat(step=41, checkpoint_step=40)
    assert tuple(seconds(scene, status)) == STAGES


def test_a_stage_once_told_stays() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=20)
    scene.raw.pop(scene.name(3))
    observed = scene.look(after_s=0, status=status)
    status = advance_incidents(status, observed, scene.plan.spec)
    before = dict(status.incidents[-1].seconds)
    assert "terminate" in before
    assert seconds(scene, status, after_s=500) == before


def test_an_old_pod_that_is_over_is_out_of_the_way() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=1)
    old = replace(read_pod(scene.raw[scene.name(0)]), name="old")
    scene.strangers = [old]
    assert "terminate" not in seconds(scene, status)
    scene.strangers = [replace(old, phase="Failed")]
    assert "terminate" in seconds(scene, status)


def test_c31_a_stuck_pod_on_a_lost_node_is_out_of_the_way() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=1)
    scene.strangers = [replace(read_pod(scene.raw[scene.name(0)]), name="old", node="node-9")]
    scene.nodes["node-9"] = scene.nodes["node-0"]
    assert "terminate" not in seconds(scene, status)
    scene.nodes["node-9"] = replace(
        scene.nodes["node-0"], ready="Unknown", ready_since_s=time.time() - 100
    )
    assert "terminate" in seconds(scene, status)


def test_stages_go_by_records_where_the_operator_comes_late() -> None:
    """It was down for 500 s; the containers' own times say when they started."""
    scene = running_job(attempt=2)
    opened_s = time.time() - 520
    status = recovering(scene, opened_ago_s=520)
    told = {"detect": 30.0, "decide": 0.0, "terminate": 2.0, "schedule": 3.0}
    (incident,) = status.incidents
    status = status.model_copy(
        update={"incidents": [incident.model_copy(update={"seconds": told})]}
    )
    for index in range(4):
        started(scene, index, opened_s + 6 + index)
    scene.beat(step=70, checkpoint_step=40, stands_s=480, step_s=1)
    found = seconds(scene, status)
    # All ran at 9 s (a record of whole seconds: before 10), the 30th step was made at 40 s.
    assert found["start"] == pytest.approx(4, abs=1.1)
    assert found["firstStep"] == pytest.approx(2, abs=1.1)


def test_the_first_step_is_counted_from_where_it_resumed_though_it_has_saved_since() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=30)
    told = {"detect": 1.0, "decide": 0.0, "terminate": 2.0, "schedule": 3.0, "start": 1.0}
    (incident,) = status.incidents
    status = status.model_copy(
        update={"incidents": [incident.model_copy(update={"seconds": told})]}
    )
    scene.beat(step=60, checkpoint_step=60, resumed_step=40, step_s=1)
    # All ran at 6 s. The 20th step was made just now, at 30 s, so the first one at 11 s.
    assert seconds(scene, status)["firstStep"] == pytest.approx(5, abs=1)


def test_pods_that_live_on_make_no_negative_stage() -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=5, action=A.RESTART_IN_PLACE)
    found = seconds(scene, status)
    assert found["start"] == 0
    assert all(value >= 0 for value in found.values())


@pytest.mark.parametrize(
    ("beat", "is_first"),
    [
        ({"step": 41, "checkpoint_step": 40}, True),
        ({"step": 40, "checkpoint_step": 40}, False),
        ({"step": 1, "checkpoint_step": None}, True),
        ({"step": 41, "checkpoint_step": 40, "phase": "starting"}, False),
        ({"step": 41, "checkpoint_step": 40, "attempt": 1}, False),
        ({"step": 40, "checkpoint_step": 40, "phase": "done"}, True),
        ({"step": 50, "checkpoint_step": 50, "resumed_step": 40}, True),
        ({"step": 40, "checkpoint_step": 40, "resumed_step": 40}, False),
        ({"step": 1, "checkpoint_step": None, "resumed_step": 0}, True),
    ],
    ids=[
        "beyond",
        "at-the-restart-point",
        "no-checkpoint",
        "starting",
        "older",
        "nothing-left",
        "saved-since",
        "none-since-it-resumed",
        "begun-anew",
    ],
)
def test_the_first_step_is_one_beyond_the_restart_point(
    beat: dict[str, object], is_first: bool
) -> None:
    scene = running_job(attempt=2)
    status = recovering(scene, opened_ago_s=1)
    scene.beat(**beat)  # type: ignore[arg-type]
    assert ("firstStep" in seconds(scene, status)) is is_first


def test_a_restart_in_place_ends_with_its_first_step() -> None:
    scene = running_job()
    scene.beat(step=40, generation=1, phase="starting", checkpoint_step=40)
    status = absorb_heartbeat(JobStatus(attempt=1), scene.look(after_s=0))
    assert seconds(scene, status) == {}
    scene.beat(step=41, generation=1, checkpoint_step=40)
    scene.progress = replace(scene.progress, step_since_s=time.time() + 7)  # type: ignore[type-var]
    found = seconds(scene, status, after_s=9)
    assert found == {"firstStep": pytest.approx(7, abs=0.3)}


def test_what_another_fault_cut_short_stays_open() -> None:
    scene = running_job(attempt=3)
    status = recovering(scene, opened_ago_s=20)
    status = opened(scene, status, opened_by=A.REPLACE_POD)
    assert status.attempt == 3
    assert set(seconds(scene, status)) == {"detect", "decide"}


def test_the_end_of_a_job_has_no_stages() -> None:
    scene = running_job(attempt=2)
    incident = open_incident(LOST, A.FAIL_JOB, observed=scene.look(status=JobStatus(attempt=1)))
    status = opened(scene, JobStatus(attempt=1), incident=incident)
    assert set(seconds(scene, status)) == {"detect", "decide"}
