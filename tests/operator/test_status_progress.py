"""Progress, goodput, restarts in place and the placement in short: each counted and told once."""

import math
import time
from collections.abc import Sequence

import pytest

from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import RestartBudget, read_time, write_time
from omni_operator.status.conditions import budget_of, history_of, merge_history
from omni_operator.status.life import place
from omni_operator.status.placement import summarize
from omni_operator.status.progress import absorb_heartbeat
from tests.operator.looking import BEGIN, look, message, opened, released, running_job, said

A = RestartAction

# Progress and goodput.


def test_progress_is_that_of_the_heartbeat() -> None:
    scene = running_job()
    scene.beat(
        step=9,
        step_s=2,
        stands_s=3,
        tokens=900,
        tokens_per_second=45.5,
        loss=1.5,
        checkpoint_step=5,
    )
    before = time.time() - 3
    progress = absorb_heartbeat(released(scene), scene.look()).progress
    assert (progress.step, progress.highest_step, progress.tokens) == (9, 9, 900)
    assert (progress.tokens_per_second, progress.loss, progress.checkpoint_step) == (45.5, 1.5, 5)
    assert progress.useful_seconds == 18
    assert read_time(progress.update_time or "") == pytest.approx(before, abs=0.5)


def test_steps_that_are_done_again_are_useful_once() -> None:
    scene = running_job()
    status = look(scene, released(scene))
    for step, useful_s in ((10, 20), (10, 20), (6, 20), (9, 20), (12, 24)):
        scene.beat(step=step, step_s=2, generation=0 if step == 10 else 1)
        status = absorb_heartbeat(status, scene.look(after_s=50))
        assert (status.progress.step, status.progress.useful_seconds) == (step, useful_s)
    assert status.progress.highest_step == 12
    assert status.goodput == pytest.approx(24 / 45, abs=0.01)


def test_the_goodput_moves_with_new_steps_alone() -> None:
    scene = running_job()
    scene.beat(step=4, step_s=1, loss=3.0)
    status = absorb_heartbeat(look(scene, released(scene)), scene.look(after_s=10))
    scene.beat(step=4, step_s=1, loss=2.000012345)
    later = absorb_heartbeat(status, scene.look(after_s=1000))
    assert later.progress.loss == 2.0  # kubectl prints all digits there are
    assert later.goodput == status.goodput is not None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none_is_left_out(number: float) -> None:
    """A loss that ran away must not keep the status from being written."""
    scene = running_job()
    scene.beat(step=9, step_s=number, loss=number, tokens_per_second=number)
    progress = absorb_heartbeat(released(scene), scene.look()).progress
    assert (progress.step, progress.loss, progress.tokens_per_second) == (9, None, None)
    assert progress.useful_seconds == 0


def test_a_heartbeat_of_an_older_attempt_is_ignored() -> None:
    scene = running_job()
    status = opened(scene, released(scene), opened_by=A.RESTART_JOB)
    scene.beat(step=10, generation=3)
    assert absorb_heartbeat(status, scene.look()) == status


def test_goodput_leaves_out_suspended_time_and_never_exceeds_one() -> None:
    scene = running_job()
    status = look(scene, released(scene)).model_copy(
        update={"active_seconds": 95.0, "start_time": write_time(time.time())}
    )
    scene.beat(step=50, step_s=1)
    status = absorb_heartbeat(status, scene.look(after_s=5))
    assert status.goodput == pytest.approx(0.5, abs=0.01)
    scene.beat(step=5000, step_s=1)
    assert absorb_heartbeat(status, scene.look(after_s=5)).goodput == 1


def test_c40_a_restart_in_place_counts_once() -> None:
    scene = running_job()
    status = released(scene)
    history = History(user_restarts=1, restarts_without_progress=1, highest_step=4)
    scene.beat(
        step=4,
        generation=1,
        phase="starting",
        history=history,
        last_fault=FaultClass.APP_ERROR,
        last_message="rank 3 fell",
    )
    for _ in range(3):  # also by an operator that starts anew from the status
        status = absorb_heartbeat(status, scene.look(status=status))
        assert (status.generation, status.restarts, status.budget.user) == (1, 1, 1)
        (incident,) = status.incidents
    assert (incident.fault, incident.action) == (FaultClass.APP_ERROR, A.RESTART_IN_PLACE)
    assert (incident.attempt, incident.generation) == (1, 0)
    assert incident.message == "rank 3 fell"


