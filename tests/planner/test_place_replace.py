"""Replacement: same domain, its spare, another domain, the job anew; who stays, stays."""

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import replace as changed

import pytest

from omni_planner.placement.place import place
from omni_planner.placement.replace import replace
from omni_planner.placement.types import ClusterNode, NoPlacement, OnUnsatisfied, Placement, Request
from tests.planner.clusters import can_be_placed, place_of, rack, random_cluster, random_request
from tests.planner.test_place import check, placed, racks_of, refused, request


def after(
    nodes: list[ClusterNode], current: Placement, *, without: Collection[str] = ()
) -> list[ClusterNode]:
    """The nodes with the pods of the job counted, some of them gone."""
    held = {*current.nodes, *current.spares}
    return [
        changed(node, free=node.free - 8) if node.name in held else node
        for node in nodes
        if node.name not in without
    ]


def moved(current: Placement, new: Placement) -> set[int]:
    return {i for i, name in enumerate(current.nodes) if new.nodes[i] != name}


def without_nodes(
    nodes: list[ClusterNode], current: Placement, lost: Collection[int]
) -> list[ClusterNode]:
    """The nodes as the job may use them when those of lost plan nodes are dead."""
    dead = {current.nodes[index] for index in lost}
    return [node for node in nodes if node.name not in dead]


def lose(
    asked: Request, nodes: list[ClusterNode], current: Placement, *lost: int
) -> Placement | NoPlacement:
    """Replace plan nodes whose cluster nodes are dead."""
    dead = {current.nodes[index] for index in lost}
    return replace(asked, after(nodes, current, without=dead), current=current, lost=set(lost))


def test_c36_the_replacement_is_in_the_rack_of_the_group() -> None:
    nodes = [*rack("a/b/r1", *[8] * 4), *rack("a/b/r2", *[8] * 4), *rack("a/b/r0", *[8] * 2)]
    asked = request(3, 3, group="rack")
    current = placed(place(asked, nodes))
    for index in range(6):
        new = placed(lose(asked, nodes, current, index))
        assert moved(current, new) == {index}
        assert racks_of(new)[index] == racks_of(current)[index]
        assert new.satisfied


def test_inside_the_block_of_the_group_the_closest_node_is_taken() -> None:
    nodes = [*rack("a/b/r1", 8), *rack("a/b/r2", *[8] * 4)]
    asked = request(3, group="block")
    current = placed(place(asked, nodes))
    assert set(racks_of(current)) == {"a-b-r2"}
    assert racks_of(placed(lose(asked, nodes, current, 0))) == racks_of(current)


def test_a_free_node_of_the_rack_goes_before_its_spare() -> None:
    nodes = rack("a/b/r1", *[8] * 5)
    asked = request(3, group="rack", spares=1)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, 1))
    assert moved(current, new) == {1}
    assert new.nodes[1] not in current.spares and new.spares == current.spares


def test_a_full_rack_gives_its_spare_and_the_job_gets_another_elsewhere() -> None:
    nodes = [*rack("a/b/r1", *[8] * 4), *rack("a/b/r2", 8, 8)]
    asked = request(3, group="rack", spares=1)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, 1))
    assert moved(current, new) == {1} and new.nodes[1] == current.spares[0]
    assert new.spares[0].startswith("a-b-r2")


def test_no_spare_left_is_no_reason_to_fail() -> None:
    nodes = rack("a/b/r1", *[8] * 4)
    asked = request(3, group="rack", spares=1)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, 0))
    assert new.nodes[0] == current.spares[0] and new.spares == () and new.satisfied


def test_a_full_rack_without_a_spare_makes_the_group_move_alone() -> None:
    nodes = [*rack("a/b/r1", 8, 8), *rack("a/b/r2", 8, 8), *rack("a/b/r3", *[8] * 3)]
    asked = request(2, 2, group="rack")
    current = placed(place(asked, nodes))
    assert set(racks_of(current)) == {"a-b-r1", "a-b-r2"}
    new = placed(lose(asked, nodes, current, 3))
    assert moved(current, new) == {2, 3}
    assert set(racks_of(new)) == {"a-b-r1", "a-b-r3"} and new.satisfied


