"""The search for a place: which nodes take which unit. Knows domains and sizes, no policy.

Three principles, widest level first: the job in as few wide domains as possible; a unit in the
fullest domain of the asked level that takes it, so that large free domains stay whole; the nodes of
a unit in as few narrow domains as possible.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from omni_planner.placement.close import Piece, Seats, seat_close
from omni_planner.placement.pack import fill, pack, pack_most, split_evenly
from omni_planner.placement.types import ClusterNode, by_domain


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What is to be seated, and the depths of the levels it asks for (0: none)."""

    sizes: tuple[int, ...]
    """Nodes of each unit."""
    spares: int
    """Nodes that must be left over beside them."""
    group_depth: int
    job_depth: int
    num_levels: int

    @property
    def num_nodes(self) -> int:
        """Nodes in all, with spares."""
        return sum(self.sizes) + self.spares


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """The nodes of each unit, and all free nodes of the domain that was found to hold the job."""

    seats: Seats
    around: Sequence[ClusterNode]


def seat_strictly(fit: Fit, nodes: Sequence[ClusterNode]) -> Seating | None:
    """Seat every unit inside one domain of the group level, and the job inside one of its level.

    Takes the narrowest enclosing domain that holds the job, and of several the one that leaves the
    least room in the domains it uses. `nodes` are free and in order.
    """
    usable = [node for node in nodes if node.has_labels(fit.job_depth)]
    # Inside one domain of the job's level every unit shares the group's, where that is no narrower.
    bound = fit.group_depth > fit.job_depth
    for depth in range(fit.group_depth - 1 if bound else fit.num_levels, fit.job_depth - 1, -1):
        domains = [d for d in by_domain(usable, depth).values() if len(d) >= fit.num_nodes]
        if domains and not bound:
            tightest = min(domains, key=len)
            pieces = list(enumerate(fit.sizes))
            seats = seat_close(pieces, tightest, depth=depth, num_levels=fit.num_levels)
            return Seating(seats=_in_unit_order(fit, seats, nodes), around=tightest)
        for reserve in (1, 0) if fit.spares else (0,):
            found = [
                (_room_left(fit, bins), len(around), i, bins)
                for i, around in enumerate(domains)
                if (bins := _into_domains(fit, around, depth, reserve)) is not None
            ]
            if found:
                _, _, i, bins = min(found, key=lambda entry: entry[:3])
                seats = _seat_bins(fit, bins)
                return Seating(seats=_in_unit_order(fit, seats, nodes), around=domains[i])
    return None


def seat_loosely(fit: Fit, nodes: Sequence[ClusterNode]) -> Seating | None:
    """Seat as many units as possible inside one domain of the group level, and split the others
    evenly over the fewest domains, as close as there is room.

    Loosens the group's level first and then, step by step, the job's.
    """
    for job_depth in range(fit.job_depth, -1, -1):
        strict = seat_strictly(replace(fit, job_depth=job_depth), nodes)
        if strict is not None:
            return strict
        usable = [node for node in nodes if node.has_labels(job_depth)]
        found = [
            (chosen.count(-1), -depth, len(around), around, chosen)
            for depth in range(max(fit.group_depth - 1, job_depth), job_depth - 1, -1)
            for around in by_domain(usable, depth).values()
            if len(around) >= fit.num_nodes
            for chosen in [pack_most(fit.sizes, _rooms(fit, around))]
        ]
        if found:  # most whole units, then the narrowest domain, then the tightest
            _, negative_depth, _, around, chosen = min(found, key=lambda entry: entry[:3])
            seats = _seat_split(fit, around, -negative_depth, chosen)
            return Seating(seats=_in_unit_order(fit, seats, nodes), around=around)
    return None


def most_whole(fit: Fit, nodes: Sequence[ClusterNode]) -> int:
    """The most units that fit inside one domain of the group level each, under the job's level;
    the others must find room beside them. 0 where the job has no room."""
    usable = [node for node in nodes if node.has_labels(fit.job_depth)]
    return max(
        (
            len(fit.sizes) - pack_most(fit.sizes, _rooms(fit, around)).count(-1)
            for around in by_domain(usable, fit.job_depth).values()
            if len(around) >= fit.num_nodes
        ),
        default=0,
    )


_Bins = list[tuple[Sequence[ClusterNode], list[Piece]]]
"""Domains of the group's level that are used: their nodes, and what they take."""


def _into_domains(fit: Fit, nodes: Sequence[ClusterNode], depth: int, reserve: int) -> _Bins | None:
    """All units into domains of the group level under one wider domain, or None.

    `reserve` nodes of each domain are kept for a spare.
    """
    units = list(range(len(fit.sizes)))
    bins = _into_fewest(fit, units, nodes, depth, reserve)
    if bins is None and len(set(fit.sizes)) > 1:
        # With units of several sizes, what is closest may leave one without room: any place does.
        return _into_fullest(fit, units, nodes, reserve)
    return bins


