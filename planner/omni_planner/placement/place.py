"""Placement: which cluster node runs which plan node. Pure; the caller reads the cluster and acts.

A cluster is a tree of domains (region, zone, block, rack ...). A pod takes a node, so the room of a
domain is the number of its nodes with enough free GPUs.
"""

from collections.abc import Sequence

from omni_planner.placement.close import pick_spares
from omni_planner.placement.explain import no_place, unknown_level
from omni_planner.placement.fit import Fit, Seating, most_whole, seat_loosely, seat_strictly
from omni_planner.placement.types import (
    ClusterNode,
    NoPlacement,
    Placement,
    Request,
    by_domain,
    in_order,
    placement_of,
)


def place(request: Request, nodes: Sequence[ClusterNode]) -> Placement | NoPlacement:
    """Find a node for every plan node and spare. The same request and nodes, in any order, give the
    same answer.

    With `Relax`, a job that has enough nodes but not under the asked levels is placed as close as
    they allow, with `satisfied` false: first units are split, then the job leaves its domain.
    """
    unknown = unknown_level(request)
    if unknown is not None:
        return unknown
    free = in_order(node for node in nodes if node.free >= request.per_node)
    fit = fit_of(request)
    search = seat_loosely if request.on_unsatisfied == "Relax" else seat_strictly
    seating = search(fit, free)
    if seating is None:
        return no_place(request, fit, free)
    return _place_seated(request, seating)


def largest_fit(
    requests: Sequence[Request], nodes: Sequence[ClusterNode]
) -> tuple[int, Placement] | NoPlacement:
    """The first request that can be placed, by its position, or why the last one cannot.

    For `Shrink`: the requests of ever smaller plans, see `shrink_candidates`.
    """
    refused = None
    for i, request in enumerate(requests):
        answer = place(request, nodes)
        if isinstance(answer, Placement):
            return i, answer
        refused = answer
    if refused is None:
        raise ValueError("there is no request to place; pass at least one")
    return refused


def share_in_one_domain(placement: Placement) -> float:
    """Share of the units that are inside one domain of the level they ask for."""
    return placement.spans.count(1) / len(placement.spans)


def best_share(request: Request, nodes: Sequence[ClusterNode]) -> float:
    """The largest `share_in_one_domain` any placement on these nodes can have; 0 where the job has
    no room under its own level."""
    free = in_order(node for node in nodes if node.free >= request.per_node)
    return most_whole(fit_of(request), free) / len(request.units)


def fit_of(request: Request) -> Fit:
    """The request as the search takes it."""
    return Fit(
        sizes=tuple(len(unit) for unit in request.units),
        spares=request.spares,
        group_depth=request.depth_of(request.group_within),
        job_depth=request.depth_of(request.job_within),
        num_levels=len(request.levels),
    )


def spare_depth(request: Request, nodes: Sequence[ClusterNode]) -> int:
    """Depth of the domains that spares are spread over: the level asked for groups, else the
    narrowest at which nodes have company."""
    if request.group_within is not None:
        return request.depth_of(request.group_within)
    depth = len(request.levels)
    while depth and len(by_domain(nodes, depth)) == len(nodes):
        depth -= 1
    return depth


def _place_seated(request: Request, seating: Seating) -> Placement:
    assigned = {
        index: node
        for unit, indices in enumerate(request.units)
        for index, node in zip(indices, seating.seats[unit], strict=True)
    }
    taken = list(assigned.values())
    names = {node.name for node in taken}
    spares = pick_spares(
        request.spares,
        free=[node for node in seating.around if node.name not in names],
        taken=taken,
        depth=spare_depth(request, seating.around),
    )
    return placement_of(request, assigned, spares)