def test_a_group_moves_near_the_rest_of_the_job() -> None:
    nodes = [
        *rack("a/b1/r1", 8, 8),
        *rack("a/b1/r2", 8, 8),
        *rack("a/b1/r3", *[8] * 4),
        *rack("a/b2/r1", 8, 8),
    ]
    asked = request(2, 2, group="rack")
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, 0))
    assert racks_of(new)[:2] == ["a-b1-r3"] * 2  # and not the rack of b2 that fits exactly


def test_where_no_group_can_move_alone_the_job_is_placed_anew() -> None:
    nodes = [*rack("a/b1/r1", 8, 8), *rack("a/b1/r2", 8, 8), *rack("a/b2/r1", *[8] * 4)]
    asked = request(2, 2, group="rack", job="block")
    current = placed(place(asked, nodes))
    assert current.job_domain == "a/b1"
    new = placed(lose(asked, nodes, current, 0))
    assert set(racks_of(new)) == {"a-b2-r1"} and new.satisfied


def test_placing_anew_may_use_what_the_job_holds() -> None:
    """The dead node leaves a hole in the middle rack; the other group has to give its rack up."""
    nodes = [*rack("a/b/r1", *[8] * 3), *rack("a/b/r2", 8, 8), *rack("a/b/r3", 8)]
    asked = request(3, 1, group="rack", spares=1)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes[:4] + nodes[5:], current, 3))
    check(changed(asked, spares=len(new.spares)), nodes, new)
    assert new.satisfied


def test_nothing_left_says_why_and_relax_takes_what_is_near() -> None:
    nodes = [*rack("0/b/r1", 8), *rack("a/b1/r1", 8, 8), *rack("a/b1/r2", 8), *rack("a/b2/r1", 8)]
    asked = request(2, group="rack")
    current = placed(place(asked, nodes))
    assert refused(lose(asked, nodes, current, 1)).reason == "NoRoomUnderTopology"
    loose = changed(asked, on_unsatisfied="Relax")
    new = placed(lose(loose, nodes, current, 1))
    assert moved(current, new) == {1}
    assert racks_of(new) == ["a-b1-r1", "a-b1-r2"]
    assert not new.satisfied and new.spans == (2,)


def test_a_relaxed_group_is_mended_in_the_racks_it_has() -> None:
    nodes = [*rack("a/b/r1", *[8] * 3), *rack("a/b/r2", *[8] * 3), *rack("a/b/r3", *[8] * 3)]
    asked = request(5, group="rack", relax=True)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, 0))
    assert moved(current, new) == {0} and new.spans == current.spans == (2,)


def test_a_group_that_spans_and_must_not_moves_as_a_whole() -> None:
    nodes = [*rack("a/b/r1", 8, 8), *rack("a/b/r2", 8, 8), *rack("a/b/r4", 8)]
    asked = request(3, 1, group="rack", relax=True)
    current = placed(place(asked, nodes))
    assert current.spans == (2, 1)
    more = [*nodes, *rack("a/b/r3", *[8] * 3)]
    strict = changed(asked, on_unsatisfied="Wait")
    new = placed(lose(strict, more, current, 0))
    assert moved(current, new) == {0, 1, 2} and new.satisfied


def test_the_least_damaged_groups_are_mended_first() -> None:
    nodes = [*rack("a/b/r1", *[8] * 11), *rack("a/b/r2", *[8] * 3)]
    asked = request(3, 3, 3, group="rack")
    current = placed(place(asked, nodes[:11]))
    new = placed(lose(asked, nodes, current, 0, 1, 3, 6))
    assert moved(current, new) == {0, 1, 2, 3, 6}
    assert Counter(racks_of(new)) == {"a-b-r1": 6, "a-b-r2": 3}


