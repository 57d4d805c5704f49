"""Close together where nothing is asked: nodes in few narrow domains, and spares beside them."""

from collections import defaultdict
from collections.abc import Sequence

from omni_planner.placement.pack import split_evenly
from omni_planner.placement.types import ClusterNode, DomainKey, by_domain, in_order

Seats = dict[int, list[ClusterNode]]
"""Nodes of each unit, by the unit's number."""

Piece = tuple[int, int]
"""(number of the unit, nodes of it to be seated)"""


def seat_close(
    pieces: Sequence[Piece], nodes: Sequence[ClusterNode], *, depth: int, num_levels: int
) -> Seats:
    """Seat pieces on nodes of one domain (of level `depth`), each in as few narrower domains as
    possible and all of them in few. The nodes must be enough.

    The tightest narrower domain that takes everything is used; where there is none, the roomiest is
    filled first. A piece that none takes is split evenly.
    """
    children = list(by_domain(nodes, depth + 1).values()) if depth < num_levels else []
    if len(children) == 1:
        return seat_close(pieces, nodes, depth=depth + 1, num_levels=num_levels)
    if len(children) in (0, len(nodes)):
        return _seat_in_order(pieces, nodes)
    seats: Seats = {}
    for child, parts in zip(children, _shares(pieces, children), strict=True):
        if parts:
            inner = seat_close(parts, child, depth=depth + 1, num_levels=num_levels)
            for unit, taken in inner.items():
                seats.setdefault(unit, []).extend(taken)
    return seats


def _shares(pieces: Sequence[Piece], children: list[list[ClusterNode]]) -> list[list[Piece]]:
    """What each narrower domain takes."""
    room = [len(child) for child in children]
    shares: list[list[Piece]] = [[] for _ in children]

    def give(child: int, piece: Piece) -> None:
        shares[child].append(piece)
        room[child] -= piece[1]

    waiting = sorted(pieces, key=lambda piece: (-piece[1], piece[0]))
    while waiting:
        needed = sum(count for _, count in waiting)
        fits = [c for c in range(len(room)) if room[c] >= needed]
        if fits:
            tightest = min(fits, key=lambda c: room[c])
            for piece in waiting:
                give(tightest, piece)
            break
        roomiest = max(range(len(room)), key=lambda c: room[c])
        left_over = []
        for piece in waiting:
            if piece[1] <= room[roomiest]:
                give(roomiest, piece)
            else:
                left_over.append(piece)
        if len(left_over) == len(waiting):
            unit, count = left_over.pop(0)
            for child, share in split_evenly(count, room).items():
                give(child, (unit, share))
        waiting = left_over
    return shares


def _seat_in_order(pieces: Sequence[Piece], nodes: Sequence[ClusterNode]) -> Seats:
    """Equally close nodes: those with the least free first, which keeps empty nodes whole."""
    needed = sum(count for _, count in pieces)
    chosen = iter(in_order(sorted(nodes, key=lambda node: node.free)[:needed]))
    return {unit: [next(chosen) for _ in range(count)] for unit, count in sorted(pieces)}


def pick_spares(
    count: int,
    *,
    free: Sequence[ClusterNode],
    taken: Sequence[ClusterNode],
    depth: int,
    kept: Sequence[ClusterNode] = (),
) -> list[ClusterNode]:
    """Spread spares over the domains that hold pods: one in each before a second, those with most
    pods first. Domains without pods come last. Fewer than `count` where nodes run out.

    `kept` are spares that are there already.
    """
    pods: defaultdict[DomainKey, int] = defaultdict(int)
    for node in taken:
        pods[node.domain(depth)] += 1
    rooms = {
        domain: sorted(nodes, key=lambda node: node.free)
        for domain, nodes in by_domain(free, depth).items()
    }
    held: defaultdict[DomainKey, int] = defaultdict(int)
    for node in kept:
        held[node.domain(depth)] += 1
    spares: list[ClusterNode] = []
    while rooms and len(spares) < count:
        domain = min(rooms, key=lambda d: (not pods[d], held[d], -pods[d]))
        spares.append(rooms[domain].pop(0))
        held[domain] += 1
        if not rooms[domain]:
            del rooms[domain]
    return spares
