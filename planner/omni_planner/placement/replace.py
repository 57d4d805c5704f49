"""Replacement: new nodes for some plan nodes, while the others stay where they are. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace as changed

from omni_planner.placement.close import pick_spares
from omni_planner.placement.explain import unknown_level
from omni_planner.placement.fit import seat_strictly
from omni_planner.placement.place import fit_of, place, spare_depth
from omni_planner.placement.types import (
    ClusterNode,
    NoPlacement,
    Placement,
    Request,
    in_order,
    placement_of,
)


def replace(
    request: Request,
    nodes: Sequence[ClusterNode],
    *,
    current: Placement,
    lost: Collection[int],
) -> Placement | NoPlacement:
    """Move the lost plan nodes, with the first of these that does:

    1. a free node of the unit's own domain, and where there is none, a spare held in it;
    2. the whole unit into another domain, near the rest of the job;
    3. the whole job anew.

    Up to 2 all other plan nodes keep their cluster node. Where no level is asked for groups, 1
    takes the closest nodes. With `Relax`, where 3 finds nothing, nodes out of the domain do. Spares
    are kept, and topped up where there is room; the lack of one fails nothing.

    `nodes` has every node that may be used, also those the job itself runs on, whatever is free
    there. A plan node whose cluster node is not among them is lost, too. A lost plan node goes back
    to its node where that is offered and `free` says so; the node of a held spare counts as free.
    """
    unknown = unknown_level(request)
    if unknown is not None:
        return unknown
    if len(current.nodes) != request.num_nodes:
        raise ValueError(
            f"the placement has {len(current.nodes)} plan nodes and the request "
            f"{request.num_nodes}; place a changed plan anew"
        )
    repair = _Repair(request, nodes, current, lost)
    repair.mend()
    if repair.move_units():
        return repair.result()
    anew = _place_anew(changed(request, on_unsatisfied="Wait"), repair.all_free)
    if isinstance(anew, NoPlacement) and request.on_unsatisfied == "Relax":
        repair = _Repair(request, nodes, current, lost)
        if repair.mend_anywhere():
            return repair.result()
        return _place_anew(request, repair.all_free)
    return anew


def _place_anew(request: Request, free: Sequence[ClusterNode]) -> Placement | NoPlacement:
    """Place all of it; where the spares do not fit, with as many as do."""
    answer = place(request, free)
    if isinstance(answer, Placement) or not request.spares:
        return answer
    answer = place(changed(request, spares=0), free)
    if isinstance(answer, NoPlacement):
        return answer
    by_name = {node.name: node for node in free}
    seats = {index: by_name[name] for index, name in enumerate(answer.nodes)}
    return _with_spares(request, seats, kept=[], free=free)


def _with_spares(
    request: Request,
    seats: Mapping[int, ClusterNode],
    *,
    kept: Sequence[ClusterNode],
    free: Sequence[ClusterNode],
) -> Placement:
    """The placement with the spares it keeps, topped up from what is free under the job's level."""
    taken = list(seats.values())
    used = {node.name for node in (*taken, *kept)}
    job_depth = request.depth_of(request.job_within)
    domains = {node.domain(job_depth) for node in taken}
    added = pick_spares(
        request.spares - len(kept),
        free=[n for n in free if n.name not in used and n.domain(job_depth) in domains],
        taken=taken,
        depth=spare_depth(request, free),
        kept=kept,
    )
    return placement_of(request, seats, [*kept, *added])


