"""What placement is asked and what it answers: room on nodes, a request, a placement, a reason."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from omni_contract.reasons import PlacementReason

OnUnsatisfied = Literal["Wait", "Relax", "Fail", "Shrink"]

DomainKey = tuple[str, ...]
"""Full path of a domain, widest level first: two racks `r1` of two zones are two domains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A Kubernetes node as placement sees it. Nodes that must not be used are left out."""

    name: str
    free: int
    """Free GPUs (or slots of a CPU job). A pod that will be gone counts as gone."""
    path: tuple[str, ...]
    """Domain of the node at every level, widest first; "" where it lacks the label."""

    def domain(self, depth: int) -> DomainKey:
        """Its domain at the `depth`-th level; depth 0 is the whole cluster.

        A node that lacks a label on the way shares that domain with no other node, because
        nothing says with which.
        """
        prefix = self.path[:depth]
        return prefix if all(prefix) else (*prefix, self.name)

    def has_labels(self, depth: int) -> bool:
        """Whether its place is known down to the `depth`-th level."""
        return all(self.path[:depth])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a job needs of the cluster. A pod takes one node; two pods never share one."""

    units: tuple[tuple[int, ...], ...]
    """Plan nodes that belong together (`placement_units`); together they are 0 to n - 1, each
    once. The order within a unit is the order in which it is laid out."""
    per_node: int
    """Free GPUs or slots a node must have."""
    levels: tuple[str, ...]
    """Names of the levels of every path, widest first."""
    group_within: str | None = None
    """Level one unit must share."""
    job_within: str | None = None
    """Level all units and spares must share."""
    spares: int = 0
    """Nodes to hold in addition."""
    on_unsatisfied: OnUnsatisfied = "Wait"
    """Relax: take a looser placement where the levels cannot be met; else none."""

    @property
    def num_nodes(self) -> int:
        """Plan nodes in all, without spares."""
        return sum(len(unit) for unit in self.units)

    def depth_of(self, level: str | None) -> int:
        """Depth of a level for `ClusterNode.domain`; 0 where none is asked."""
        return 0 if level is None else self.levels.index(level) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where every pod of a job runs."""

    nodes: tuple[str, ...]
    """Cluster node of each plan node."""
    spares: tuple[str, ...]
    """Cluster nodes of the spares."""
    spans: tuple[int, ...]
    """Domains of the asked level that each unit touches; 1 is what was asked. 1 where nothing
    was."""
    domains: tuple[str | None, ...]
    """Narrowest domain that holds each whole unit, as `zone-a/rack-7`; None where none does."""
    job_domain: str | None
    """Narrowest domain that holds the whole job with its spares; None where none does."""
    satisfied: bool
    """Whether every asked level is met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlacement:
    """Why a job cannot be placed."""

    reason: PlacementReason
    """For a condition."""
    message: str
    """A sentence with numbers: what was asked, the best there is, what would help."""


_DIGITS = re.compile(r"(\d+)")


@functools.lru_cache(maxsize=2**15)  # the same nodes and domains are sorted for every job
def natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts node-2 before node-10."""
    # Odd parts are the digits. The text comes second, so that 07 and 7 stay apart.
    return tuple((int(part) if i % 2 else -1, part) for i, part in enumerate(_DIGITS.split(name)))


def in_order(nodes: Iterable[ClusterNode]) -> list[ClusterNode]:
    """Nodes by path, then by name; every choice between equals follows this order."""
    return sorted(
        nodes, key=lambda node: (tuple(natural(part) for part in node.path), natural(node.name))
    )


def by_domain(nodes: Iterable[ClusterNode], depth: int) -> dict[DomainKey, list[ClusterNode]]:
    """The nodes of each domain of a level, in the order they come."""
    domains: dict[DomainKey, list[ClusterNode]] = {}
    for node in nodes:
        domains.setdefault(node.domain(depth), []).append(node)
    return domains


def placement_of(
    request: Request, nodes: Mapping[int, ClusterNode], spares: Iterable[ClusterNode]
) -> Placement:
    """Describe an assignment of plan nodes to cluster nodes."""
    spares = in_order(spares)
    group_depth = request.depth_of(request.group_within)
    job_depth = request.depth_of(request.job_within)
    units = [[nodes[index] for index in unit] for unit in request.units]
    everything = [*nodes.values(), *spares]
    spans = tuple(len({node.domain(group_depth) for node in unit}) for unit in units)
    return Placement(
        nodes=tuple(nodes[index].name for index in range(len(nodes))),
        spares=tuple(node.name for node in spares),
        spans=spans,
        domains=tuple(_common_domain(unit) for unit in units),
        job_domain=_common_domain(everything),
        satisfied=all(span == 1 for span in spans)
        and len({node.domain(job_depth) for node in everything}) == 1
        and all(node.has_labels(max(group_depth, job_depth)) for node in nodes.values()),
    )


def _common_domain(nodes: list[ClusterNode]) -> str | None:
    shared: list[str] = []
    for names in zip(*(node.path for node in nodes), strict=True):
        if len(set(names)) > 1 or not names[0]:
            break
        shared.append(names[0])
    return path_name(shared) or None


def path_name(path: Iterable[str]) -> str:
    """A domain as people are told of it: a name that levels in a row share is said once."""
    return "/".join(name for name, _ in groupby(path))
