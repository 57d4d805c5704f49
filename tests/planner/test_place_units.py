"""Units of placement, and the plans that a job may shrink to."""

import random
from typing import Any

import pytest

from omni_contract.errors import SpecError
from omni_contract.spec import JobSpec
from omni_contract.topology import Layout
from omni_planner.placement.levels import Levels, detect
from omni_planner.placement.units import placement_units, request_of, shrink_candidates
from tests.trainer.inputs import tiny_plan


def layout(*, nodes: int, ranks: int, stages: int) -> Layout:
    dp_size = nodes * ranks // stages
    return Layout(num_nodes=nodes, ranks_per_node=ranks, pp_size=stages, dp_size=dp_size)


@pytest.mark.parametrize(
    ("shape", "group_replicas", "units"),
    [
        ({"nodes": 4, "ranks": 4, "stages": 2}, 4, ((0, 2), (1, 3))),
        ({"nodes": 8, "ranks": 4, "stages": 4}, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
        # Both groups of two replicas are on the same nodes.
        ({"nodes": 4, "ranks": 4, "stages": 2}, 2, ((0, 2), (1, 3))),
        # A group has two nodes of each stage; the stages of a replica are neighbours.
        ({"nodes": 4, "ranks": 4, "stages": 2}, 8, ((0, 2, 1, 3),)),
        # Groups of 6 ranks on nodes of 4: the middle node is shared.
        ({"nodes": 6, "ranks": 4, "stages": 1}, 6, ((0, 1, 2), (3, 4, 5))),
        ({"nodes": 3, "ranks": 2, "stages": 1}, 1, ((0,), (1,), (2,))),
        # All stages of all replicas on one node.
        ({"nodes": 1, "ranks": 8, "stages": 4}, 2, ((0,),)),
    ],
)
def test_units_follow_the_strided_rank_map(
    shape: dict[str, int], group_replicas: int, units: tuple[tuple[int, ...], ...]
) -> None:
    assert placement_units(layout(**shape), group_replicas) == units


@pytest.mark.parametrize("seed", range(60))
def test_units_hold_whole_groups_and_no_more_than_they_must(seed: int) -> None:
    rng = random.Random(seed)
    stages, ranks = rng.randint(1, 6), rng.randint(1, 8)
    shape = layout(nodes=rng.randint(1, 12) * stages, ranks=ranks, stages=stages)
    group = rng.choice([d for d in range(1, shape.dp_size + 1) if shape.dp_size % d == 0])
    units = placement_units(shape, group)
    assert sorted(node for unit in units for node in unit) == list(range(shape.num_nodes))
    unit_of = {node: i for i, unit in enumerate(units) for node in unit}
    groups_of_unit: dict[int, set[int]] = {}
    for first in range(0, shape.dp_size, group):
        nodes = {
            shape.node_of(shape.rank_of(pp_rank=stage, dp_rank=dp_rank))
            for stage in range(stages)
            for dp_rank in range(first, first + group)
        }
        assert len({unit_of[node] for node in nodes}) == 1
        groups_of_unit.setdefault(unit_of[min(nodes)], set()).add(first)
    for unit, groups in groups_of_unit.items():
        # Each group of a unit shares a node with the others, or is alone in it.
        reached = {min(groups)}
        for _ in groups:
            nodes = {
                node
                for node in units[unit]
                for rank in shape.ranks_of_node(node)
                if shape.coords(rank).dp_rank // group * group in reached
            }
            reached |= {
                shape.coords(rank).dp_rank // group * group
                for node in nodes
                for rank in shape.ranks_of_node(node)
            }
        assert reached == groups


def raw_spec(**changes: dict[str, Any]) -> dict[str, Any]:
    raw = tiny_plan(num_microbatches=4).spec.model_dump(mode="json", by_alias=True)
    return {**raw, **{block: {**raw[block], **fields} for block, fields in changes.items()}}


def is_valid(raw: dict[str, Any], nodes: int) -> bool:
    try:
        JobSpec.parse({**raw, "resources": {**raw["resources"], "nodes": nodes}})
    except SpecError:
        return False
    return True


@pytest.mark.parametrize(
    ("nodes", "ranks", "stages", "sequences", "microbatch", "group"),
    [(8, 1, 2, 48, 1, 2), (12, 2, 4, 96, 2, 1), (6, 4, 2, 144, 1, 3), (5, 1, 1, 60, 3, 1)],
)
def test_a_job_shrinks_to_what_its_file_would_allow(
    nodes: int, ranks: int, stages: int, sequences: int, microbatch: int, group: int
) -> None:
    raw = raw_spec(
        batch={"globalSequences": sequences, "microbatchSequences": microbatch},
        resources={"nodes": nodes, "ranksPerNode": ranks},
        parallelism={"llm": {"pipeline": stages}},
        data={"reorder": {"groupReplicas": group}},
    )
    candidates = list(shrink_candidates(JobSpec.parse(raw)))
    assert candidates == [n for n in range(nodes - 1, 0, -1) if is_valid(raw, n)]
    assert candidates


def test_the_request_of_a_plan_asks_for_the_levels_meant() -> None:
    raw = raw_spec(
        resources={"spares": 1},
        topology={"reorderGroupWithin": "rack", "jobWithin": "zone", "onUnsatisfied": "Relax"},
    )
    plan = tiny_plan(replicas=2).model_copy(update={"spec": JobSpec.parse(raw)})
    labels = {"topology.kubernetes.io/zone": "a", "network.topology.nvidia.com/leaf": "l"}
    levels = detect([labels], ["rack", "zone"])
    assert isinstance(levels, Levels)
    asked = request_of(plan, levels=levels, per_node=8)
    assert (asked.group_within, asked.job_within) == ("leaf", "zone")
    assert asked.levels == ("zone", "leaf")
    assert asked.num_nodes == plan.layout.num_nodes and asked.spares == 1
    assert asked.on_unsatisfied == "Relax" and asked.per_node == 8
