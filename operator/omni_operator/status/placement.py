"""Where an attempt runs, in short: the rank map stays in its ConfigMap. Pure."""

from typing import Final

from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.status import GroupPlacement, PlacementSummary
from omni_operator.status.conditions import count

_NUM_GROUPS: Final = 64
_NUM_DOMAINS: Final = 16
_DOMAIN_CHARACTERS: Final = 512


def summarize(placement: JobPlacement, *, config_map: str) -> PlacementSummary:
    """A placement as the status tells it, the groups with the widest span first."""
    level = placement.group_within or _narrowest(placement)
    groups = [_group(placement, unit, nodes, level) for unit, nodes in enumerate(placement.units)]
    groups.sort(key=lambda group: (-group.span, group.unit))
    return PlacementSummary(
        config_map=config_map,
        data_image=placement.data_image,
        nodes=len(placement.pods),
        spares=len(placement.spares),
        level=level,
        job_domain=placement.job_domain,
        groups_in_one_domain=sum(group.span == 1 for group in groups),
        num_groups=len(groups),
        groups=groups[:_NUM_GROUPS],
    )


def describe_placement(summary: PlacementSummary) -> str:
    """The same in a sentence."""
    spares = f" and {count(summary.spares, 'spare')}" if summary.spares else ""
    said = f"{count(summary.nodes, 'pod')}{spares} have a node each"
    if summary.num_groups and summary.level is not None:
        inside = f"{summary.groups_in_one_domain} of {count(summary.num_groups, 'group')}"
        said += f"; {inside} inside one {summary.level}"
    if summary.job_domain is not None:
        said += f"; all in {summary.job_domain}"
    return said


def _group(
    placement: JobPlacement, unit: int, nodes: tuple[int, ...], level: str | None
) -> GroupPlacement:
    domains = list(dict.fromkeys(_domain(placement, placement.pods[node], level) for node in nodes))
    asked = placement.group_within is not None and unit < len(placement.spans)
    return GroupPlacement(
        unit=unit,
        nodes=len(nodes),
        domains=domains[:_NUM_DOMAINS],
        span=placement.spans[unit] if asked else len(domains),
    )


def _narrowest(placement: JobPlacement) -> str | None:
    """The narrowest level at which pods of the job have company."""
    for level in reversed(placement.levels):
        if len({_domain(placement, pod, level) for pod in placement.pods}) < len(placement.pods):
            return level
    return None


def _domain(placement: JobPlacement, pod: PlacedPod, level: str | None) -> str:
    """The path down to a level: two racks of the same name in two zones are two domains. A node
    that lacks a label on the way shares its domain with no other."""
    if level not in placement.levels:
        return pod.node
    path = pod.path[: placement.levels.index(level) + 1]
    return "/".join(path)[-_DOMAIN_CHARACTERS:] if path and all(path) else pod.node
