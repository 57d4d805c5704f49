"""Which restart follows a fault: rules, escalation and budgets of a job. Pure.

Supervisors, launcher and operator decide alike, because they ask here.
"""

from dataclasses import dataclass
from typing import Literal

from omni_contract.faults import FAULTS
from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction, RestartSpec

_ORDER = tuple(RestartAction)
"""Cheapest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is done about a fault, and the history with it counted."""

    action: RestartAction
    reason: Literal[
        "Default", "Rule", "Escalated", "NotRestartable",
        "UserLimit", "InfrastructureLimit", "NoProgress",
    ]  # fmt: skip
    message: str
    """Why the job ends, in a sentence without the fault itself; empty where it goes on."""
    history: History


def decide_restart(
    fault: FaultClass,
    *,
    step: int,
    history: History,
    spec: RestartSpec,
    where: Literal["in_pod", "by_operator"],
    previous: RestartAction | None = None,
) -> Decision:
    """What follows a fault after `step` finished steps.

    `previous` is what was done about the same class when it struck last without a step made since;
    the next dearer action follows, but a restart never escalates to giving up: budgets do that.
    """
    row = FAULTS[fault]
    rule = next((rule for rule in spec.rules if fault in rule.when.class_), None)
    default = row.in_pod if where == "in_pod" else row.by_operator
    action = rule.do if rule is not None else default or row.by_operator
    reason: Literal["Default", "Rule", "Escalated"] = "Default" if rule is None else "Rule"
    if previous is not None and action is not RestartAction.FAIL_JOB:
        dearest = _ORDER.index(RestartAction.RESTART_JOB)
        escalated = _ORDER[min(_ORDER.index(previous) + 1, dearest)]
        if _ORDER.index(escalated) > _ORDER.index(action):
            action, reason = escalated, "Escalated"
    if action is RestartAction.FAIL_JOB:
        if rule is not None:
            return _end(history, "Rule", f"restart.rules says FailJob for {fault}")
        return _end(history, "NotRestartable", f"no restart mends {fault}")
    if row.budget == "none":
        return Decision(action=action, reason=reason, message="", history=history)
    made_progress = step > history.highest_step
    fruitless = 0 if made_progress else history.restarts_without_progress
    if row.budget == "user" and history.user_restarts >= spec.limit:
        used = f"gave up: {history.user_restarts} restarts used up restart.limit {spec.limit}"
        return _end(history, "UserLimit", used)
    if row.budget == "infrastructure":
        spent, limit = history.infrastructure_restarts, spec.infrastructure_limit
        if spent >= limit:
            used = f"gave up: {spent} restarts used up restart.infrastructureLimit {limit}"
            return _end(history, "InfrastructureLimit", used)
    if fruitless >= spec.no_progress_limit:
        return _end(
            history,
            "NoProgress",
            f"gave up: {fruitless} restarts in a row reached no new step "
            f"(restart.noProgressLimit {spec.no_progress_limit})",
        )
    counted = count_restart(history, fault, step=step)
    return Decision(action=action, reason=reason, message="", history=counted)


def count_restart(history: History, fault: FaultClass, *, step: int) -> History:
    """The history with one more restart in it, after a fault that struck after `step` steps."""
    budget = FAULTS[fault].budget
    if budget == "none":
        return history
    made_progress = step > history.highest_step
    return History(
        user_restarts=history.user_restarts + (budget == "user"),
        infrastructure_restarts=history.infrastructure_restarts + (budget == "infrastructure"),
        restarts_without_progress=1 if made_progress else history.restarts_without_progress + 1,
        highest_step=max(history.highest_step, step),
    )


def _end(
    history: History,
    reason: Literal["Rule", "NotRestartable", "UserLimit", "InfrastructureLimit", "NoProgress"],
    message: str,
) -> Decision:
    return Decision(action=RestartAction.FAIL_JOB, reason=reason, message=message, history=history)
