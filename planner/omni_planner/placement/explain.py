"""Why there is no placement, in a sentence with numbers and a way out."""

from collections.abc import Sequence
from dataclasses import replace

from omni_planner.placement.fit import Fit, most_whole
from omni_planner.placement.types import ClusterNode, NoPlacement, Request, by_domain, path_name


def unknown_level(request: Request) -> NoPlacement | None:
    """A level that is asked for and that no path has; never skipped in silence."""
    for field, level in (
        ("reorderGroupWithin", request.group_within),
        ("jobWithin", request.job_within),
    ):
        if level is not None and level not in request.levels:
            known = ", ".join(request.levels) or "none, because the nodes carry no topology labels"
            return NoPlacement(
                reason="UnknownTopologyLevel",
                message=f"topology.{field}: {level!r} is no level of this cluster; "
                f"its levels are {known}",
            )
    return None


def no_place(request: Request, fit: Fit, free: Sequence[ClusterNode]) -> NoPlacement:
    """The reason for which the free nodes do not do."""
    depth = max(fit.group_depth, fit.job_depth)
    lacking = [node for node in free if not node.has_labels(depth)]
    num_labelled = len(free) - len(lacking)
    # Are the labels the reason? There are enough nodes then, too few of them labelled.
    if lacking and (not num_labelled or num_labelled < sum(fit.sizes) <= len(free)):
        level = request.levels[lacking[0].path.index("")]
        return NoPlacement(
            reason="TopologyLabelsMissing",
            message=f"{_asked(request)}; {len(lacking)} of {_count(len(free), 'node')} with room "
            f"carry no label of level {level!r} (such as {lacking[0].name!r}), which leaves "
            f"{num_labelled}; label the nodes or ask for a wider level",
        )
    if len(free) < fit.num_nodes:
        return NoPlacement(
            reason="NotEnoughNodes",
            message=f"{_asked(request)}; {_have(len(free))}, {fit.num_nodes - len(free)} too few; "
            "wait for running jobs to end, add nodes, or ask for fewer",
        )
    unlabelled = f"; {len(lacking)} of them carry no label of a level asked" if lacking else ""
    return NoPlacement(
        reason="NoRoomUnderTopology",
        message=f"{_asked(request)}; {_best(request, fit, free)}{unlabelled}; "
        "wait for room, ask for a wider level, or set topology.onUnsatisfied: Relax",
    )


def _best(request: Request, fit: Fit, free: Sequence[ClusterNode]) -> str:
    """The best domain of the job's level, and how many units have room there."""
    labelled = [node for node in free if node.has_labels(fit.job_depth)]
    domains = by_domain(labelled, fit.job_depth)
    inside = replace(fit, job_depth=0)
    whole = {domain: most_whole(inside, nodes) for domain, nodes in domains.items()}
    best = max(domains, key=lambda domain: (whole[domain], len(domains[domain])))
    have = _have(len(free))
    if request.job_within is not None:
        have += f", but the best {request.job_within}, {path_name(best)}, has {len(domains[best])}"
    if request.group_within is None or len(domains[best]) < fit.num_nodes:
        return have
    have += f", with room for {whole[best]} of {_count(len(fit.sizes), 'group')}"
    return f"{have} inside one {request.group_within} each"


def _asked(request: Request) -> str:
    sizes = sorted({len(unit) for unit in request.units})
    text = f"the job needs {_count(request.num_nodes + request.spares, 'node')}"
    if request.spares:
        text += f" ({request.spares} of them spare)"
    text += f" with {request.per_node} free each"
    if request.job_within is not None:
        text += f", all in one {request.job_within}"
    if request.group_within is not None:
        span = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        text += f", {_count(len(request.units), 'group')} of {span} in one {request.group_within}"
    return text


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _have(number: int) -> str:
    return f"{_count(number, 'node')} in the cluster {'has' if number == 1 else 'have'} that"
