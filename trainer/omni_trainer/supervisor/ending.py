"""How an attempt ended for one supervisor, and what its pod makes of it. Pure but for one file."""

import signal
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.pod_info import Assignment
from omni_contract.records import History, PodEnd
from omni_contract.shared_files import DataEnd
from omni_contract.spec_run import FaultClass
from omni_trainer.supervisor.verdict import Verdict

MESSAGE_BYTES: Final = 4096
"""Most that the kubelet keeps of a termination message."""


class AttemptEnd(BaseModel):
    """What a supervisor knew when it ended by itself."""

    model_config = ConfigDict(frozen=True)

    exit_code: int
    generation: int
    step: int
    """Most steps finished by one of this node's ranks in the attempt."""
    message: str
    """Why, in a sentence; empty where all went well."""
    verdict: Verdict | None = None
    """The newest one; None where no generation ended."""
    history: History
    """With the restarts in place of this attempt counted."""

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.model_dump_json())

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the file; None: the supervisor was killed before it wrote one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


def data_ended_early(step: int, plan: JobPlan) -> str | None:
    """What to tell the user where the data ended before the plan did (C18); None: it did not."""
    if step >= plan.num_steps:
        return None
    return (
        f"the data ended after step {step} of {plan.num_steps}; give the sources "
        "whenExhausted: repeat, or train fewer tokens"
    )


def conclude(
    end: AttemptEnd | None, exit_code: int, *, part: Assignment, plan: JobPlan, ran_out: bool
) -> PodEnd | None:
    """How the pod ends after its supervisor ended by itself; None: it waits for another attempt.

    `ran_out`: the kernel killed for memory meanwhile.
    """
    if end is None or end.exit_code != exit_code:
        how = f"exit code {exit_code}"
        if exit_code < 0:
            how = f"killed by {signal.Signals(-exit_code).name}"
        if exit_code == Exit.PEER_LOST:
            return None  # cut off for so long that it ended itself
        return PodEnd(
            attempt=part.attempt,
            generation=0 if end is None else end.generation,
            exit_code=Exit.ERROR,
            fault=FaultClass.OOM if ran_out else FaultClass.UNKNOWN,
            message=f"the supervisor of node {part.index} failed ({how})",
            history=part.history if end is None else end.history,
        )
    if exit_code == Exit.OK:
        words = data_ended_early(end.step, plan)
        if words is None:
            return _end_of(end, part, Exit.OK, None, "all steps are done")
        return _end_of(end, part, Exit.USER, FaultClass.START_ERROR, words)
    verdict = end.verdict
    if exit_code == Exit.PEER_LOST:
        cause = None if verdict is None else verdict.cause
        if verdict is None or verdict.kind != "new_attempt" or cause is None:
            return None
        is_mine = cause.node == part.index
        return _end_of(end, part, Exit.ERROR, verdict.fault, end.message) if is_mine else None
    if exit_code == Exit.GAVE_UP and verdict is not None:
        return _end_of(end, part, Exit.GAVE_UP, verdict.fault, end.message)
    if exit_code in (Exit.USER, Exit.STALE):
        return _end_of(end, part, Exit(exit_code), FaultClass.START_ERROR, end.message)
    return _end_of(end, part, Exit.ERROR, FaultClass.UNKNOWN, end.message)


def conclude_data(end: DataEnd, part: Assignment) -> PodEnd:
    """How the pod ends when its data service cannot go on."""
    is_mistake = end.exit_code == Exit.USER
    return PodEnd(
        attempt=part.attempt,
        generation=0,
        exit_code=Exit.USER if is_mistake else Exit.ERROR,
        fault=FaultClass.START_ERROR if is_mistake else FaultClass.DATA_SERVICE,
        message=end.message,
        history=part.history,
    )


def termination_message(end: PodEnd) -> bytes:
    """The record as JSON, shortened until the kubelet keeps all of it."""
    while len(text := end.model_dump_json(exclude_defaults=True).encode()) > MESSAGE_BYTES:
        if end.tail:
            end = end.model_copy(update={"tail": end.tail[1:]})
        else:
            surplus = len(text) - MESSAGE_BYTES  # a character takes up to 6 bytes
            kept = len(end.message.removesuffix(" ...")) - surplus // 6 - 1
            end = end.model_copy(update={"message": f"{end.message[:kept]} ..."})
    return text


def _end_of(
    end: AttemptEnd, part: Assignment, code: Exit, fault: FaultClass | None, message: str
) -> PodEnd:
    cause = None if end.verdict is None or fault is None else end.verdict.cause
    return PodEnd(
        attempt=part.attempt,
        generation=end.generation,
        exit_code=code,
        fault=fault,
        step=end.step,
        rank=None if cause is None else cause.rank,
        message=message,
        tail=() if cause is None or code == Exit.USER else cause.tail,
        history=end.history,
    )
