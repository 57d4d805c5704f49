"""What the heartbeat of rank 0's supervisor says: progress, goodput, restarts in place. Pure."""

import math

from omni_contract.records import JobHeartbeat
from omni_contract.status import JobProgress, JobStatus, write_time
from omni_operator.state import Observed
from omni_operator.status.conditions import merge_history, with_budget, with_goodput
from omni_operator.status.incidents import add_incident, note_restart_in_place


def absorb_heartbeat(status: JobStatus, observed: Observed) -> JobStatus:
    """The status with all that the heartbeat of its attempt says; told twice, it counts once.

    A heartbeat of an older attempt says nothing: steps that were not kept are done again.
    """
    if observed.progress is None or observed.progress.heartbeat.attempt != status.attempt:
        return status
    beat = observed.progress.heartbeat
    if beat.generation > status.generation:
        incident = note_restart_in_place(status, beat, observed=observed)
        status = add_incident(status, incident)
        status = status.model_copy(update={"generation": beat.generation})
    status = with_budget(status, merge_history(status.budget, beat.history))
    progress = _next_progress(status.progress, beat, observed.progress.step_since_s)
    if progress == status.progress:
        return status
    has_new_steps = progress.highest_step > status.progress.highest_step
    status = status.model_copy(update={"progress": progress})
    # Only a new step moves the goodput: else it would change with the clock, at every look.
    return with_goodput(status, observed.now_s) if has_new_steps else status


def _next_progress(before: JobProgress, beat: JobHeartbeat, since_s: float) -> JobProgress:
    # Steps up to the highest were counted when they were first done.
    num_new = max(0, beat.step - before.highest_step)
    useful_s = before.useful_seconds + num_new * (_finite(beat.step_s) or 0)
    has_grown = beat.step > before.step
    return JobProgress(
        step=beat.step,
        highest_step=max(before.highest_step, beat.step),
        num_steps=before.num_steps,
        tokens=beat.tokens,
        tokens_per_second=_finite(beat.tokens_per_second),
        loss=_short(_finite(beat.loss)),
        checkpoint_step=beat.checkpoint_step,
        update_time=write_time(since_s) if has_grown else before.update_time,
        useful_seconds=round(useful_s, 3),
    )


def _finite(number: float | None) -> float | None:
    """The API server takes no NaN, and one never equals itself."""
    return number if number is not None and math.isfinite(number) else None


def _short(number: float | None) -> float | None:
    """`kubectl get` prints all digits that there are."""
    return None if number is None else float(f"{number:.5g}")