def test_a_group_whose_pods_all_failed_stays_in_its_rack() -> None:
    nodes = [*rack("a/b/r1", *[8] * 4), *rack("a/b/r2", 8, 8), *rack("a/b/r3", 8, 8)]
    asked = request(2, 2, group="rack")
    current = placed(place(asked, nodes[:6]))
    freed = [
        changed(n, free=8) if n.name in current.nodes[:2] else n for n in after(nodes, current)
    ]
    assert racks_of(current)[:2] == ["a-b-r1"] * 2
    assert placed(replace(asked, freed, current=current, lost={0, 1})) == current


def test_a_lost_spare_is_replaced_where_it_was() -> None:
    nodes = [*rack("a/b/r1", *[8] * 5), *rack("a/b/r2", *[8] * 5)]
    asked = request(3, 3, group="rack", spares=2)
    current = placed(place(asked, nodes))
    left = after(nodes, current, without={current.spares[1]})
    new = placed(replace(asked, left, current=current, lost=set()))
    assert new.nodes == current.nodes
    assert [name.rsplit("-", 1)[0] for name in new.spares] == ["a-b-r1", "a-b-r2"]


def test_spares_that_are_not_asked_for_any_more_are_let_go() -> None:
    nodes = rack("a/b/r1", *[8] * 4)
    asked = request(2, spares=2)
    current = placed(place(asked, nodes))
    fewer = changed(asked, spares=1)
    new = placed(replace(fewer, after(nodes, current), current=current, lost=set()))
    assert new.nodes == current.nodes and new.spares == current.spares[:1]


def test_with_no_level_asked_the_closest_node_is_taken() -> None:
    nodes = [*rack("0/b/r1", 8, 8), *rack("a/b/r1", *[8] * 3), *rack("a/b/r2", *[8] * 2)]
    asked = request(2, 2)
    current = placed(place(asked, nodes))
    new = placed(lose(asked, nodes, current, current.nodes.index("a-b-r1-0")))
    assert moved(current, new) == {current.nodes.index("a-b-r1-0")}
    assert new.job_domain == "a/b"


def test_a_failed_pod_comes_back_to_its_node_where_that_is_free() -> None:
    nodes = rack("a/b/r1", 8, 8)
    asked = request(2, group="rack")
    current = placed(place(asked, nodes))
    gone = [changed(node, free=8 if node.name == current.nodes[1] else 0) for node in nodes]
    assert placed(replace(asked, gone, current=current, lost={1})) == current
    stolen = [changed(node, free=0) for node in nodes]
    assert isinstance(replace(asked, stolen, current=current, lost={1}), NoPlacement)


def test_a_failed_pod_prefers_its_node_to_others_of_the_rack() -> None:
    nodes = rack("a/b/r1", 8, 8, 8, 8)
    asked = request(2, group="rack")
    current = placed(place(asked, nodes[1:]))
    assert current.nodes == ("a-b-r1-1", "a-b-r1-2")
    assert placed(replace(asked, nodes, current=current, lost={1})) == current


def test_a_node_that_is_not_offered_any_more_is_lost() -> None:
    nodes = rack("a/b/r1", *[8] * 3)
    asked = request(2, group="rack")
    current = placed(place(asked, nodes))
    left = after(nodes, current, without={current.nodes[0]})
    new = placed(replace(asked, left, current=current, lost=set()))
    assert moved(current, new) == {0}


def test_nothing_lost_changes_nothing() -> None:
    nodes = [*rack("a/b/r1", *[8] * 4), *rack("a/b/r2", *[8] * 4)]
    asked = request(3, 3, group="rack", spares=2)
    current = placed(place(asked, nodes))
    assert replace(asked, after(nodes, current), current=current, lost=set()) == current


