"""Which plan nodes must be close: reorder groups, merged where they share a node."""

from collections.abc import Iterator

import numpy as np

from omni_contract.plan import JobPlan
from omni_contract.spec import JobSpec
from omni_contract.topology import Layout
from omni_planner.placement.levels import Levels
from omni_planner.placement.types import Request


def placement_units(layout: Layout, group_replicas: int) -> tuple[tuple[int, ...], ...]:
    """Plan nodes by unit. A unit is one reorder group, or several that share nodes.

    Stages are runs of ranks, so a group, `group_replicas` replicas on every stage, is a run of
    ranks in each of them: its nodes stride through the world. Units stand by their smallest plan
    node. Within a unit, nodes stand by first replica, then stage: the stages of one replica are
    neighbours, as its pipeline is.
    """
    ranks = np.arange(layout.world_size)
    node_of_rank = ranks // layout.ranks_per_node
    group_of_rank = ranks % layout.dp_size // group_replicas
    num_groups = layout.dp_size // group_replicas
    pairs = np.unique(group_of_rank * layout.num_nodes + node_of_rank)
    root = list(range(num_groups))  # union-find over groups
    first_group: dict[int, int] = {}
    for pair in pairs.tolist():
        group, node = divmod(pair, layout.num_nodes)
        other = first_group.setdefault(node, group)
        low, high = sorted((_find(root, group), _find(root, other)))
        root[high] = low
    units: dict[int, list[int]] = {}
    for node in range(layout.num_nodes):
        units.setdefault(_find(root, first_group[node]), []).append(node)
    return tuple(
        tuple(sorted(unit, key=lambda node: _replica_and_stage(layout, node)))
        for unit in sorted(units.values())
    )


def _find(root: list[int], group: int) -> int:
    while root[group] != group:
        root[group] = root[root[group]]
        group = root[group]
    return group


def _replica_and_stage(layout: Layout, node: int) -> tuple[int, int]:
    coords = layout.coords(node * layout.ranks_per_node)
    return coords.dp_rank, coords.pp_rank


def request_of(plan: JobPlan, *, levels: Levels, per_node: int) -> Request:
    """What a compiled job needs on a cluster whose levels were detected for its topology words."""
    topology = plan.spec.topology
    return Request(
        units=placement_units(plan.layout, plan.spec.data.reorder.group_replicas),
        per_node=per_node,
        levels=levels.names,
        group_within=levels.level(topology.reorder_group_within),
        job_within=levels.level(topology.job_within),
        spares=plan.spec.resources.spares,
        on_unsatisfied=topology.on_unsatisfied,
    )


def shrink_candidates(spec: JobSpec) -> Iterator[int]:
    """Node counts below the job's, largest first, that keep its global batch and its groups.

    The rules are those that the job file is held to, with fewer replicas.
    """
    stages = spec.parallelism.llm.pipeline
    for nodes in range(spec.resources.nodes - 1, 0, -1):
        replicas, rest = divmod(nodes * spec.resources.ranks_per_node, stages)
        if (
            not rest
            and replicas
            and not replicas % spec.data.reorder.group_replicas
            and not spec.batch.global_sequences % (replicas * spec.batch.microbatch_sequences)
        ):
            yield nodes
