"""What went wrong, and what is done about it. Pure: reports and history in, a verdict out.

Every generation ends with one report per node. The first true failure among them is the cause;
ranks that only lost a peer (Exit.PEER_LOST) are its cascade.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from omni_contract.names import Exit
from omni_contract.records import RunEvent
from omni_contract.spec_run import FaultClass, RestartAction, RestartSpec

DEFAULT_ACTIONS: Final[Mapping[FaultClass, RestartAction]] = MappingProxyType(
    {
        FaultClass.APP_ERROR: RestartAction.RESTART_IN_PLACE,
        FaultClass.OOM: RestartAction.RESTART_IN_PLACE,
        FaultClass.HANG: RestartAction.RESTART_IN_PLACE,
        FaultClass.DATA_SERVICE: RestartAction.RESTART_IN_PLACE,
        FaultClass.UNKNOWN: RestartAction.RESTART_IN_PLACE,
        FaultClass.RENDEZVOUS: RestartAction.RESTART_JOB,
        FaultClass.NODE_LOST: RestartAction.RESTART_JOB,
        FaultClass.START_ERROR: RestartAction.FAIL_JOB,
    }
)
"""What is done about the classes that a supervisor or the launcher can tell apart."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the run's events say about the restarts that were spent."""

    user_restarts: int = 0
    infrastructure_restarts: int = 0
    restarts_without_progress: int = 0
    """In a row, up to now."""
    highest_step: int = 0

    @classmethod
    def of(cls, events: Sequence[RunEvent]) -> "Ledger":
        """Fold the events of all attempts."""
        user = infrastructure = fruitless = highest = 0
        for event in events:
            if event.kind == "fault" and (event.step or 0) > highest:
                highest = event.step or 0
                fruitless = 0
            elif event.kind == "restart":
                fruitless += 1
                if event.fault is FaultClass.APP_ERROR:
                    user += 1
                else:
                    infrastructure += 1
        return cls(
            user_restarts=user,
            infrastructure_restarts=infrastructure,
            restarts_without_progress=fruitless,
            highest_step=highest,
        )


def find_cause(failures: Sequence[Failure]) -> Failure:
    """The first true failure: no cascade, and of hung ranks the one without a heartbeat."""

    def place(failure: Failure) -> tuple[bool, bool, int, float]:
        stands_by = failure.hang == "stalled"
        return failure.is_cascade, stands_by, failure.order, failure.time_s

    return min(failures, key=place)


def decide(
    cause: Failure, *, step: int, ledger: Ledger, spec: RestartSpec, fault: FaultClass | None = None
) -> Verdict:
    """What follows a failure at `step`, by the policy of the job.

    `fault` overrides the class that the failure itself would have.
    """
    fault = fault or cause.fault
    sentence = cause.describe(step)
    found = {"fault": fault, "cause": cause, "step": step}

    def end(exit_code: Exit, message: str) -> Verdict:
        return Verdict.model_validate(
            found | {"kind": "end", "exit_code": exit_code, "message": message}
            | {"action": RestartAction.FAIL_JOB}
        )  # fmt: skip

    if cause.exit_code == Exit.STALE and cause.hang is None:
        return end(Exit.STALE, f"another attempt holds this run, so this one ended: {sentence}")
    rule = next((rule for rule in spec.rules if fault in rule.when.class_), None)
    action = rule.do if rule is not None else DEFAULT_ACTIONS[fault]
    if action is RestartAction.FAIL_JOB:
        if fault is FaultClass.START_ERROR and cause.message.strip():
            return end(Exit.USER, cause.message.strip())
        if fault is FaultClass.START_ERROR:
            return end(Exit.USER, sentence)
        return end(Exit.GAVE_UP, f"restart.rules says FailJob for {fault}: {sentence}")
    is_user_fault = fault is FaultClass.APP_ERROR
    spent, limit, field = (
        (ledger.user_restarts, spec.limit, "restart.limit")
        if is_user_fault
        else (ledger.infrastructure_restarts, spec.infrastructure_limit, "infrastructureLimit")
    )
    if spent >= limit:
        return end(
            Exit.GAVE_UP, f"gave up: {spent} restarts used up {field} {limit}; cause: {sentence}"
        )
    fruitless = 0 if step > ledger.highest_step else ledger.restarts_without_progress
    if fruitless >= spec.no_progress_limit:
        return end(
            Exit.GAVE_UP,
            f"gave up: {fruitless} restarts in a row reached no new step "
            f"(restart.noProgressLimit {spec.no_progress_limit}); cause: {sentence}",
        )
    kind = "restart" if action is RestartAction.RESTART_IN_PLACE else "new_attempt"
    return Verdict.model_validate(
        found
        | {"kind": kind, "exit_code": Exit.PEER_LOST, "message": sentence, "action": action}
    )  # fmt: skip


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