def _into_fewest(
    fit: Fit, units: list[int], nodes: Sequence[ClusterNode], depth: int, reserve: int
) -> _Bins | None:
    """Units into as few domains of each wider level as possible; best fit at the group's level."""
    if depth == fit.group_depth - 1:
        return _into_fullest(fit, units, nodes, reserve)
    children = list(by_domain(nodes, depth + 1).values())
    rooms = [_rooms(fit, child, reserve) for child in children]
    bins: _Bins = []
    while units:
        sizes = [fit.sizes[unit] for unit in units]
        left = [fill(sizes, room)[1] for room in rooms]
        # The domain that takes most, and of several the fullest. The last one may take all.
        at = min(range(len(children)), key=lambda c: (len(left[c]), len(children[c])))
        left_over = {units[i] for i in left[at]}
        taken = [unit for unit in units if unit not in left_over]
        inner = _into_fewest(fit, taken, children[at], depth + 1, reserve) if taken else None
        if inner is None:
            return None
        bins += inner
        rooms[at] = []
        units = [unit for unit in units if unit in left_over]
    return bins


def _into_fullest(
    fit: Fit, units: list[int], nodes: Sequence[ClusterNode], reserve: int
) -> _Bins | None:
    sizes = [fit.sizes[unit] for unit in units]
    chosen = pack(sizes, _rooms(fit, nodes, reserve))
    if chosen is None:
        return None
    taken: defaultdict[int, list[Piece]] = defaultdict(list)
    for unit, size, domain in zip(units, sizes, chosen, strict=True):
        taken[domain].append((unit, size))
    domains = list(by_domain(nodes, fit.group_depth).values())
    return [(domains[i], pieces) for i, pieces in taken.items()]


def _rooms(fit: Fit, nodes: Sequence[ClusterNode], reserve: int = 0) -> list[int]:
    """Nodes that whole units may take of each domain of the group level."""
    return [
        len(domain) - reserve if domain[0].has_labels(fit.group_depth) else 0
        for domain in by_domain(nodes, fit.group_depth).values()
    ]


def _room_left(fit: Fit, bins: _Bins) -> int:
    return sum(len(domain) for domain, _ in bins) - sum(fit.sizes)


def _seat_split(fit: Fit, around: Sequence[ClusterNode], depth: int, chosen: list[int]) -> Seats:
    """Seat the units that have a domain there, and split the rest over what they leave."""
    domains = list(by_domain(around, fit.group_depth).values())
    room = [len(domain) for domain in domains]
    taken: list[list[Piece]] = [[] for _ in domains]
    for unit, domain in enumerate(chosen):
        if domain >= 0:
            taken[domain].append((unit, fit.sizes[unit]))
            room[domain] -= fit.sizes[unit]
    split = [unit for unit, domain in enumerate(chosen) if domain < 0]
    for unit in sorted(split, key=lambda unit: -fit.sizes[unit]):
        near = _nearest_room(fit, domains, room, depth, fit.sizes[unit])
        shares = split_evenly(fit.sizes[unit], [room[i] for i in near])
        for i, share in shares.items():
            taken[near[i]].append((unit, share))
            room[near[i]] -= share
    return _seat_bins(
        fit, [(d, pieces) for d, pieces in zip(domains, taken, strict=True) if pieces]
    )


def _nearest_room(
    fit: Fit, domains: list[list[ClusterNode]], room: list[int], depth: int, size: int
) -> list[int]:
    """Domains of the group level, under the narrowest domain with room for a unit, that are to
    share it. Where levels lie between, those of the fewest domains of the next one."""
    for outer in range(fit.group_depth - 1, depth - 1, -1):
        inside = _under(domains, range(len(domains)), outer)
        fits = [group for group in inside if sum(room[i] for i in group) >= size]
        if fits:
            tightest = min(fits, key=lambda group: sum(room[i] for i in group))
            if outer + 1 == fit.group_depth:
                return tightest
            children = _under(domains, tightest, outer + 1)
            children.sort(key=lambda group: -sum(room[i] for i in group))
            near: list[int] = []
            while sum(room[i] for i in near) < size:
                near += children.pop(0)
            return sorted(near)
    raise AssertionError("the enclosing domain has room for the whole job")


def _under(domains: list[list[ClusterNode]], indices: Sequence[int], depth: int) -> list[list[int]]:
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i in indices:
        groups[domains[i][0].domain(depth)].append(i)
    return list(groups.values())


def _seat_bins(fit: Fit, bins: _Bins) -> Seats:
    seats: Seats = {}
    for nodes, pieces in bins:
        close = seat_close(pieces, nodes, depth=fit.group_depth, num_levels=fit.num_levels)
        for unit, taken in close.items():
            seats.setdefault(unit, []).extend(taken)
    return seats


def _in_unit_order(fit: Fit, seats: Seats, nodes: Sequence[ClusterNode]) -> Seats:
    """Exchange the seats of units of one size so that unit numbers follow the order of nodes."""
    place = {node.name: i for i, node in enumerate(nodes)}
    lists = [sorted(taken, key=lambda node: place[node.name]) for taken in seats.values()]
    lists.sort(key=lambda taken: [place[node.name] for node in taken])
    by_size: defaultdict[int, list[list[ClusterNode]]] = defaultdict(list)
    for taken in lists:
        by_size[len(taken)].append(taken)
    return {unit: by_size[size].pop(0) for unit, size in enumerate(fit.sizes)}