class _Repair:
    """The state of one replacement: who stays, what is free, which units are still broken."""

    def __init__(
        self,
        request: Request,
        nodes: Sequence[ClusterNode],
        current: Placement,
        lost: Collection[int],
    ) -> None:
        by_name = {node.name: node for node in nodes}
        self._request = request
        self._fit = fit_of(request)
        self._seats = {
            index: by_name[name]
            for index, name in enumerate(current.nodes)
            if index not in lost and name in by_name
        }
        self._spares = {name for name in current.spares if name in by_name}
        self._before = {
            index: by_name[name] for index, name in enumerate(current.nodes) if name in by_name
        }
        mine = {node.name for node in self._seats.values()} | self._spares
        self.all_free = in_order(
            # What the job holds is free for it. The pod on a node that stays may still count there.
            changed(node, free=max(node.free, request.per_node)) if node.name in mine else node
            for node in nodes
            if node.free >= request.per_node or node.name in mine
        )
        staying = {node.name for node in self._seats.values()}
        self._free = [node for node in self.all_free if node.name not in staying]
        self._broken: list[int] = []

    def mend(self) -> None:
        """Seat lost plan nodes in the domains of their units, as far as there is room."""
        fit = self._fit
        rest = self._seats or self._before
        job_domains = {node.domain(fit.job_depth) for node in rest.values()}
        for unit, lost in self._damaged():
            home = self._home(unit)
            domains = {node.domain(fit.group_depth) for node in home}
            near = [
                node
                for node in self._free
                if node.domain(fit.group_depth) in domains
                and node.domain(fit.job_depth) in job_domains
            ]
            may_span = len(domains) == 1 or self._request.on_unsatisfied == "Relax"
            if len(near) < len(lost) or not may_span:
                self._broken.append(unit)
                continue
            close = _Closeness(home, fit.num_levels)
            if fit.group_depth:  # inside the domain, a spare is the last resort
                near.sort(key=lambda node: (node.name in self._spares, -close.depth(node)))
            else:
                near.sort(key=lambda node: (-close.depth(node), node.name in self._spares))
            self._seat_lost(lost, near)

    def move_units(self) -> bool:
        """Seat the units that could not be mended anew, as near to the others as there is room."""
        if not self._broken:
            return True
        fit = self._fit
        moved = [index for unit in self._broken for index in self._request.units[unit]]
        others = [node for index, node in self._seats.items() if index not in moved]
        if not fit.group_depth:
            return False  # mending had every node to choose from
        held = {node.name for node in others}
        room = [node for node in self.all_free if node.name not in held]
        part = changed(fit, sizes=tuple(fit.sizes[unit] for unit in self._broken), spares=0)
        for depth in range(max(fit.group_depth - 1, fit.job_depth), fit.job_depth - 1, -1):
            near = {node.domain(depth) for node in others}
            seating = seat_strictly(part, [node for node in room if node.domain(depth) in near])
            if seating is not None:
                for i, unit in enumerate(self._broken):
                    indices = self._request.units[unit]
                    self._seat(dict(zip(indices, seating.seats[i], strict=True)))
                return True
        return False

    def mend_anywhere(self) -> bool:
        """Seat lost plan nodes as close to their units as there is room, with no level required.
        False where none of the job is left or the nodes are too few."""
        damaged = self._damaged()
        if not self._seats or len(self._free) < sum(len(lost) for _, lost in damaged):
            return False
        for unit, lost in damaged:
            home = self._home(unit) or self._seats.values()
            close = _Closeness(home, self._fit.num_levels)
            near = sorted(self._free, key=lambda n: (-close.depth(n), n.name in self._spares))
            self._seat_lost(lost, near)
        return True

    def result(self) -> Placement:
        """The placement as repaired."""
        used = {node.name for node in self._seats.values()}
        free = [node for node in self.all_free if node.name not in used]
        kept = [node for node in free if node.name in self._spares][: self._request.spares]
        return _with_spares(self._request, self._seats, kept=kept, free=free)

    def _damaged(self) -> list[tuple[int, list[int]]]:
        """Units with lost plan nodes, the least damaged first: they are mended most easily."""
        damaged = [
            (unit, [index for index in indices if index not in self._seats])
            for unit, indices in enumerate(self._request.units)
        ]
        return sorted((d for d in damaged if d[1]), key=lambda d: (len(d[1]), d[0]))

    def _home(self, unit: int) -> list[ClusterNode]:
        """Where a unit is: its nodes that stay, else those it had. Where nothing is asked, a unit
        of which no node is left belongs to the rest of the job."""
        for source in (self._seats, self._before):
            home = [source[index] for index in self._request.units[unit] if index in source]
            if home:
                return home
        return [] if self._fit.group_depth else list((self._seats or self._before).values())

    def _seat_lost(self, lost: Sequence[int], near: Sequence[ClusterNode]) -> None:
        """Lost plan nodes on the first of the nodes, each on its own one where that is among them:
        the images are there."""
        offered = {node.name: node for node in near}
        seats = {
            index: offered.pop(self._before[index].name)
            for index in lost
            if index in self._before and self._before[index].name in offered
        }
        rest = [index for index in lost if index not in seats]
        self._seat(seats | dict(zip(rest, offered.values(), strict=False)))

    def _seat(self, seats: Mapping[int, ClusterNode]) -> None:
        self._seats.update(seats)
        taken = {node.name for node in self._seats.values()}
        self._free = [node for node in self.all_free if node.name not in taken]


class _Closeness:
    """How close a node is to others: the depth of the narrowest domain it shares with one."""

    def __init__(self, others: Collection[ClusterNode], num_levels: int) -> None:
        self._domains = [{node.domain(depth) for node in others} for depth in range(num_levels + 1)]

    def depth(self, node: ClusterNode) -> int:
        for depth in range(len(self._domains) - 1, 0, -1):
            if node.domain(depth) in self._domains[depth]:
                return depth
        return 0
