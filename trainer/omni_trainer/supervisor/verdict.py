"""What went wrong, and what is done about it. Pure: reports and history in, a verdict out.

Every generation ends with one report per node. The first true failure among them is the cause;
ranks that only lost a peer (Exit.PEER_LOST) are its cascade.
"""

import signal
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from omni_contract.names import Exit
from omni_contract.records import History, RunEvent
from omni_contract.spec_run import FaultClass, RestartAction, RestartSpec
from omni_planner.restart import count_restart, decide_restart


class Failure(BaseModel):
    """How one process ended that should not have."""

    model_config = ConfigDict(frozen=True)

    node: int
    rank: int | None
    """None: the supervisor of the node."""
    exit_code: int
    """Negative: the signal that killed it."""
    message: str
    """What it said last."""
    time_s: float
    """Unix time when it was seen."""
    order: int
    """Place in the order in which the job's supervisors saw failures."""
    hang: Literal["stalled", "silent"] | None = None
    """No new step in time; silent: not even a heartbeat."""
    out_of_memory: bool = False
    """The kernel killed for memory in this generation."""
    log: str = ""
    """File with its output, relative to the run folder."""
    tail: tuple[str, ...] = ()
    """Last lines of that file."""

    @property
    def is_cascade(self) -> bool:
        """Whether it only fell with another rank."""
        return self.hang is None and self.exit_code == Exit.PEER_LOST

    @property
    def fault(self) -> FaultClass:
        """Class of the failure."""
        if self.hang is not None:
            return FaultClass.HANG
        if self.exit_code == Exit.USER:
            return FaultClass.START_ERROR
        if self.exit_code == Exit.UNAVAILABLE:
            return FaultClass.DATA_SERVICE
        if self.exit_code < 0 or self.exit_code in (Exit.PEER_LOST, Exit.INTERRUPTED):
            return FaultClass.OOM if self.out_of_memory else FaultClass.UNKNOWN
        return FaultClass.APP_ERROR

    def describe(self, step: int) -> str:
        """One sentence: who, where, when, how, and where to read on."""
        who = "supervisor" if self.rank is None else f"rank {self.rank}"
        said = f": {self.message.strip().rstrip('.')}" if self.message.strip() else ""
        log = f"; log: {self.log}" if self.log else ""
        how = f"{self.fault}, {_ending(self)}"
        return f"{who} on node {self.node} failed after step {step} ({how}){said}{log}"


class Report(BaseModel):
    """What one supervisor knows at the end of a generation."""

    model_config = ConfigDict(frozen=True)

    node: int
    failures: tuple[Failure, ...]
    step: int
    """Most steps that one of its ranks has finished."""


class Verdict(BaseModel):
    """What all supervisors do next."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["restart", "new_attempt", "end"]
    exit_code: int
    """Exit code of the supervisors where they end."""
    message: str
    fault: FaultClass | None = None
    action: RestartAction | None = None
    cause: Failure | None = None
    step: int = 0
    history: History = History()
    """The restarts so far, with this one counted if it is one in place."""


def history_of(events: Sequence[RunEvent], initial: History | None = None) -> History:
    """The restarts in the events of a run, added to those before it."""
    history = initial or History()
    step = 0
    for event in events:
        if event.kind == "fault":
            step = event.step or 0
        elif event.kind == "restart":
            history = count_restart(history, event.fault or FaultClass.UNKNOWN, step=step)
    return history


def last_action(
    events: Sequence[RunEvent], fault: FaultClass, *, step: int
) -> RestartAction | None:
    """What was done when the same class struck last; None where a step was made since."""
    restart = next((e for e in reversed(events) if e.kind == "restart"), None)
    if restart is None or restart.fault is not fault:
        return None
    highest = max(e.step or 0 for e in events if e.kind == "fault")
    return None if step > highest else restart.action


def find_cause(failures: Sequence[Failure]) -> Failure:
    """The first true failure: no cascade, and of hung ranks the one without a heartbeat."""

    def place(failure: Failure) -> tuple[bool, bool, int, float]:
        stands_by = failure.hang == "stalled"
        return failure.is_cascade, stands_by, failure.order, failure.time_s

    return min(failures, key=place)


def decide(
    cause: Failure,
    *,
    step: int,
    history: History,
    spec: RestartSpec,
    previous: RestartAction | None = None,
    fault: FaultClass | None = None,
) -> Verdict:
    """What follows a failure at `step`, by the policy of the job.

    `previous` as in `decide_restart`. `fault` overrides the class that the failure itself would
    have.
    """
    fault = fault or cause.fault
    sentence = cause.describe(step)

    def verdict(
        kind: Literal["restart", "new_attempt", "end"],
        exit_code: Exit,
        message: str,
        *,
        action: RestartAction = RestartAction.FAIL_JOB,
        counted: History = history,
    ) -> Verdict:
        return Verdict(
            kind=kind,
            exit_code=exit_code,
            message=message,
            fault=fault,
            action=action,
            cause=cause,
            step=step,
            history=counted,
        )

    if cause.exit_code == Exit.STALE and cause.hang is None:
        message = f"this run has another holder now, so this one ended: {sentence}"
        return verdict("end", Exit.STALE, message)
    decision = decide_restart(
        fault, step=step, history=history, spec=spec, where="in_pod", previous=previous
    )
    action = decision.action
    if action is RestartAction.RESTART_IN_PLACE:
        counted = decision.history
        return verdict("restart", Exit.PEER_LOST, sentence, action=action, counted=counted)
    if action is not RestartAction.FAIL_JOB:
        return verdict("new_attempt", Exit.PEER_LOST, sentence, action=action)
    if fault is FaultClass.START_ERROR and decision.reason in ("NotRestartable", "Rule"):
        return verdict("end", Exit.USER, cause.message.strip() or sentence)
    return verdict("end", Exit.GAVE_UP, f"{decision.message}; cause: {sentence}")


def _ending(failure: Failure) -> str:
    if failure.hang == "silent":
        return "no new step in time and no heartbeat"
    if failure.hang == "stalled":
        return "no new step in time"
    if failure.exit_code < 0:
        try:
            return f"killed by {signal.Signals(-failure.exit_code).name}"
        except ValueError:
            return f"killed by signal {-failure.exit_code}"
    return f"exit code {failure.exit_code}"
