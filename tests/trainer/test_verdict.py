"""The cause is the first true failure, and the policy of the job says what follows."""

from typing import Any

import pytest

from omni_contract.names import Exit
from omni_contract.records import History, RunEvent
from omni_contract.spec_run import FaultClass, RestartAction, RestartSpec
from omni_trainer.events import unrecovered_since
from omni_trainer.supervisor.verdict import (
    Failure,
    Verdict,
    decide,
    find_cause,
    history_of,
    last_action,
)


def failure(rank: int = 2, exit_code: int = 1, *, order: int = 1, **more: Any) -> Failure:
    fields = {"node": rank // 2, "message": "ValueError: boom", "time_s": 1.0, **more}
    return Failure(rank=rank, exit_code=exit_code, order=order, **fields)


def event(
    kind: str, step: int = 0, fault: str | None = None, action: str | None = None
) -> RunEvent:
    return RunEvent.model_validate(
        {"time_s": 1.0, "kind": kind, "attempt": 1, "generation": 0, "message": "", "step": step}
        | ({"fault": fault} if fault else {})
        | ({"action": action} if action else {})
    )


def ruled(
    exit_code: int,
    *,
    step: int = 5,
    history: History | None = None,
    previous: RestartAction | None = None,
    **spec: Any,
) -> Verdict:
    return decide(
        failure(exit_code=exit_code),
        step=step,
        history=history or History(),
        spec=RestartSpec.parse(spec),
        previous=previous,
    )


def test_a_cascade_is_never_the_cause_however_early_it_was_seen() -> None:
    lost = [failure(rank, Exit.PEER_LOST, order=rank) for rank in (0, 1, 3)]
    assert find_cause([*lost, failure(2, 1, order=9)]).rank == 2


def test_of_true_failures_the_first_seen_is_the_cause() -> None:
    assert find_cause([failure(0, 1, order=2), failure(3, -9, order=1)]).rank == 3


def test_of_hung_ranks_the_one_without_a_heartbeat_is_the_cause() -> None:
    stalled = [failure(rank, -9, order=rank, hang="stalled") for rank in (0, 1, 3)]
    cause = find_cause([*stalled, failure(2, -9, order=9, hang="silent")])
    assert (cause.rank, cause.fault) == (2, FaultClass.HANG)


@pytest.mark.parametrize(
    ("exit_code", "more", "fault"),
    [
        (1, {}, FaultClass.APP_ERROR),
        (-9, {}, FaultClass.UNKNOWN),
        (-9, {"out_of_memory": True}, FaultClass.OOM),
        (Exit.USER, {}, FaultClass.START_ERROR),
        (Exit.PEER_LOST, {}, FaultClass.UNKNOWN),
        (Exit.UNAVAILABLE, {}, FaultClass.DATA_SERVICE),
        (-9, {"hang": "stalled"}, FaultClass.HANG),
    ],
)
def test_classes(exit_code: int, more: dict[str, Any], fault: FaultClass) -> None:
    assert failure(exit_code=exit_code, **more).fault is fault


def test_a_users_mistake_is_not_restarted_and_speaks_for_itself() -> None:
    verdict = ruled(Exit.USER)
    assert (verdict.kind, verdict.exit_code) == ("end", Exit.USER)
    assert verdict.message == "ValueError: boom"


def test_a_stale_rank_ends_the_attempt() -> None:
    assert (ruled(Exit.STALE).kind, ruled(Exit.STALE).exit_code) == ("end", Exit.STALE)


def test_user_faults_use_up_the_users_budget_and_killed_processes_do_not() -> None:
    spent = History(user_restarts=2)
    assert ruled(1, history=spent, limit=3).kind == "restart"
    given_up = ruled(1, history=spent, limit=2)
    assert (given_up.kind, given_up.exit_code) == ("end", Exit.GAVE_UP)
    assert ruled(-9, history=spent, limit=2).kind == "restart"
    spent = History(infrastructure_restarts=4)
    assert ruled(-9, history=spent, infrastructureLimit=4).exit_code == Exit.GAVE_UP


def test_giving_up_names_class_rank_node_step_exit_and_log() -> None:
    cause = failure(exit_code=1, log="logs/rank-2.1.0.log")
    verdict = decide(cause, step=41, history=History(), spec=RestartSpec.parse({"limit": 0}))
    for part in ("AppError", "rank 2", "node 1", "step 41", "exit code 1", "logs/rank-2.1.0.log",
                 "restart.limit 0", "ValueError: boom"):  # fmt: skip
        assert part in verdict.message


def test_restarts_without_a_new_step_end_the_job_but_progress_starts_the_count_anew() -> None:
    rounds = [event("fault", 5), event("restart"), event("fault", 5), event("restart")]
    history = history_of(rounds)
    assert (history.restarts_without_progress, history.highest_step) == (2, 5)
    assert ruled(-9, step=5, history=history, noProgressLimit=2).exit_code == Exit.GAVE_UP
    assert ruled(-9, step=5, history=history, noProgressLimit=3).kind == "restart"
    assert ruled(-9, step=6, history=history, noProgressLimit=2).kind == "restart"
    moved = history_of([*rounds, event("fault", 6), event("restart")])
    assert moved.restarts_without_progress == 1


def test_budgets_are_counted_from_the_events_of_all_attempts() -> None:
    events = [event("restart", fault="AppError"), event("restart", fault="Hang"), event("started"),
              event("restart", fault="Unknown")]  # fmt: skip
    history = history_of(events)
    assert (history.user_restarts, history.infrastructure_restarts) == (1, 2)


def test_restarts_of_earlier_attempts_are_the_start_of_the_count() -> None:
    before = History(
        user_restarts=2, infrastructure_restarts=5, restarts_without_progress=1, highest_step=30
    )
    again = [event("fault", 30), event("restart", fault="AppError")]
    assert history_of(again, before) == History(
        user_restarts=3, infrastructure_restarts=5, restarts_without_progress=2, highest_step=30
    )
    assert history_of([], before) == before


def test_a_verdict_counts_restarts_in_place_and_leaves_others_to_whoever_does_them() -> None:
    assert ruled(1).history == History(user_restarts=1, restarts_without_progress=1, highest_step=5)
    rules = [{"when": {"class": ["AppError"]}, "do": "ReplacePod"}]
    assert ruled(1, rules=rules).history == History()
    assert ruled(1, limit=0).history == History()


def test_a_class_that_returns_without_a_step_asks_for_a_new_attempt() -> None:
    rounds = [event("fault", 5), event("restart", fault="Unknown", action="RestartInPlace")]
    previous = last_action(rounds, FaultClass.UNKNOWN, step=5)
    assert previous is RestartAction.RESTART_IN_PLACE
    verdict = ruled(-9, previous=previous)
    assert (verdict.kind, verdict.action) == ("new_attempt", RestartAction.REPLACE_POD)
    assert last_action(rounds, FaultClass.UNKNOWN, step=6) is None
    assert last_action(rounds, FaultClass.HANG, step=5) is None
    assert last_action([], FaultClass.HANG, step=5) is None


def test_the_first_rule_that_matches_overrides_the_default() -> None:
    rules = [
        {"when": {"class": ["AppError"]}, "do": "RestartJob"},
        {"when": {"class": ["AppError", "Unknown"]}, "do": "FailJob"},
    ]
    assert ruled(1, rules=rules).kind == "new_attempt"
    assert ruled(1, rules=rules).action is RestartAction.RESTART_JOB
    failed = ruled(-9, rules=rules)
    assert (failed.kind, failed.exit_code) == ("end", Exit.GAVE_UP)
    assert "FailJob" in failed.message


def test_recovery_is_measured_from_the_first_fault_that_no_step_followed() -> None:
    first, second = event("fault"), event("fault").model_copy(update={"time_s": 7.0})
    assert unrecovered_since([first, event("restart"), second]) == 1.0
    assert unrecovered_since([first, event("recovered"), second]) == 7.0
    assert unrecovered_since([first, event("recovered")]) is None
