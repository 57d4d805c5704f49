"""The barrier between attempts: which pods are made, which have to go, and when the gates of all of
an attempt open at once. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.reasons import HoldReason
from omni_contract.spec import JobSpec
from omni_operator.decisions.placing import NodeNeeds
from omni_operator.decisions.steps import Create, Delete, Patch
from omni_operator.faults.detect import released_since_s
from omni_operator.faults.nodes import is_in_doubt, is_node_lost, is_silent
from omni_operator.kinds import POD
from omni_operator.render.names import (
    HOSTNAME_LABEL,
    annotation_patch,
    gate_patch,
    is_spare,
    pod_annotations,
)
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from omni_operator.state import Observed, PodState
from omni_operator.status.conditions import count, history_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """What the gates of an attempt wait for."""

    reason: HoldReason
    message: str


def pods_by_name(observed: Observed) -> Mapping[str, PodState]:
    """The job's pods. Of two with one name the older one is gone and not known to be."""
    return {pod.name: pod for pod in sorted(observed.pods, key=lambda pod: pod.created_s)}


def missing_pods(
    observed: Observed, placement: JobPlacement, plan: JobPlan, settings: Settings
) -> tuple[Create, ...]:
    """Pods of the attempt that are to be made, each with its gate shut. Only for an attempt that
    was not released: afterwards a pod that is missing was taken away."""
    there = {pod.name for pod in observed.pods}
    history = history_of(observed.job.status.budget)
    return tuple(
        Create(
            kind=POD,
            body=render_pod(observed.job, plan, placement, index, settings, history),
        )
        for index, placed in enumerate(placement.all_pods)
        if placed.name not in there
    )


def end_pods(observed: Observed, spec: JobSpec, pods: Iterable[PodState]) -> tuple[Delete, ...]:
    """Delete pods. Those on a lost node where nobody answers are taken out of the API at once: a
    pod that hangs in its end would stay for ever."""
    deletes = []
    for pod in pods:
        is_lost = (
            pod.node is not None
            and is_silent(pod.node, observed)
            and is_node_lost(pod.node, observed, spec)
        )
        if pod.deleting_since_s is None or is_lost:
            deletes.append(
                Delete(kind=POD, name=pod.name, uid=pod.uid, grace_s=0 if is_lost else None)
            )
    return tuple(deletes)


def strangers(observed: Observed, placement: JobPlacement) -> Iterator[PodState]:
    """Pods of the job that have no place in the attempt."""
    names = {placed.name for placed in placement.all_pods}
    return (pod for pod in observed.pods if pod.name not in names)


def find_hold(observed: Observed, placement: JobPlacement, spec: JobSpec) -> Hold | None:
    """What the gates wait for; None: they may open. The plan's own validity is asked apart.

    All pods of the attempt must be there, and every other pod of the job gone, over, or on a node
    that is lost: ranks of two attempts never run side by side.
    """
    pods = pods_by_name(observed)
    total = len(placement.all_pods)
    there = [pods[placed.name] for placed in placement.all_pods if placed.name in pods]
    if len(there) < total:
        return Hold(reason="CreatingPods", message=f"{len(there)} of {total} pods are created")
    ending = [pod for pod in there if pod.deleting_since_s is not None]
    ending += [pod for pod in strangers(observed, placement) if _is_in_the_way(pod, observed, spec)]
    if ending:
        first = min(ending, key=lambda pod: pod.deleting_since_s or observed.now_s)
        where = f" on node {first.node}" if first.node else ""
        return Hold(
            reason="WaitingForOldPods",
            message=f"{count(len(ending), 'pod')} of before still end, first of all "
            f"{first.name}{where}; each has podTemplate.terminationGraceSeconds to save and end",
        )
    unready = [
        placed.node
        for placed in placement.all_pods
        if pods[placed.name].node is None
        and (node := observed.nodes.get(placed.node)) is not None
        and is_in_doubt(node, observed.now_s)
    ]
    if unready:
        return Hold(
            reason="NodeNotReady",
            message=f"{len(unready)} of the {total} nodes chosen are not ready, such as "
            f"{unready[0]}; after restart.nodeLostAfterSeconds "
            f"({spec.restart.node_lost_after_seconds:g} s) others are chosen",
        )
    return None


def find_taken(
    observed: Observed, placement: JobPlacement, spec: JobSpec, plan: JobPlan
) -> tuple[int, str] | None:
    """The first slot that a pod of the attempt cannot have after all, by index, and why; None: the
    placement holds. One that is taken withdraws the attempt: the others would hold their nodes for
    nothing."""
    pods, needs = pods_by_name(observed), NodeNeeds.of(observed, plan.spec)
    is_released = released_since_s(observed) is not None
    for index, placed in enumerate(placement.all_pods):
        pod = pods.get(placed.name)
        if pod is not None and (pod.node is not None or pod.is_terminal):
            continue  # It has its place.
        if is_released and (pod is None or is_spare(placement, index)):
            continue  # What is missing now is a fault, or is missed by nobody.
        node = observed.nodes.get(placed.node)
        if node is None:
            return index, "its node is gone"
        if is_in_doubt(node, observed.now_s) and not is_node_lost(node.name, observed, spec):
            continue  # It may come back, or has just done so.
        if (why := needs.refuse(node)) is not None:
            return index, f"its node is {why}"
        if not needs.fit_on(node, observed):
            return index, "its node was filled by pods of others"
    return None


def releases(observed: Observed, placement: JobPlacement, settings: Settings) -> tuple[Patch, ...]:
    """Open the gates of the attempt, and tell pods that live on that they belong to it."""
    pods, history = pods_by_name(observed), history_of(observed.job.status.budget)
    patches = []
    for index, placed in enumerate(placement.all_pods):
        pod = pods[placed.name]
        told = pod_annotations(observed.job, placement, index, settings, history)
        operations = annotation_patch(pod, told)
        if pod.is_gated:
            node = observed.nodes[placed.node]
            opened = gate_patch(pod, node.labels.get(HOSTNAME_LABEL, node.name))
            operations = [*operations, *opened]
        if operations:
            patches.append(Patch(name=pod.name, uid=pod.uid, operations=operations))
    return tuple(patches)


def _is_in_the_way(pod: PodState, observed: Observed, spec: JobSpec) -> bool:
    if pod.is_terminal:
        return False
    return pod.node is None or not is_node_lost(pod.node, observed, spec)
