"""Small clusters for the placement tests, and the search that tries everything."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

from omni_planner.placement.types import ClusterNode, Request

LEVELS = ("zone", "block", "rack", "node")


def rack(place: str, *free: int) -> list[ClusterNode]:
    """Nodes of the rack `zone/block/rack`, by what each has free."""
    path = tuple(place.split("/"))
    return [
        ClusterNode(name=name, free=count, path=(*path, name))
        for i, count in enumerate(free)
        for name in [f"{place.replace('/', '-')}-{i}"]
    ]


def random_cluster(rng: random.Random, *, num_nodes: int, per_node: int = 8) -> list[ClusterNode]:
    """Nodes strewn over a few racks; some full, some without a label."""
    nodes = []
    for i in range(num_nodes):
        zone = rng.choice("ab")
        path = [zone, f"{zone}{rng.randint(1, 2)}", f"r{rng.randint(1, 2)}", f"node-{i}"]
        if rng.random() < 0.1:
            path[rng.randrange(3)] = ""
        free = rng.choice((0, per_node - 1, per_node, per_node, per_node, 2 * per_node))
        nodes.append(ClusterNode(name=f"node-{i}", free=free, path=tuple(path)))
    return nodes


def random_request(rng: random.Random, *, max_nodes: int, equal: bool) -> Request:
    size = rng.randint(1, 3)
    sizes = [size if equal else rng.randint(1, 3) for _ in range(rng.randint(1, 4))]
    while sum(sizes) > max_nodes:
        sizes.pop()
    indices = iter(rng.sample(range(sum(sizes)), sum(sizes)))
    return Request(
        units=tuple(tuple(next(indices) for _ in range(size)) for size in sizes or [1]),
        per_node=8,
        levels=LEVELS,
        group_within=rng.choice((None, "block", "rack", "rack")),
        job_within=rng.choice((None, None, "zone", "block", "rack")),
        spares=rng.choice((0, 0, 1, 2)),
    )


def place_of(node: ClusterNode, level: str | None) -> tuple[str, ...] | None:
    """Domain of a node at a level, told from its labels alone; None where one is missing."""
    depth = 0 if level is None else LEVELS.index(level) + 1
    return node.path[:depth] if all(node.path[:depth]) else None


def all_assignments(
    request: Request, nodes: Sequence[ClusterNode]
) -> Iterator[Mapping[tuple[str, ...], int]]:
    """For every way to put whole units into domains of the group level inside one domain of the
    job's level with room for everything: the nodes taken of each domain."""
    free = [node for node in nodes if node.free >= request.per_node]
    sizes = [len(unit) for unit in request.units]
    for job_domain in {place_of(node, request.job_within) for node in free} - {None}:
        inside = [node for node in free if place_of(node, request.job_within) == job_domain]
        if len(inside) < sum(sizes) + request.spares:
            continue
        room: dict[tuple[str, ...], int] = {}
        for node in inside:
            domain = place_of(node, request.group_within)
            if domain is not None:
                room[domain] = room.get(domain, 0) + 1
        for choice in itertools.product(room, repeat=len(sizes)):
            taken = dict.fromkeys(room, 0)
            for domain, size in zip(choice, sizes, strict=True):
                taken[domain] += size
            if all(taken[domain] <= room[domain] for domain in room):
                yield taken


def can_be_placed(request: Request, nodes: Sequence[ClusterNode]) -> bool:
    return next(all_assignments(request, nodes), None) is not None
