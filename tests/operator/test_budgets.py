"""What restarts count as, when they get dearer or wait, and when a job is given up."""

import pytest

from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import Incident, JobStatus, RestartBudget
from omni_operator.decisions.attempt import backoff_s, previous_action
from omni_operator.kinds import NODE
from tests.operator.failing import end, run
from tests.operator.world import World


def test_a_drain_that_is_faster_than_steps_costs_a_job_nothing() -> None:
    with World(nodes=12) as world:
        run(world, restart={"limit": 0, "infrastructureLimit": 1, "noProgressLimit": 1})
        for _ in range(5):
            left = str(world.pod(1)["spec"]["nodeName"])
            world.cluster.change(NODE, left, lambda raw: raw["spec"].update(unschedulable=True))
            world.pass_s(5)
            assert world.status().opened_by is RestartAction.REPLACE_POD
        assert (world.status().attempt, world.status().phase) == (6, "Running")
        assert world.status().restarts == 0
        end(world, 2, fault=FaultClass.OOM)
        world.pass_s(5)
        assert (world.status().restarts, world.status().phase) == (1, "Running")


def test_the_same_fault_without_a_step_gets_the_next_dearer_restart() -> None:
    with World() as world:
        run(world, restart={"limit": 9, "noProgressLimit": 9})
        opened = []
        for _ in range(4):
            end(world, 2, fault=FaultClass.APP_ERROR)
            world.pass_s(5)
            world.beat(step=5)
            world.settle()
            opened.append(world.status().opened_by)
        assert opened == [
            RestartAction.REPLACE_POD,
            RestartAction.RESTART_GROUP,
            RestartAction.RESTART_JOB,
            RestartAction.RESTART_JOB,
        ]
        world.beat(step=6)
        world.settle()
        end(world, 2, fault=FaultClass.APP_ERROR, step=6)
        world.pass_s(5)
        assert world.status().opened_by is RestartAction.REPLACE_POD


def incident(fault: FaultClass, action: RestartAction) -> Incident:
    return Incident(
        time="2026-01-01T00:00:00Z", fault=fault, action=action, attempt=1, generation=0, message=""
    )


def test_what_was_done_before_the_last_step_escalates_nothing() -> None:
    app = incident(FaultClass.APP_ERROR, RestartAction.RESTART_GROUP)
    lost = incident(FaultClass.NODE_LOST, RestartAction.REPLACE_POD)
    slot = incident(FaultClass.PENDING_TIMEOUT, RestartAction.RESTART_JOB)

    def previous(*incidents: Incident, without: int, step: int = 10) -> RestartAction | None:
        budget = RestartBudget(highest_step=10, without_progress=without)
        status = JobStatus(incidents=list(incidents), budget=budget)
        return previous_action(status, FaultClass.APP_ERROR, step=step)

    assert previous(app, without=1) is RestartAction.RESTART_GROUP
    assert previous(app, without=1, step=11) is None
    assert previous(app, lost, without=2) is RestartAction.RESTART_GROUP
    assert previous(app, lost, without=1) is None
    assert previous(app, lost, slot, without=2) is RestartAction.RESTART_GROUP
    assert previous(without=0) is None


def test_without_a_new_step_a_job_is_given_up() -> None:
    with World() as world:
        run(world, restart={"noProgressLimit": 2})
        for _ in range(3):
            world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
            world.pass_s(45)
            for name in ("n0", "n1", "n2", "n3", "n4", "n5"):
                world.revive_node(name)
        assert world.condition("Failed") == ("True", "NoProgress")
        assert "reached no new step" in world.message("Failed")
        assert world.status().incidents[-1].action is RestartAction.FAIL_JOB


def test_supervisors_that_gave_up_have_the_last_word() -> None:
    with World() as world:
        run(world)
        spent = History(user_restarts=3, restarts_without_progress=1, highest_step=5)
        end(world, 0, 77, fault=FaultClass.APP_ERROR, history=spent, message="gave up")
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "UserLimit")
        assert world.status().budget.user == 3


def test_a_limit_that_was_raised_holds_at_once_for_pods_that_did_not_know() -> None:
    with World() as world:
        run(world, restart={"limit": 1})
        world.edit("stamps", lambda raw: raw["spec"]["restart"].update(limit=3))
        world.pass_s(5)
        spent = History(user_restarts=1, restarts_without_progress=1, highest_step=5)
        end(world, 0, 77, fault=FaultClass.APP_ERROR, history=spent, step=6, message="gave up")
        world.pass_s(5)
        status = world.status()
        assert (status.phase, status.opened_by) == ("Running", RestartAction.RESTART_JOB)
        assert (status.attempt, status.budget.user) == (2, 2)
        spent = History(user_restarts=3, restarts_without_progress=1, highest_step=6)
        end(world, 0, 77, fault=FaultClass.APP_ERROR, history=spent, step=7, message="gave up")
        world.pass_s(5)
        assert world.status().phase == "Failed", "these knew"


def test_restarts_in_place_are_taken_over_and_counted_once() -> None:
    with World() as world:
        run(world)
        spent = History(user_restarts=1, restarts_without_progress=1, highest_step=5)
        for _ in range(3):
            world.beat(
                step=5,
                generation=1,
                history=spent,
                last_fault=FaultClass.APP_ERROR,
                last_message="rank 3 ended with exit code 1",
            )
            world.pass_s(15)
        status = world.status()
        assert (status.attempt, status.generation, status.restarts) == (1, 1, 1)
        assert [i.action for i in status.incidents] == [RestartAction.RESTART_IN_PLACE]
        end(world, 3, fault=FaultClass.APP_ERROR, generation=1, history=spent)
        world.pass_s(5)
        status = world.status()
        assert (status.attempt, status.budget.user, status.restarts) == (2, 2, 2)
        assert status.opened_by is RestartAction.REPLACE_POD


@pytest.mark.parametrize(("withdrawn", "waits_s"), [(0, 0), (1, 0), (2, 5), (3, 10), (9, 300)])
def test_each_withdrawal_in_a_row_waits_longer(withdrawn: int, waits_s: float) -> None:
    slot = incident(FaultClass.PENDING_TIMEOUT, RestartAction.RESTART_JOB)
    row = [slot.model_copy(update={"attempt": 5 + n}) for n in range(withdrawn)]
    other = incident(FaultClass.OOM, RestartAction.REPLACE_POD)
    incidents = [slot, other, *row]
    assert backoff_s(JobStatus(attempt=5 + withdrawn, incidents=incidents)) == waits_s
    # The next attempt ran, and somebody asked for another one.
    assert backoff_s(JobStatus(attempt=6 + withdrawn, incidents=incidents)) == 0
