"""How close reorder groups are placed, against the best that any placement could do."""

import random
from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.operator.figures import Figure
from benchmarks.operator.jobs import big_job, plan_of
from omni_planner.placement.levels import Levels, detect
from omni_planner.placement.place import best_share, place, share_in_one_domain
from omni_planner.placement.types import ClusterNode, Placement, Request
from omni_planner.placement.units import request_of
from tests.cluster.nodes import Grid, NodeSpec

GPUS: Final = 8
NUM_CLUSTERS: Final = 20
"""Of each kind but the empty one."""


def measure(grid: Grid, num_nodes: int) -> Iterator[Figure]:
    """The share of reorder groups inside one rack over the largest possible share, of a job."""
    for kind, clusters in {
        "empty": [_cluster(grid, 0.0, scattered=False, seed=0)],
        "half-full": [_cluster(grid, 0.4, scattered=False, seed=s) for s in range(NUM_CLUSTERS)],
        "fragmented": [_cluster(grid, 0.3, scattered=True, seed=s) for s in range(NUM_CLUSTERS)],
    }.items():
        shares, bests = [], []
        for nodes in clusters:
            for size in sorted({max(8, num_nodes // part) for part in (1, 4, 16)}):
                request = _request(grid, size)
                answer = place(request, nodes)
                assert isinstance(answer, Placement), answer
                if best := best_share(request, nodes):  # 0: no group can be whole
                    shares.append(share_in_one_domain(answer))
                    bests.append(best)
        ratio = min(share / best for share, best in zip(shares, bests, strict=True))
        yield Figure(
            name=f"placement on {kind} clusters",
            value=ratio,
            unit="share of groups in one rack over the best share",
            goal=1.0,
            is_least=True,
            how=f"worst of {len(shares)} placements; mean share {sum(shares) / len(shares):.3f}, "
            f"mean best {sum(bests) / len(bests):.3f}",
        )


def _request(grid: Grid, num_nodes: int) -> Request:
    plan = plan_of(big_job("a", num_nodes=num_nodes, on_unsatisfied="Relax"))
    levels = _levels(list(grid))
    return request_of(plan, levels=levels, per_node=GPUS)


def _cluster(grid: Grid, used: float, *, scattered: bool, seed: int) -> Sequence[ClusterNode]:
    """Nodes of which a share is in use: whole racks and blocks of neighbours, or anywhere."""
    draw = random.Random(seed)
    specs = list(grid)
    levels = _levels(specs)
    num_used = int(used * len(specs))
    taken = set[int]()
    if scattered:
        taken = set(draw.sample(range(len(specs)), num_used))
    while len(taken) < num_used:
        first, size = draw.randrange(len(specs)), draw.choice((1, 2, 4, 8, 16, 32))
        taken |= set(range(first, min(first + size, len(specs), first + num_used - len(taken))))
    return [
        ClusterNode(name=spec.name, free=0 if i in taken else GPUS, path=path)
        for i, (spec, path) in enumerate(zip(specs, levels.paths, strict=True))
    ]


def _levels(specs: Sequence[NodeSpec]) -> Levels:
    levels = detect([spec.labels for spec in specs], ["rack"])
    assert isinstance(levels, Levels), levels
    return levels
