"""What a job's status is made of: conditions, phase, budget, and how much two statuses differ.

Pure: every function takes a status and gives the next one.
"""

from typing import Any, Final, Literal

from omni_contract.reasons import ConditionReason
from omni_contract.records import History
from omni_contract.status import (
    CONDITIONS,
    Condition,
    JobStatus,
    Phase,
    RestartBudget,
    read_time,
    write_time,
)
from omni_operator.state import Observed

Significance = Literal["nothing", "progress", "words", "facts"]
"""How much two statuses differ, and so how soon the newer one is to be written. The data services
count as words: they get ready a moment before or after their pods run, which is told at once."""

_SENTENCE_CHARACTERS: Final = 4096


def set_condition(
    status: JobStatus,
    type_: str,
    holds: bool | None,
    reason: ConditionReason,
    message: str,
    *,
    observed: Observed,
) -> JobStatus:
    """The status with one condition told anew. `holds` None means that nobody knows.

    The time of the last transition stays where only the words change.
    """
    before = status.condition(type_)
    said: Literal["True", "False", "Unknown"] = "Unknown"
    if holds is not None:
        said = "True" if holds else "False"
    is_same = before is not None and before.status == said
    condition = Condition(
        type=type_,
        status=said,
        reason=str(reason),
        message=clip(message),
        last_transition_time=before.last_transition_time
        if before is not None and is_same
        else write_time(observed.now_s),
        observed_generation=observed.job.generation,
    )
    others = [other for other in status.conditions if other.type != type_]
    ordered = sorted([*others, condition], key=lambda c: _ORDER.get(c.type, len(_ORDER)))
    return status.model_copy(update={"conditions": ordered})


def phase_of(status: JobStatus) -> Phase:
    """The conditions in one word."""
    for type_, phase in _PHASES:
        if status.holds(type_):
            is_done = phase == "Starting" and _reason(status, "Running") == "PodsAreDone"
            return "Running" if is_done else phase
    return "Pending"


def reason_of(status: JobStatus) -> str | None:
    """Reason of the condition that explains the phase: of a job that ought to run, the first one
    that keeps it from that, or what is wrong with it all the same."""
    for type_, _ in _OVER_ALL:
        if (found := status.condition(type_)) is not None and found.status == "True":
            return found.reason
    for type_ in ("Accepted", "Placed", "GangReady"):
        if status.holds("Running"):
            break
        if (found := status.condition(type_)) is not None and found.status == "False":
            return found.reason
    explains = status.condition("Degraded" if status.holds("Degraded") else "Running")
    return None if explains is None else explains.reason


def with_phase(status: JobStatus, observed: Observed) -> JobStatus:
    """The status with the phase of its conditions and its reason, as an answer to the spec of
    now."""
    return status.model_copy(
        update={
            "phase": phase_of(status),
            "reason": reason_of(status),
            "observed_generation": observed.job.generation,
        }
    )


def active_s(status: JobStatus, now_s: float) -> float:
    """Seconds since the job first ran, suspended time left out; the end stops the clock."""
    if status.start_time is None:
        return status.active_seconds
    end_s = now_s if status.completion_time is None else read_time(status.completion_time)
    return status.active_seconds + max(0.0, end_s - read_time(status.start_time))


def with_goodput(status: JobStatus, now_s: float) -> JobStatus:
    """The status with its goodput as of now."""
    total_s = active_s(status, now_s)
    goodput = None
    if total_s > 0:
        goodput = round(min(1.0, status.progress.useful_seconds / total_s), 4)
    return status.model_copy(update={"goodput": goodput})


def history_of(budget: RestartBudget) -> History:
    """What a status says was spent, as a restart decision takes it."""
    return History(
        user_restarts=budget.user,
        infrastructure_restarts=budget.infrastructure,
        restarts_without_progress=budget.without_progress,
        highest_step=budget.highest_step,
    )


def budget_of(history: History) -> RestartBudget:
    """What a restart decision counted, as a status holds it."""
    return RestartBudget(
        user=history.user_restarts,
        infrastructure=history.infrastructure_restarts,
        without_progress=history.restarts_without_progress,
        highest_step=history.highest_step,
    )


def merge_history(budget: RestartBudget, history: History) -> RestartBudget:
    """The budget with what supervisors counted, too. Told twice, it counts once."""
    theirs = budget_of(history)
    is_newer = _spent(theirs) >= _spent(budget)
    return RestartBudget(
        user=max(budget.user, theirs.user),
        infrastructure=max(budget.infrastructure, theirs.infrastructure),
        without_progress=theirs.without_progress if is_newer else budget.without_progress,
        highest_step=max(budget.highest_step, theirs.highest_step),
    )


def with_budget(status: JobStatus, budget: RestartBudget) -> JobStatus:
    """The status with a budget, and the restarts in all that follow from it."""
    return status.model_copy(update={"budget": budget, "restarts": _spent(budget)})


def significance(old: JobStatus, new: JobStatus) -> Significance:
    """How much has changed: progress and time alone, words and counts in them, or facts."""
    if old == new:
        return "nothing"
    if _facts(old) != _facts(new):
        return "facts"
    return "progress" if _words(old) == _words(new) else "words"


def clip(text: str) -> str:
    """A text that fits into a sentence of the status; of too long ones the beginning."""
    if len(text) <= _SENTENCE_CHARACTERS:
        return text
    return f"{text[: _SENTENCE_CHARACTERS - 3]}..."


def count(number: int, noun: str) -> str:
    """A number with its noun: 1 pod, 3 pods."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _spent(budget: RestartBudget) -> int:
    return budget.user + budget.infrastructure


def _facts(status: JobStatus) -> dict[str, Any]:
    facts = status.model_dump(exclude={"progress", "goodput", "conditions"})
    for condition in status.conditions:
        if condition.type != "DataServiceReady":
            facts[condition.type] = condition.model_dump(exclude={"message"})
    return facts


def _reason(status: JobStatus, type_: str) -> str | None:
    found = status.condition(type_)
    return None if found is None else found.reason


def _words(status: JobStatus) -> list[tuple[str, str]]:
    return [(condition.status, condition.message) for condition in status.conditions]


_ORDER: Final = {type_: place for place, type_ in enumerate(CONDITIONS)}
_OVER_ALL: Final[tuple[tuple[str, Phase], ...]] = (
    ("Failed", "Failed"),
    ("Completed", "Completed"),
    ("Suspended", "Suspended"),
    ("Restarting", "Restarting"),
)
"""These say why themselves."""
_PHASES: Final[tuple[tuple[str, Phase], ...]] = (
    *_OVER_ALL,
    ("Running", "Running"),
    ("GangReady", "Starting"),
    ("Placed", "Starting"),
)
"""The first condition that holds gives the phase."""