def test_c36_an_unknown_level_is_a_reason_here_too() -> None:
    nodes = rack("a/b/r1", 8, 8)
    current = placed(place(request(1), nodes))
    answer = replace(request(1, group="cage"), nodes, current=current, lost={0})
    assert refused(answer).reason == "UnknownTopologyLevel"


def test_a_changed_plan_is_not_repaired() -> None:
    nodes = rack("a/b/r1", 8, 8)
    current = placed(place(request(1), nodes))
    with pytest.raises(ValueError, match="place a changed plan anew"):
        replace(request(2), nodes, current=current, lost=set())


@pytest.mark.parametrize("policy", ["Wait", "Relax"])
@pytest.mark.parametrize("seed", range(15))
def test_a_replacement_is_found_where_the_full_search_places_the_job(
    seed: int, policy: OnUnsatisfied
) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        nodes = random_cluster(rng, num_nodes=rng.randint(4, 14))
        asked = random_request(rng, max_nodes=6, equal=rng.random() < 0.7)
        asked = changed(asked, on_unsatisfied=policy)
        current = place(asked, nodes)
        if isinstance(current, NoPlacement):
            continue
        lost = rng.sample(range(asked.num_nodes), rng.randint(0, min(3, asked.num_nodes)))
        usable = without_nodes(nodes, current, lost)
        answer = lose(asked, nodes, current, *lost)
        without_spares = changed(asked, spares=0)
        if policy == "Wait":
            assert isinstance(answer, Placement) == can_be_placed(without_spares, usable)
        else:
            num_free = sum(node.free >= asked.per_node for node in usable)
            assert isinstance(answer, Placement) == (num_free >= asked.num_nodes)
        if isinstance(answer, Placement):
            check(changed(asked, spares=len(answer.spares)), usable, answer)
            assert len(answer.spares) <= asked.spares
            assert answer.satisfied or policy == "Relax"


def test_no_more_moves_than_must() -> None:
    """One lost node: only it moves where its domain has room, only its unit where that fits."""
    rng = random.Random(7)
    seen = {"node": 0, "unit": 0, "job": 0}
    for _ in range(1000):
        nodes = random_cluster(rng, num_nodes=rng.randint(6, 14))
        asked = random_request(rng, max_nodes=6, equal=rng.random() < 0.7)
        asked = changed(asked, group_within=rng.choice(("block", "rack")))
        current = place(asked, nodes)
        unit = rng.choice([unit for unit in asked.units if len(unit) > 1] or [()])
        if isinstance(current, NoPlacement) or not unit or asked.num_nodes == len(unit):
            continue
        lost = rng.choice(unit)
        answer = lose(asked, nodes, current, lost)
        usable = without_nodes(nodes, current, [lost])
        by_name = {node.name: node for node in nodes}
        stays = [i for i in range(asked.num_nodes) if i != lost]
        free = [
            node
            for node in usable
            if node.free >= asked.per_node and node.name not in {current.nodes[i] for i in stays}
        ]
        mate = by_name[current.nodes[next(i for i in unit if i != lost)]]
        other = by_name[current.nodes[next(i for i in stays if i not in unit)]]
        levels = (asked.group_within, asked.job_within)
        if any(all(place_of(n, at) == place_of(mate, at) for at in levels) for n in free):
            assert moved(current, placed(answer)) == {lost}
            seen["node"] += 1
            continue
        released = [by_name[current.nodes[i]] for i in unit if i != lost]
        room = Counter(
            place_of(node, asked.group_within)
            for node in (*free, *released)
            if place_of(node, asked.job_within) == place_of(other, asked.job_within)
        )
        del room[None]
        if max(room.values(), default=0) >= len(unit):
            assert moved(current, placed(answer)) <= set(unit)
            seen["unit"] += 1
        else:
            seen["job"] += 1
    assert min(seen.values()) > 10  # the clusters are worth the search
