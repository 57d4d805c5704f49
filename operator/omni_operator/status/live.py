"""What is true about the pods of a job now: the conditions that follow from looking at them. Pure.

No message holds a number that changes with the clock alone: a quiet job's status stays the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER
from omni_contract.placement import JobPlacement
from omni_contract.reasons import ConcernReason
from omni_contract.records import JobHeartbeat
from omni_contract.spec import JobSpec
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import JobStatus, write_time
from omni_operator.faults.detect import describe, is_alive, waiting
from omni_operator.faults.exits import describe_exit, with_words
from omni_operator.faults.nodes import is_node_lost, lost_in_s
from omni_operator.state import Observed, PodFault, PodState
from omni_operator.status.conditions import count, set_condition, with_goodput, with_phase
from omni_operator.status.incidents import advance_incidents

_SILENT_AFTER_S: Final = 60.0
"""Heartbeats come every few seconds; a network may lose some."""
_NUM_TOLD: Final = 4
_REASONS: Final[Mapping[str, ConcernReason]] = {
    "InvalidImageName": "ImageCannotBePulled",
    "ErrImageNeverPull": "ImageCannotBePulled",
    "ErrImagePull": "ImageCannotBePulled",
    "ImagePullBackOff": "ImageCannotBePulled",
    "ImageInspectError": "ImageCannotBePulled",
    "RegistryUnavailable": "ImageCannotBePulled",
    "SignatureValidationFailed": "ImageCannotBePulled",
    "CreateContainerConfigError": "ContainerCannotStart",
    "CreateContainerError": "ContainerCannotStart",
    "CrashLoopBackOff": "ContainerRestarts",
}
"""The kubelet goes to and fro between two words for one thing; a reason of ours stays."""


def refresh(
    status: JobStatus, observed: Observed, spec: JobSpec, faults: Sequence[PodFault]
) -> JobStatus:
    """The status with all that a look at the pods of its attempt tells. Looking twice changes
    nothing. `faults` are those that were found and led to no new attempt."""
    if observed.plan is not None:
        progress = status.progress.model_copy(update={"num_steps": observed.plan.num_steps})
        status = status.model_copy(update={"progress": progress})
    placement = observed.placement
    if placement is None or placement.attempt != status.attempt:
        return with_phase(status, observed)
    pods = {pod.name: pod for pod in observed.pods}
    ranked = [_Place(name=p.name, pod=pods.get(p.name)) for p in placement.pods]
    status = _tell_data(status, observed, ranked)
    status = _tell_running(status, observed, ranked)
    status = _tell_restarting(status, observed)
    concerns = list(_concerns(status, observed, spec, faults))
    if concerns:
        said = "; ".join(message for _, message in concerns[:_NUM_TOLD])
        if len(concerns) > _NUM_TOLD:
            said += f"; and {len(concerns) - _NUM_TOLD} more"
        status = set_condition(status, "Degraded", True, concerns[0][0], said, observed=observed)
    else:
        said = "nothing is known to be wrong"
        status = set_condition(status, "Degraded", False, "Healthy", said, observed=observed)
    status = advance_incidents(status, observed, spec)
    return with_phase(status, observed)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A pod of the attempt, where there is one."""

    name: str
    pod: PodState | None

    @property
    def is_done(self) -> bool:
        """Whether its ranks have done all steps."""
        if self.pod is None:
            return False
        trainer = self.pod.container(TRAINER_CONTAINER)
        is_over = trainer is not None and trainer.is_terminated and trainer.exit_code == 0
        return is_over or self.pod.phase == "Succeeded"

    @property
    def is_running(self) -> bool:
        """Whether its trainer runs and is to go on."""
        if self.pod is None or not is_alive(self.pod):
            return False
        trainer = self.pod.container(TRAINER_CONTAINER)
        return trainer is not None and trainer.running_since_s is not None

    @property
    def has_data(self) -> bool:
        """Whether its data service answers, or is no longer needed."""
        if self.pod is None or self.is_done:
            return self.is_done
        data = self.pod.container(DATA_CONTAINER)
        return data is not None and data.is_ready and is_alive(self.pod)

    def explain(self) -> str:
        """Why the trainer does not run."""
        pod = self.pod
        if pod is None:
            return f"pod {self.name} does not exist"
        if pod.is_gated:
            return f"pod {self.name} is not released"
        if pod.is_terminal and pod.reason:
            return f"pod {self.name} failed: {with_words(pod.reason, pod.message)}"
        trainer = pod.container(TRAINER_CONTAINER)
        if trainer is not None and trainer.is_terminated:
            return f"pod {self.name} ended with {describe_exit(trainer)}"
        if pod.deleting_since_s is not None:
            return f"pod {self.name} is being deleted"
        if (wait := waiting(pod)) is not None:
            return f"pod {self.name} waits: {with_words(*wait)}"
        if pod.scheduled is not None and not pod.scheduled[0]:
            return f"pod {self.name} waits: {with_words(*pod.scheduled[1:])}"
        return f"pod {self.name} is starting"


