"""Which restart follows a fault: rules, escalation, every limit, and what is counted."""

from typing import Any

import pytest

from omni_contract.faults import FAULTS
from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction, RestartSpec
from omni_planner.restart import Decision, count_restart, decide_restart


def decided(
    fault: FaultClass = FaultClass.APP_ERROR,
    *,
    step: int = 5,
    history: History | None = None,
    where: Any = "by_operator",
    previous: RestartAction | None = None,
    **spec: Any,
) -> Decision:
    return decide_restart(
        fault,
        step=step,
        history=history or History(),
        spec=RestartSpec.parse(spec),
        where=where,
        previous=previous,
    )


@pytest.mark.parametrize("fault", FaultClass)
def test_without_a_rule_the_table_decides(fault: FaultClass) -> None:
    row = FAULTS[fault]
    for where, action in (
        ("in_pod", row.in_pod or row.by_operator),
        ("by_operator", row.by_operator),
    ):
        decision = decided(fault, where=where)
        assert decision.action is action
        expected = "NotRestartable" if action is RestartAction.FAIL_JOB else "Default"
        assert decision.reason == expected


def test_the_first_rule_that_matches_counts() -> None:
    rules = [
        {"when": {"class": ["Hang"]}, "do": "RestartGroup"},
        {"when": {"class": ["AppError", "Hang"]}, "do": "FailJob"},
    ]
    hang = decided(FaultClass.HANG, rules=rules)
    assert (hang.action, hang.reason) == (RestartAction.RESTART_GROUP, "Rule")
    failed = decided(rules=rules)
    assert (failed.action, failed.reason) == (RestartAction.FAIL_JOB, "Rule")
    assert failed.message == "restart.rules says FailJob for AppError"
    assert failed.history == History()


@pytest.mark.parametrize(
    ("previous", "action"),
    [
        (RestartAction.RESTART_IN_PLACE, RestartAction.REPLACE_POD),
        (RestartAction.REPLACE_POD, RestartAction.RESTART_GROUP),
        (RestartAction.RESTART_GROUP, RestartAction.RESTART_JOB),
        (RestartAction.RESTART_JOB, RestartAction.RESTART_JOB),
    ],
)
def test_a_class_that_returns_gets_the_next_dearer_restart_but_never_the_end(
    previous: RestartAction, action: RestartAction
) -> None:
    decision = decided(FaultClass.HANG, where="in_pod", previous=previous)
    assert (decision.action, decision.reason) == (action, "Escalated")


def test_escalation_never_makes_an_action_cheaper() -> None:
    decision = decided(FaultClass.POD_DELETED, previous=RestartAction.RESTART_IN_PLACE)
    assert (decision.action, decision.reason) == (RestartAction.RESTART_GROUP, "Default")


def test_the_users_limit_ends_faults_of_the_program_only() -> None:
    spent = History(user_restarts=2)
    assert decided(history=spent, limit=3).action is RestartAction.REPLACE_POD
    given_up = decided(history=spent, limit=2)
    assert (given_up.action, given_up.reason) == (RestartAction.FAIL_JOB, "UserLimit")
    assert given_up.message == "gave up: 2 restarts used up restart.limit 2"
    assert decided(FaultClass.NODE_LOST, history=spent, limit=2).reason == "Default"


def test_the_infrastructure_limit_ends_all_other_faults_only() -> None:
    spent = History(infrastructure_restarts=4)
    assert decided(FaultClass.NODE_LOST, history=spent, infrastructureLimit=5).reason == "Default"
    given_up = decided(FaultClass.NODE_LOST, history=spent, infrastructureLimit=4)
    assert given_up.reason == "InfrastructureLimit"
    assert given_up.message == "gave up: 4 restarts used up restart.infrastructureLimit 4"
    assert decided(history=spent, infrastructureLimit=4).reason == "Default"


def test_restarts_in_a_row_without_a_new_step_end_the_job_whatever_the_budgets() -> None:
    stuck = History(restarts_without_progress=3, highest_step=5)
    for fault in (FaultClass.APP_ERROR, FaultClass.NODE_LOST):
        given_up = decided(fault, history=stuck, step=5, limit=99, noProgressLimit=3)
        assert given_up.reason == "NoProgress"
        assert "3 restarts in a row reached no new step" in given_up.message
        assert given_up.history == stuck
    assert decided(history=stuck, step=5, noProgressLimit=4).reason == "Default"
    moved = decided(history=stuck, step=6, noProgressLimit=3)
    assert moved.reason == "Default"
    assert (moved.history.restarts_without_progress, moved.history.highest_step) == (1, 6)


def test_c40_a_restart_is_counted_once_in_one_budget() -> None:
    before = History(
        user_restarts=1, infrastructure_restarts=1, restarts_without_progress=1, highest_step=7
    )
    counts = {"user": (2, 1), "infrastructure": (1, 2), "none": (1, 1)}
    for fault in FaultClass:
        after = count_restart(before, fault, step=7)
        assert (after.user_restarts, after.infrastructure_restarts) == counts[FAULTS[fault].budget]
        fruitless = 1 if FAULTS[fault].budget == "none" else 2
        assert after.restarts_without_progress == fruitless
        decision = decided(fault, history=before, step=7)
        given_up = decision.action is RestartAction.FAIL_JOB
        assert decision.history == (before if given_up else after)


def test_waiting_for_room_spends_nothing_however_often() -> None:
    stuck = History(
        user_restarts=9, infrastructure_restarts=9, restarts_without_progress=9, highest_step=5
    )
    decision = decided(FaultClass.PENDING_TIMEOUT, history=stuck, limit=1, infrastructureLimit=1)
    assert decision.action is RestartAction.RESTART_JOB
    assert decision.history == stuck


def test_a_mistake_that_a_rule_restarts_all_the_same_ends_at_the_users_limit() -> None:
    rules = [{"when": {"class": ["StartError"]}, "do": "RestartInPlace"}]
    first = decided(FaultClass.START_ERROR, where="in_pod", rules=rules, limit=1)
    assert first.action is RestartAction.RESTART_IN_PLACE
    again = decided(FaultClass.START_ERROR, history=first.history, rules=rules, limit=1)
    assert again.reason == "UserLimit"