def test_c40_generations_that_were_not_seen_are_one_incident() -> None:
    scene = running_job()
    scene.beat(step=4, generation=3, history=History(infrastructure_restarts=3))
    status = absorb_heartbeat(released(scene), scene.look())
    (incident,) = status.incidents
    assert (incident.fault, incident.generation) == (FaultClass.UNKNOWN, 2)
    assert incident.message.endswith("(and 2 restarts in place just before)")
    assert status.restarts == 3


def test_budgets_merge_by_the_larger_count() -> None:
    ours = RestartBudget(user=2, infrastructure=5, without_progress=3, highest_step=40)
    older = History(user_restarts=2, infrastructure_restarts=4, restarts_without_progress=9)
    newer = History(infrastructure_restarts=8, restarts_without_progress=1, highest_step=50)
    assert merge_history(ours, older) == ours
    assert merge_history(ours, newer) == RestartBudget(
        user=2, infrastructure=8, without_progress=1, highest_step=50
    )
    assert merge_history(ours, history_of(ours)) == ours
    assert budget_of(history_of(ours)) == ours


# Placement.


def placement_of(paths: Sequence[tuple[str, ...]], **rest: object) -> JobPlacement:
    pods = [PlacedPod(name=f"p{i}", node=f"n{i}", born=1, path=p) for i, p in enumerate(paths)]
    return JobPlacement.model_validate(
        {"attempt": 1, "plan_hash": "h", "pods": pods, "levels": ("zone", "rack", "node")} | rest
    )


def test_groups_are_told_widest_first_by_their_full_path() -> None:
    paths = [("a", "r1", "1"), ("a", "r1", "2"), ("a", "r2", "3"), ("b", "r1", "4")]
    placement = placement_of(
        paths, units=((0, 1), (2, 3)), spans=(1, 2), group_within="rack", satisfied=False
    )
    summary = summarize(placement, config_map="p-1")
    assert (summary.level, summary.groups_in_one_domain, summary.num_groups) == ("rack", 1, 2)
    wide, narrow = summary.groups
    assert (wide.unit, wide.span, wide.domains) == (1, 2, ["a/r2", "b/r1"])
    assert (narrow.unit, narrow.span, narrow.domains) == (0, 1, ["a/r1"])
    scene = running_job()
    status = place(BEGIN, scene.look(), placement, config_map="p-1")
    assert said(status, "TopologySatisfied") == ("False", "Relaxed")
    assert message(status, "Placed") == "4 pods have a node each; 1 of 2 groups inside one rack"


def test_a_node_without_the_label_shares_its_domain_with_none() -> None:
    placement = placement_of([("a", "", "1"), ("a", "", "2")], units=((0, 1),), spans=(2,))
    assert summarize(placement, config_map="p").level == "zone"
    asked = placement.model_copy(update={"group_within": "rack"})
    assert summarize(asked, config_map="p").groups[0].domains == ["n0", "n1"]


def test_of_many_groups_the_widest_are_told() -> None:
    paths = [("a", f"r{i}", str(i)) for i in range(200)]
    spans = tuple(2 if unit == 90 else 1 for unit in range(100))
    placement = placement_of(
        paths,
        units=tuple((2 * unit, 2 * unit + 1) for unit in range(100)),
        spans=spans,
        group_within="rack",
    )
    summary = summarize(placement, config_map="p")
    assert (len(summary.groups), summary.num_groups, summary.groups_in_one_domain) == (64, 100, 99)
    assert summary.groups[0].unit == 90


def test_a_placement_without_levels_has_nothing_to_tell_of_groups() -> None:
    placement = placement_of([(), ()], levels=(), units=((0, 1),), spans=(1,))
    summary = summarize(placement, config_map="p")
    assert (summary.level, summary.groups[0].domains) == (None, ["n0", "n1"])
    scene = running_job()
    status = place(BEGIN, scene.look(), placement, config_map="p")
    assert said(status, "TopologySatisfied") == ("True", "Satisfied")
