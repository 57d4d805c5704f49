"""The record of a fault: what it was, what was done, and how long each stage of that took. Pure."""

from typing import Final

from omni_contract.names import TRAINER_CONTAINER
from omni_contract.records import JobHeartbeat
from omni_contract.spec import JobSpec
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import Incident, JobStatus, read_time, write_time
from omni_operator.faults.detect import describe
from omni_operator.faults.nodes import is_node_lost
from omni_operator.state import Observed, PodFault, PodState
from omni_operator.status.conditions import clip, count

_KEPT: Final = 10
_WHOLE_SECOND_S: Final = 1.0
"""Kubernetes cuts times to whole seconds."""
_STAGES: Final = ("terminate", "schedule", "start", "firstStep")
"""Stages that follow the decision, in their order; they begin when the attempt is opened."""


def open_incident(
    cause: PodFault, action: RestartAction, *, observed: Observed, seen_s: float | None = None
) -> Incident:
    """What has just been decided about a fault.

    `seen_s` is when what decided it was first seen, where that was before this look at the job.
    """
    status = observed.job.status
    seen_s = observed.now_s if seen_s is None else seen_s
    end, tail = cause.end, ""
    if end is not None and end.tail:
        tail = "\nlast lines:\n" + "\n".join(end.tail)
    return Incident(
        time=write_time(seen_s),
        fault=cause.fault,
        action=action,
        attempt=status.attempt,
        generation=status.generation if end is None else end.generation,
        node=cause.index,
        rank=None if end is None else end.rank,
        message=clip(describe(cause) + tail),
        seconds={
            "detect": _seconds(seen_s - cause.time_s),
            "decide": _seconds(observed.now_s - seen_s),
        },
        pod=cause.pod or None,
        kubernetes_node=cause.node,
    )


def note_restart_in_place(status: JobStatus, beat: JobHeartbeat, *, observed: Observed) -> Incident:
    """What the supervisors did by themselves since the last look: one incident, though they may
    have done it several times. They tell of the newest; when it began, nobody knows here."""
    skipped = beat.generation - status.generation - 1
    more = f" (and {count(skipped, 'restart')} in place just before)" if skipped else ""
    return Incident(
        time=write_time(observed.now_s),
        fault=beat.last_fault or FaultClass.UNKNOWN,
        action=RestartAction.RESTART_IN_PLACE,
        attempt=beat.attempt,
        generation=beat.generation - 1,
        message=clip((beat.last_message or "the supervisors restarted all ranks") + more),
    )


def add_incident(status: JobStatus, incident: Incident) -> JobStatus:
    """The status with one more incident; the oldest go."""
    return status.model_copy(update={"incidents": [*status.incidents, incident][-_KEPT:]})


def advance_incidents(status: JobStatus, observed: Observed, spec: JobSpec) -> JobStatus:
    """Fill in the stages that are over by now of what is being recovered from.

    A stage once told stays. What another fault cut short never ends.
    """
    incidents = list(status.incidents)
    for at, incident in enumerate(incidents):
        if incident.action is RestartAction.FAIL_JOB or "firstStep" in incident.seconds:
            continue
        seconds = dict(incident.seconds)
        if "decide" not in seconds:
            if incident.attempt == status.attempt:
                over_s = _first_step_s(observed, after=(incident.attempt, incident.generation))
                if over_s is not None:
                    seconds["firstStep"] = _seconds(over_s - read_time(incident.time))
        elif incident.attempt == status.attempt - 1 and status.opened_at is not None:
            _advance(seconds, read_time(status.opened_at), status, observed, spec)
        if seconds != incident.seconds:
            incidents[at] = incident.model_copy(update={"seconds": seconds})
    return status.model_copy(update={"incidents": incidents})


def _advance(
    seconds: dict[str, float], opened_s: float, status: JobStatus, observed: Observed, spec: JobSpec
) -> None:
    """Go through the stages of a new attempt up to the first one that is not over."""
    at_s = opened_s
    for stage in _STAGES:
        if stage in seconds:
            at_s += seconds[stage]
            continue
        over_s = _over_s(stage, status, observed, spec)
        if over_s is None:
            return
        seconds[stage] = _seconds(over_s - at_s)
        at_s = max(at_s, over_s)


def _over_s(stage: str, status: JobStatus, observed: Observed, spec: JobSpec) -> float | None:
    """When a stage of the attempt was over; None: it is not."""
    placement = observed.placement
    if placement is None or placement.attempt != status.attempt:
        return None
    names = {placed.name for placed in placement.all_pods}
    if stage == "terminate":
        old = [pod for pod in observed.pods if pod.name not in names]
        is_over = all(_is_out_of_the_way(pod, observed, spec) for pod in old)
        return observed.now_s if is_over else None
    if stage == "firstStep":
        return _first_step_s(observed, after=(status.attempt, -1))
    pods = {pod.name: pod for pod in observed.pods}
    ranked = [pods.get(placed.name) for placed in placement.pods]
    if stage == "schedule":
        is_over = all(pod is not None and pod.node is not None for pod in ranked)
        return observed.now_s if is_over else None
    started = [_started_s(pod) for pod in ranked]
    if any(time_s is None for time_s in started):
        return None
    # Pods that live on have run for long: the newest one tells when all ran.
    return _no_later(max(time_s for time_s in started if time_s is not None), observed.now_s)


def _is_out_of_the_way(pod: PodState, observed: Observed, spec: JobSpec) -> bool:
    return pod.is_terminal or (pod.node is not None and is_node_lost(pod.node, observed, spec))


def _started_s(pod: PodState | None) -> float | None:
    trainer = None if pod is None else pod.container(TRAINER_CONTAINER)
    if trainer is None or trainer.is_terminated:
        return None
    return trainer.running_since_s


def _first_step_s(observed: Observed, *, after: tuple[int, int]) -> float | None:
    """When the first step behind the restart point was made, by a process newer than a pair."""
    progress = observed.progress
    if progress is None:
        return None
    beat = progress.heartbeat
    if beat.phase == "starting" or (beat.attempt, beat.generation) <= after:
        return None
    # By a later look there may be newer checkpoints; older trainers tell of no other.
    resumed = beat.checkpoint_step if beat.resumed_step is None else beat.resumed_step
    made = beat.step - (resumed or 0)
    if made <= 0:
        return progress.step_since_s if beat.phase == "done" else None
    # Heartbeats come seconds apart: the steps made in between tell how long ago the first one was.
    return progress.step_since_s - (made - 1) * (beat.step_s or 0)


def _no_later(record_s: float, now_s: float) -> float:
    """A time cut to whole seconds: what it stands for was before the next one, and before now."""
    return min(record_s + _WHOLE_SECOND_S, now_s)


def _seconds(span_s: float) -> float:
    return round(max(0.0, span_s), 3)
