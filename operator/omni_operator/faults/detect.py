"""Finds what is wrong with the pods of an attempt, from the records of nodes and pods. Pure.

The sources are asked in the order of trust: node, disruption, pod, container, message. Never logs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER, Exit
from omni_contract.placement import PlacedPod
from omni_contract.spec import JobSpec
from omni_contract.spec_run import FaultClass
from omni_contract.status import read_time
from omni_operator.faults.exits import class_of_exit, describe_exit, read_end, with_words
from omni_operator.faults.nodes import (
    describe_loss,
    is_node_lost,
    lost_in_s,
    unwanted_since_s,
    wants_pods_off,
)
from omni_operator.state import ContainerState, Observed, PodFault, PodState

_DISRUPTIONS: Final = {
    "PreemptionByScheduler": FaultClass.PREEMPTED,
    "EvictionByEvictionAPI": FaultClass.EVICTED,
    "DeletionByTaintManager": FaultClass.EVICTED,
    "TerminationByKubelet": FaultClass.EVICTED,
    "DeletionByPodGC": FaultClass.NODE_LOST,  # its node is gone or out of service
}
_POD_REASONS: Final = {
    "Evicted": FaultClass.EVICTED,
    "Preempting": FaultClass.PREEMPTED,  # by the kubelet, for a critical pod
    "NodeLost": FaultClass.NODE_LOST,
    # The kubelet goes down with its node, or takes no pod it once took (restarted, devices gone).
    "NodeShutdown": FaultClass.EVICTED,
    "Terminated": FaultClass.EVICTED,
    "UnexpectedAdmissionError": FaultClass.EVICTED,
    "NodeAffinity": FaultClass.EVICTED,
    "TopologyAffinityError": FaultClass.EVICTED,
}
_WAITS_FOR_IMAGE: Final = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "ImageInspectError", "RegistryUnavailable",
        "SignatureValidationFailed", "CreateContainerError",
    }
)  # fmt: skip
_WAITS_FOR_A_MISTAKE: Final = frozenset(
    {"InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"}
)
_MISTAKE_AFTER_S: Final = 60.0
"""A wait that only an edit can end may last this long: secrets are often created just behind."""
_DATA_DEATHS: Final = 3
"""The parent in the data container starts its service anew by itself; a container that ended so
often and backs off is of no use to the ranks."""
_OWN_CAUSE: Final = frozenset(
    {
        FaultClass.APP_ERROR, FaultClass.OOM, FaultClass.HANG, FaultClass.GPU_HARDWARE,
        FaultClass.DATA_SERVICE, FaultClass.START_ERROR,
    }
)  # fmt: skip
"""Classes that a taint of the node does not bring about."""
_LATER: Final = {FaultClass.NODE_LOST: 0, FaultClass.NODE_TAINTED: 2, FaultClass.RENDEZVOUS: 3}
"""Place of a class among causes; all others have 1."""


def find(observed: Observed, spec: JobSpec) -> list[PodFault]:
    """What is wrong with the pods of `observed.placement`, ranked pods first, at most one each.

    A pod still missing before its gang was released is no fault, nor is one that is missing after
    the last step. `spec` is the job's spec as it is now: its limits, its tolerations.
    """
    placement = observed.placement
    if placement is None:
        return []
    pods = {pod.name: pod for pod in observed.pods}
    look = _Look(observed=observed, spec=spec, released_s=released_since_s(observed))
    places: list[tuple[int | None, PlacedPod]] = [*enumerate(placement.pods)]
    places += [(None, spare) for spare in placement.spares]
    found = (look.at(placed, index, pods.get(placed.name)) for index, placed in places)
    return [fault for fault in found if fault is not None]


def find_cause(faults: Sequence[PodFault]) -> PodFault:
    """The first true failure.

    A lost node takes others down before the control plane says so, hence it goes first. Then what
    failed by itself, by time; then nodes that want their pods off, which ends nothing yet; then the
    pods that only lost a peer; pods without a rank last. Of equals the lowest index.
    """

    def place(fault: PodFault) -> tuple[int, float, int]:
        if fault.index is None:
            return 4, fault.time_s, 0
        return _LATER.get(fault.fault, 1), fault.time_s, fault.index

    return min(faults, key=place)


def describe(fault: PodFault) -> str:
    """A fault in a sentence, with its place."""
    if not fault.pod:
        return fault.message
    where = f" on node {fault.node}" if fault.node else ""
    return f"pod {fault.pod}{where}: {fault.message}"


def gave_up(fault: PodFault) -> bool:
    """Whether the supervisors ended the job by its restart policy: their word is final."""
    return fault.exit_code == Exit.GAVE_UP


def is_alive(pod: PodState) -> bool:
    """Whether a pod can go on in the next attempt: nothing ended it and nobody is about to."""
    trainer = pod.container(TRAINER_CONTAINER)
    is_over = trainer is not None and trainer.is_terminated
    is_leaving = pod.deleting_since_s is not None or pod.disruption is not None
    return not (pod.is_terminal or is_over or is_leaving)


def released_since_s(observed: Observed) -> float | None:
    """When the gang of the attempt was released; None: it is not."""
    ready = observed.job.status.condition("GangReady")
    if ready is None or ready.status != "True":
        return None
    return read_time(ready.last_transition_time)


def waiting(pod: PodState) -> tuple[str, str] | None:
    """Why containers of a pod do not run though it has a node: reason and the kubelet's words.
    None: nothing but time is in their way."""
    for container in pod.containers:
        reason = container.waiting_reason or ""
        if reason in _WAITS_FOR_IMAGE or reason in _WAITS_FOR_A_MISTAKE:
            return reason, container.waiting_message
        if reason == "CrashLoopBackOff":
            return reason, _deaths(container)
    return None


def next_look_s(observed: Observed, spec: JobSpec) -> float | None:
    """Seconds until something that only waits now may become a fault; None: nothing does."""
    if observed.placement is None:
        return None
    placed = observed.placement.all_pods
    times = [lost_in_s(node, observed, spec) for node in {pod.node for pod in placed}]
    released_s = released_since_s(observed)
    if released_s is not None:
        names = {pod.name for pod in placed}
        for pod in observed.pods:
            if pod.name in names and (wait := waiting(pod)) is not None:
                since_s = max(pod.created_s, released_s)
                times.append(since_s + _wait_limit_s(wait[0], spec) - observed.now_s)
    later = (time for time in times if time is not None and 0 < time < math.inf)
    return min(later, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """A fault, before it is said which pod of the plan has it."""

    fault: FaultClass
    time_s: float
    message: str
    container: ContainerState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One look at the pods of an attempt."""

    observed: Observed
    spec: JobSpec
    released_s: float | None

    def at(self, placed: PlacedPod, index: int | None, pod: PodState | None) -> PodFault | None:
        """What is wrong with one pod."""
        found = self._first(placed, pod)
        if found is None:
            return None
        container = found.container
        return PodFault(
            fault=found.fault,
            pod=placed.name,
            index=index,
            node=placed.node,
            time_s=min(found.time_s, self.observed.now_s),
            message=found.message,
            exit_code=None if container is None else container.exit_code,
            end=None if container is None else read_end(container),
        )

    def _first(self, placed: PlacedPod, pod: PodState | None) -> _Finding | None:
        """By the first source that says something."""
        if pod is None and not self._is_missed():
            return None
        if pod is not None and (pod.is_gated or _is_done(pod)):
            return None
        if is_node_lost(placed.node, self.observed, self.spec):
            said, since_s = describe_loss(placed.node, self.observed)
            message = f"the node {said}, and no step is made"
            return _Finding(fault=FaultClass.NODE_LOST, time_s=since_s, message=message)
        own = self._missing(placed) if pod is None else self._of_pod(pod)
        why = wants_pods_off(placed.node, self.observed, self.spec)
        if why is not None and (own is None or own.fault not in _OWN_CAUSE):
            return _Finding(
                fault=FaultClass.NODE_TAINTED,
                time_s=unwanted_since_s(self.observed.nodes[placed.node], self.observed.now_s),
                message=f"the node {why}",
            )
        return own

    def _is_missed(self) -> bool:
        placement, progress = self.observed.placement, self.observed.progress
        is_done = (
            placement is not None
            and progress is not None
            and progress.heartbeat.attempt == placement.attempt
            and progress.heartbeat.phase == "done"
        )
        return self.released_s is not None and not is_done

    def _missing(self, placed: PlacedPod) -> _Finding:
        if placed.node not in self.observed.nodes:  # its pods are collected, however well it went
            said, since_s = describe_loss(placed.node, self.observed)
            message = f"the node {said}, and the pod with it"
            return _Finding(fault=FaultClass.NODE_LOST, time_s=since_s, message=message)
        return _Finding(
            fault=FaultClass.POD_DELETED,
            time_s=self.observed.now_s,
            message="it is gone, and the operator did not delete it",
        )

    def _of_pod(self, pod: PodState) -> _Finding | None:
        if pod.disruption is not None:
            reason, said, since_s = pod.disruption
            fault = _DISRUPTIONS.get(reason, FaultClass.EVICTED)
            return _Finding(fault=fault, time_s=since_s, message=with_words(reason, said))
        ended = _of_containers(pod, self.observed.job.status.attempt)
        by_reason = _class_of_reason(pod)
        if by_reason is not None:
            return _Finding(
                fault=by_reason,
                time_s=self.observed.now_s if ended is None else ended.time_s,
                message=with_words(pod.reason or "it failed before a container ran", pod.message),
            )
        deleting_s = pod.deleting_since_s
        if deleting_s is not None and (ended is None or ended.time_s >= deleting_s):
            if self.released_s is None:
                return None
            message = "it is being deleted, and not by the operator"
            return _Finding(fault=FaultClass.POD_DELETED, time_s=deleting_s, message=message)
        return ended or self._of_waiting(pod)

    def _of_waiting(self, pod: PodState) -> _Finding | None:
        wait = waiting(pod)
        if wait is None or self.released_s is None:
            return None
        reason, said = wait
        since_s = max(pod.created_s, self.released_s)
        waited_s = self.observed.now_s - since_s
        if waited_s < _wait_limit_s(reason, self.spec):
            return None
        message = with_words(f"it waits for {waited_s:.0f} s, {reason}", said)
        return _Finding(fault=FaultClass.START_ERROR, time_s=since_s, message=message)