def _tell_running(status: JobStatus, observed: Observed, ranked: Sequence[_Place]) -> JobStatus:
    num_running = sum(place.is_running for place in ranked)
    num_done = sum(place.is_done for place in ranked)
    done = f" and {num_done} are done" if num_done else ""
    said = f"{num_running} of {count(len(ranked), 'pod')} of attempt {status.attempt} run{done}"
    if num_running + num_done < len(ranked):
        idle = next(place for place in ranked if not (place.is_running or place.is_done))
        said += f"; {idle.explain()}"
        return set_condition(status, "Running", False, "PodsWait", said, observed=observed)
    if not num_running:
        return set_condition(status, "Running", False, "PodsAreDone", said, observed=observed)
    if status.start_time is None:
        status = status.model_copy(update={"start_time": write_time(observed.now_s)})
        status = with_goodput(status, observed.now_s)
    return set_condition(status, "Running", True, "AllPodsRun", said, observed=observed)


def _tell_data(status: JobStatus, observed: Observed, ranked: Sequence[_Place]) -> JobStatus:
    num_ready = sum(place.has_data for place in ranked)
    said = f"{num_ready} of {count(len(ranked), 'data service')} are ready"
    missing = next((place for place in ranked if not place.has_data), None)
    if missing is None:
        return set_condition(status, "DataServiceReady", True, "AllReady", said, observed=observed)
    said += f"; that of pod {missing.name} is not"
    return set_condition(status, "DataServiceReady", False, "NotReady", said, observed=observed)


def _tell_restarting(status: JobStatus, observed: Observed) -> JobStatus:
    beat = None if observed.progress is None else observed.progress.heartbeat
    if beat is not None and _restarts_in_place(status, beat):
        said = f"generation {beat.generation} of attempt {beat.attempt} starts in place"
        if beat.last_message:
            said += f" after {beat.last_message}"
        reason = RestartAction.RESTART_IN_PLACE
        return set_condition(status, "Restarting", True, reason, said, observed=observed)
    if status.holds("Restarting") and status.holds("Running"):
        said = f"all pods of attempt {status.attempt} run"
        return set_condition(status, "Restarting", False, "Restarted", said, observed=observed)
    return status


def _restarts_in_place(status: JobStatus, beat: JobHeartbeat) -> bool:
    is_current = (beat.attempt, beat.generation) == (status.attempt, status.generation)
    return is_current and beat.generation > 0 and beat.phase == "starting"


def _concerns(
    status: JobStatus, observed: Observed, spec: JobSpec, faults: Sequence[PodFault]
) -> Iterator[tuple[ConcernReason, str]]:
    """What is wrong and does not stop the job, or not yet: reason and sentence, gravest first."""
    placement = observed.placement
    if placement is None:
        return
    names = {placed.name for placed in placement.all_pods}
    for pod in observed.pods:
        if pod.name in names and (wait := waiting(pod)) is not None:
            reason = _REASONS.get(wait[0], "ContainerCannotStart")
            yield reason, f"pod {pod.name} waits: {with_words(*wait)}"
    yield from _node_concerns(placement, observed, spec)
    for fault in faults:
        if fault.index is None:
            yield "SpareLost", f"a spare is of no use: {describe(fault)}"
        elif fault.fault is FaultClass.NODE_TAINTED:
            yield "NodeTainted", f"{describe(fault)}; the job leaves it once another node is free"
    if status.holds("Running") and (silent := _silent_since_s(status, observed)) is not None:
        yield "NoHeartbeat", f"no heartbeat since {write_time(silent)}"
    if status.num_nodes is not None and status.num_nodes < spec.resources.nodes:
        asked = count(spec.resources.nodes, "node")
        again = f"kubectl mmtj restart {observed.job.key.name} asks for all again"
        yield "Shrunk", f"runs on {status.num_nodes} of {asked}: more had no room; {again}"


def _silent_since_s(status: JobStatus, observed: Observed) -> float | None:
    progress = observed.progress
    if progress is None or not observed.watch_is_healthy:
        return None
    is_old = observed.now_s - progress.renewed_s > _SILENT_AFTER_S
    return progress.renewed_s if is_old and progress.heartbeat.attempt == status.attempt else None


def _node_concerns(
    placement: JobPlacement, observed: Observed, spec: JobSpec
) -> Iterator[tuple[ConcernReason, str]]:
    for name in dict.fromkeys(placed.node for placed in placement.all_pods):
        if lost_in_s(name, observed, spec) is None or is_node_lost(name, observed, spec):
            continue
        node = observed.nodes.get(name)
        if node is None:
            yield "NodeNotReady", f"node {name} is gone from the API, but steps are made"
        else:
            since = write_time(node.ready_since_s)
            yield "NodeNotReady", f"node {name} has Ready={node.ready} since {since}"
