"""Where an attempt runs: the nodes a job may use, what is free on them, and the `JobPlacement` that
the planner makes of it. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, Final

from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.plan import JobPlan
from omni_contract.spec import JobSpec
from omni_contract.spec_run import RestartAction
from omni_contract.status import read_time
from omni_operator.faults.detect import is_alive
from omni_operator.faults.nodes import tolerates, wants_pods_off
from omni_operator.render.names import ObjectNames
from omni_operator.render.pod import has_gpus, node_selector, tolerations
from omni_operator.settings import Settings
from omni_operator.state import NodeState, Observed, Taint
from omni_operator.status.conditions import count
from omni_operator.watch.observe import read_requests
from omni_planner.placement.levels import Levels, detect
from omni_planner.placement.place import place
from omni_planner.placement.replace import replace
from omni_planner.placement.types import ClusterNode, NoPlacement, Placement, Request
from omni_planner.placement.units import request_of

_TOO_FEW: Final = "NotEnoughNodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeeds:
    """What a pod of a job asks of its node."""

    selector: Mapping[str, str]
    tolerations: Sequence[Mapping[str, Any]]
    resources: Mapping[str, int]
    """Extended resources of one pod: GPUs, network cards."""
    excluded: Collection[str]
    """Nodes that are left out for a time."""

    @classmethod
    def of(cls, observed: Observed, spec: JobSpec) -> "NodeNeeds":
        """What the pods of a job ask now."""
        bounds = observed.bounds
        return cls(
            selector=node_selector(spec, bounds.node_selector),
            tolerations=tolerations(spec, bounds.tolerations),
            resources=_resources(spec),
            excluded={
                node.name
                for node in observed.job.status.excluded_nodes
                if read_time(node.until) > observed.now_s
            },
        )

    def refuse(self, node: NodeState) -> str | None:
        """Why no new pod may go there, in a few words. What is free there is another question."""
        if node.ready != "True" or node.is_deleting:
            return "not ready"
        if node.is_cordoned:
            return "cordoned"
        if node.name in self.excluded:
            return "left out after a fault"
        if any(node.labels.get(key) != value for key, value in self.selector.items()):
            return "without the labels that podTemplate.nodeSelector or the queue asks for"
        if any(self._suffers(taint) for taint in node.taints if taint.effect != "PreferNoSchedule"):
            return "with a taint that podTemplate.tolerations leaves out"
        for name, asked in self.resources.items():
            if node.allocatable.get(name, 0) < asked:
                return f"with fewer than {asked} {name} in all"
        return None

    def fit_on(self, node: NodeState, observed: Observed) -> bool:
        """Whether all that a pod holds is free there, the job's own pods not counted."""
        used = observed.used.get(node.name, {})
        return all(
            node.allocatable.get(name, 0) - used.get(name, 0) >= count
            for name, count in self.resources.items()
        )

    def _suffers(self, taint: Taint) -> bool:
        return not any(tolerates(toleration, taint) for toleration in self.tolerations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The nodes of the cluster as a job may use them."""

    needs: NodeNeeds
    levels: Levels
    places: Mapping[str, ClusterNode]
    """Every node."""
    free: Mapping[str, ClusterNode]
    """Those that take a new pod."""
    refused: Counter[str]
    """How many do not, by the reason."""

    def explain(self, answer: NoPlacement) -> NoPlacement:
        """Say with an answer which nodes were left out, and why."""
        if not self.refused:
            return answer
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        text = f"{answer.message} (of {len(self.places)} nodes left out: {reasons})"
        return NoPlacement(reason=answer.reason, message=text)


def survey(observed: Observed, spec: JobSpec) -> Room | NoPlacement:
    """Find the nodes a job may use and where they stand in the topology."""
    nodes = list(observed.nodes.values())
    topology = spec.topology
    words = [word for word in (topology.job_within, topology.reorder_group_within) if word]
    # From all nodes: a full cluster has the same levels as an empty one.
    keys = {word: topology.levels.get(word, word) for word in words}
    levels = detect([node.labels for node in nodes], list(keys.values()))
    if isinstance(levels, NoPlacement):
        return levels
    levels = changed(levels, meant={word: levels.meant[key] for word, key in keys.items()})
    needs = NodeNeeds.of(observed, spec)
    free, refused = _sift(observed, needs)
    places = {
        node.name: ClusterNode(name=node.name, free=_free(node, observed, spec), path=path)
        for node, path in zip(nodes, levels.paths, strict=True)
    }
    return Room(
        needs=needs,
        levels=levels,
        places=places,
        free={name: place for name, place in places.items() if name in free},
        refused=refused,
    )


def place_attempt(
    observed: Observed, plan: JobPlan, settings: Settings
) -> JobPlacement | NoPlacement:
    """The placement of the attempt in the job's status. Pods that live on keep name and node, and
    those beside them get their images: an attempt runs one version."""
    status, previous = observed.job.status, observed.previous
    is_anew = status.opened_by in (None, RestartAction.RESTART_JOB) or previous is None
    resources = plan.spec.resources
    # A start asks for all spares; later on a lack of them must not hold the job up.
    needed = resources.nodes + (resources.spares if status.opened_by is None else 0)
    if is_anew and (short := _still_too_few(observed, plan, needed)) is not None:
        return short
    room = survey(observed, plan.spec)
    if isinstance(room, NoPlacement):
        return room
    if is_anew and (short := _too_few(needed, room.free, room.refused)) is not None:
        return short
    request = _request(plan, room.levels)
    keep: Mapping[str, PlacedPod] = {}
    found: Placement | NoPlacement
    if status.opened_by is None:
        found = place(request, list(room.free.values()))
    elif status.opened_by is RestartAction.RESTART_JOB or previous is None:
        found = _place_again(request, room, previous, plan)
    else:
        keep, found = _repair(observed, plan.spec, request, room, previous)
    if isinstance(found, NoPlacement):
        return room.explain(found)
    kept = _kept(found, previous, keep)
    composed = _compose(observed, plan, room, request, found, kept)
    return composed.model_copy(update=_images(settings, previous if kept else None))


def place_plan(plan: JobPlan, room: Room) -> Placement | NoPlacement:
    """Where a plan would go if nothing of the job ran."""
    return place(_request(plan, room.levels), list(room.free.values()))


def can_move(observed: Observed, plan: JobPlan, pods: Collection[str]) -> bool:
    """Whether pods of the running attempt have somewhere to go now, all others staying."""
    current = observed.placement
    free, _ = _sift(observed, NodeNeeds.of(observed, plan.spec))
    if current is None or len(free) + len(current.spares) < len(pods):
        return False
    room = survey(observed, plan.spec)
    if isinstance(room, NoPlacement):
        return False
    keep = {placed.name: placed for placed in current.all_pods if placed.name not in pods}
    request = changed(_request(plan, room.levels), on_unsatisfied="Wait")
    return isinstance(_mend(request, room, current, keep=keep, moved=pods), Placement)


def _sift(observed: Observed, needs: NodeNeeds) -> tuple[Collection[str], Counter[str]]:
    """Nodes that take a new pod, and how many do not, by the reason."""
    free, refused = set(), Counter[str]()
    for node in observed.nodes.values():
        reason = needs.refuse(node)
        if reason is None and not needs.fit_on(node, observed):
            reason = "in use by others"
        if reason is None:
            free.add(node.name)
        else:
            refused[reason] += 1
    return free, refused


def _still_too_few(observed: Observed, plan: JobPlan, needed: int) -> NoPlacement | None:
    """Whether a job that found too few nodes still would. Many jobs wait and are asked whenever
    something is freed; counting costs a tenth of finding the levels of all nodes."""
    placed = observed.job.status.condition("Placed")
    if placed is None or placed.reason != _TOO_FEW:
        return None
    return _too_few(needed, *_sift(observed, NodeNeeds.of(observed, plan.spec)))


def _too_few(needed: int, free: Collection[str], refused: Counter[str]) -> NoPlacement | None:
    if len(free) >= needed:
        return None
    reasons = ", ".join(f"{number} {reason}" for reason, number in refused.most_common())
    left_out = f" (of {len(free) + refused.total()} left out: {reasons})" if refused else ""
    return NoPlacement(
        reason=_TOO_FEW,
        message=f"the job needs {count(needed, 'node')} and {len(free)} can take a pod of it, "
        f"{needed - len(free)} too few{left_out}; wait for running jobs to end, add nodes, or ask "
        "for fewer",
    )


def _resources(spec: JobSpec) -> Mapping[str, int]:
    """Extended resources of a pod. What a user's container has as limits it has as requests."""
    containers = [container.get("resources") or {} for container in spec.pod_template.containers]
    asked = [
        {"resources": {"requests": {**(r.get("limits") or {}), **(r.get("requests") or {})}}}
        for r in containers
    ]
    found = dict(read_requests({"containers": asked}))
    if has_gpus(spec.resources):
        found[spec.resources.gpu_resource] = spec.resources.ranks_per_node
    return found


def _free(node: NodeState, observed: Observed, spec: JobSpec) -> int:
    """GPUs free on a node. Where none is asked for, the planner takes the nodes with least free
    first, so those without other pods of ours come first."""
    resources = spec.resources
    if not has_gpus(resources):
        return resources.ranks_per_node * (1 + observed.occupied.get(node.name, 0))
    name = resources.gpu_resource
    used = observed.used.get(node.name, {}).get(name, 0)
    return node.allocatable.get(name, 0) - used


def _request(plan: JobPlan, levels: Levels) -> Request:
    per_node = plan.spec.resources.ranks_per_node
    return request_of(plan, levels=levels, per_node=per_node)


def _as_found(placement: JobPlacement, spares: Iterable[PlacedPod]) -> Placement:
    """A recorded placement as the planner takes it."""
    return Placement(
        nodes=tuple(pod.node for pod in placement.pods),
        spares=tuple(pod.node for pod in spares),
        spans=placement.spans,
        domains=(None,) * len(placement.spans),
        job_domain=placement.job_domain,
        satisfied=placement.satisfied,
    )


def _place_again(
    request: Request, room: Room, previous: JobPlacement | None, plan: JobPlan
) -> Placement | NoPlacement:
    """All pods anew, on the nodes they had as far as those are free: images and files are there."""
    free = list(room.free.values())
    if previous is None or previous.plan_hash != plan.hash or not previous.satisfied:
        found = place(request, free)
        return place(changed(request, spares=0), free) if isinstance(found, NoPlacement) else found
    spares = [pod for pod in previous.spares if pod.node in room.free]
    return replace(request, free, current=_as_found(previous, spares), lost=())


def _repair(
    observed: Observed, spec: JobSpec, request: Request, room: Room, previous: JobPlacement
) -> tuple[Mapping[str, PlacedPod], Placement | NoPlacement]:
    """Replace what is broken and, if there is room, what is on nodes that are to be left."""
    alive = {placed.name: placed for placed in _alive(observed, previous)}
    staying = {
        name: placed
        for name, placed in alive.items()
        if placed.node not in room.needs.excluded
        and wants_pods_off(placed.node, observed, spec) is None
    }
    answers = []
    for candidates in (staying, alive):
        keep: Mapping[str, PlacedPod] = candidates
        moved = {placed.name for placed in previous.all_pods} - keep.keys()
        if observed.job.status.opened_by is RestartAction.RESTART_GROUP:
            keep = _without_their_groups(previous, keep)
            # New pods, which need not leave their nodes.
            here = {placed.name for placed in previous.all_pods if placed.node in room.free}
            moved -= here
        answer = _mend(request, room, previous, keep=keep, moved=moved)
        if isinstance(answer, Placement):
            return keep, answer
        answers.append(answer)
    return {}, answers[0]


def _mend(
    request: Request,
    room: Room,
    current: JobPlacement,
    *,
    keep: Mapping[str, PlacedPod],
    moved: Collection[str],
) -> Placement | NoPlacement:
    """Replace the moved pods. The others stay on nodes on which no new pod could start."""
    held = {placed.node for placed in keep.values()} & room.places.keys()
    found = replace(
        request,
        # No new pod goes to a node that is only held.
        [*room.free.values(), *(changed(room.places[n], free=0) for n in held - room.free.keys())],
        current=_as_found(current, (pod for pod in current.spares if pod.name in keep)),
        lost=[index for index, pod in enumerate(current.pods) if pod.name in moved],
    )
    if isinstance(found, NoPlacement):
        return found
    kept = _kept(found, current, keep)
    new = {node for index, node in enumerate((*found.nodes, *found.spares)) if index not in kept}
    if new <= room.free.keys():
        return found
    return place(request, list(room.free.values()))


def _alive(observed: Observed, previous: JobPlacement) -> Iterable[PlacedPod]:
    """Pods that can go on in a new attempt, on nodes that answer."""
    status = observed.job.status
    pods = {pod.name: pod for pod in observed.pods}
    blamed = None
    if status.opened_by in (RestartAction.REPLACE_POD, RestartAction.RESTART_GROUP):
        last = status.incidents[-1] if status.incidents else None
        blamed = last.pod if last is not None and last.attempt == previous.attempt else None
    for placed in previous.all_pods:
        pod, node = pods.get(placed.name), observed.nodes.get(placed.node)
        if (
            pod is not None
            and pod.name != blamed
            and is_alive(pod)
            and not pod.is_gated
            and node is not None
            and node.ready == "True"
        ):
            yield placed


def _without_their_groups(
    previous: JobPlacement, keep: Mapping[str, PlacedPod]
) -> Mapping[str, PlacedPod]:
    """Pods of units that are whole, and spares."""
    broken = {i for i, placed in enumerate(previous.pods) if placed.name not in keep}
    mates = {i for unit in previous.units if broken & set(unit) for i in unit}
    names = {previous.pods[i].name for i in mates}
    return {name: placed for name, placed in keep.items() if name not in names}


def _kept(
    found: Placement, previous: JobPlacement | None, keep: Mapping[str, PlacedPod]
) -> dict[int, PlacedPod]:
    """The living pods of a placement by index. A living pod keeps its index; only a spare may take
    one, as it has none."""
    if previous is None or not keep:
        return {}
    spares = {pod.node: pod for pod in previous.spares if pod.name in keep}
    kept = {}
    for index, node in enumerate((*found.nodes, *found.spares)):
        ranked = previous.pods[index] if index < len(found.nodes) else None
        if ranked is not None and ranked.name in keep and ranked.node == node:
            kept[index] = ranked
        elif node in spares:
            kept[index] = spares[node]
    return kept


def _images(settings: Settings, lives_on: JobPlacement | None) -> dict[str, str]:
    """By field of a placement; `lives_on`: the one that pods of the attempt come from."""
    images = {"image": settings.image, "data_image": settings.data_image or settings.image}
    if lives_on is None:
        return images
    return {field: getattr(lives_on, field) or image for field, image in images.items()}


def _compose(
    observed: Observed,
    plan: JobPlan,
    room: Room,
    request: Request,
    found: Placement,
    kept: Mapping[int, PlacedPod],
) -> JobPlacement:
    status, names = observed.job.status, ObjectNames.of(observed.job)
    pods = []
    for index, node in enumerate((*found.nodes, *found.spares)):
        pod = kept.get(index) or PlacedPod(
            name=names.pod(born=status.attempt, index=index), node=node, born=status.attempt
        )
        pods.append(pod.model_copy(update={"path": room.places[node].path}))
    return JobPlacement(
        attempt=status.attempt,
        plan_hash=plan.hash,
        opened_by=status.opened_by,
        pods=tuple(pods[: len(found.nodes)]),
        spares=tuple(pods[len(found.nodes) :]),
        units=request.units,
        levels=room.levels.names,
        group_within=request.group_within,
        spans=found.spans,
        job_domain=found.job_domain,
        satisfied=found.satisfied,
        node_selector=dict(observed.bounds.node_selector),
        tolerations=tuple(dict(toleration) for toleration in observed.bounds.tolerations),
    )