def _is_done(pod: PodState) -> bool:
    """Whether its ranks have done all steps; its sidecars may still be on their way out."""
    trainer = pod.container(TRAINER_CONTAINER)
    is_over = trainer is not None and trainer.is_terminated and trainer.exit_code == 0
    return pod.phase == "Succeeded" or (is_over and pod.phase != "Failed")


def _class_of_reason(pod: PodState) -> FaultClass | None:
    """Class of a pod that the kubelet refused or ended; None: its containers know better."""
    if pod.phase != "Failed":
        return None
    reason = pod.reason or ""
    if reason.startswith("OutOf"):  # OutOfcpu, OutOfnvidia.com/gpu: another pod was there first
        return FaultClass.PENDING_TIMEOUT
    if reason in _POD_REASONS:
        return _POD_REASONS[reason]
    has_run = any(container.is_terminated for container in pod.containers)
    return None if has_run else FaultClass.EVICTED


def _of_containers(pod: PodState, attempt: int) -> _Finding | None:
    """What the end of its containers says. The trainer counts as soon as it is over: its pod fails
    only after the sidecars have gone. A sidecar that ends with its pod says nothing."""
    trainer, data = pod.container(TRAINER_CONTAINER), pod.container(DATA_CONTAINER)
    is_over = trainer is not None and trainer.is_terminated
    if trainer is not None and is_over and trainer.exit_code:
        return _of_exit(pod, trainer, attempt)
    if data is not None and not is_over and data.waiting_reason == "CrashLoopBackOff":
        if data.exit_code == Exit.USER:
            return _of_exit(pod, data, attempt)
        if data.restarts >= _DATA_DEATHS:
            return _Finding(
                fault=FaultClass.DATA_SERVICE,
                time_s=data.finished_s or pod.created_s,
                message=_deaths(data),
            )
    if pod.phase == "Failed":
        others = (c for c in pod.containers if c.name not in (TRAINER_CONTAINER, DATA_CONTAINER))
        other = next((c for c in others if c.is_terminated and c.exit_code), None)
        if other is not None:
            return _of_exit(pod, other, attempt)
    return None


def _of_exit(pod: PodState, container: ContainerState, attempt: int) -> _Finding:
    return _Finding(
        fault=class_of_exit(container, attempt=attempt),
        time_s=container.finished_s or pod.created_s,
        message=f"{container.name} ended with {describe_exit(container)}",
        container=container,
    )


def _deaths(container: ContainerState) -> str:
    how = describe_exit(container)
    return f"container {container.name} ended {container.restarts} times, last with {how}"


def _wait_limit_s(reason: str, spec: JobSpec) -> float:
    if reason == "CrashLoopBackOff":
        return math.inf  # by its ends, not by its waits
    longest_s = spec.restart.ready_after_seconds
    return min(_MISTAKE_AFTER_S, longest_s) if reason in _WAITS_FOR_A_MISTAKE else longest_s
