"""Placement by property, against a search that tries everything, and by example."""

import itertools
import random
import time
from collections import Counter
from dataclasses import replace as changed

import pytest

from omni_contract.topology import Layout
from omni_planner.placement.place import best_share, largest_fit, place, share_in_one_domain
from omni_planner.placement.types import ClusterNode, NoPlacement, OnUnsatisfied, Placement, Request
from omni_planner.placement.units import placement_units
from tests.planner.clusters import (
    LEVELS,
    can_be_placed,
    place_of,
    rack,
    random_cluster,
    random_request,
)


def request(
    *sizes: int,
    group: str | None = None,
    job: str | None = None,
    spares: int = 0,
    relax: bool = False,
) -> Request:
    """Units of these sizes, plan nodes in order."""
    starts = itertools.accumulate(sizes, initial=0)
    return Request(
        units=tuple(
            tuple(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)
        ),
        per_node=8,
        levels=LEVELS,
        group_within=group,
        job_within=job,
        spares=spares,
        on_unsatisfied="Relax" if relax else "Wait",
    )


def placed(answer: Placement | NoPlacement) -> Placement:
    assert isinstance(answer, Placement), answer
    return answer


def refused(answer: Placement | NoPlacement) -> NoPlacement:
    assert isinstance(answer, NoPlacement), answer
    return answer


def racks_of(placement: Placement) -> list[str]:
    """Rack of each plan node, as zone-block-rack."""
    return [name.rsplit("-", 1)[0] for name in placement.nodes]


def check(asked: Request, nodes: list[ClusterNode], placement: Placement) -> None:
    """What holds for every placement, loose or not; spans and `satisfied` are told truly."""
    by_name = {node.name: node for node in nodes}
    names = [*placement.nodes, *placement.spares]
    assert len(set(names)) == len(names)
    assert all(by_name[name].free >= asked.per_node for name in names)
    assert len(placement.nodes) == asked.num_nodes
    assert len(placement.spares) == asked.spares
    group = asked.group_within
    whole = []
    for unit, span in zip(asked.units, placement.spans, strict=True):
        domains = [place_of(by_name[placement.nodes[index]], group) for index in unit]
        # A node that lacks the label shares its domain with no other.
        assert span == len(set(domains) - {None}) + domains.count(None)
        whole.append(len(set(domains)) == 1 and None not in domains)
    jobs = {place_of(by_name[name], asked.job_within) for name in names}
    assert placement.satisfied == (all(whole) and len(jobs) == 1 and None not in jobs)


@pytest.mark.parametrize("equal", [True, False], ids=["equal units", "odd units"])
@pytest.mark.parametrize("seed", range(20))
def test_place_finds_a_placement_where_the_full_search_does(seed: int, equal: bool) -> None:
    rng = random.Random(seed)
    num_placed = 0
    for _ in range(40):
        nodes = random_cluster(rng, num_nodes=rng.randint(1, 14))
        asked = random_request(rng, max_nodes=8, equal=equal)
        answer = place(asked, nodes)
        assert isinstance(answer, Placement) == can_be_placed(asked, nodes)
        if isinstance(answer, Placement):
            check(asked, nodes, answer)
            assert answer.satisfied
            num_placed += 1
    assert 5 < num_placed < 35  # the clusters are worth the search


def most_whole_units(asked: Request, nodes: list[ClusterNode]) -> int | None:
    """Full search: most units inside one domain, where the job has room under its own level."""
    free = [node for node in nodes if node.free >= asked.per_node]
    best = None
    for job in {place_of(node, asked.job_within) for node in free} - {None}:
        inside = [node for node in free if place_of(node, asked.job_within) == job]
        if len(inside) < asked.num_nodes + asked.spares:
            continue
        room = Counter(place_of(node, asked.group_within) for node in inside)
        del room[None]
        for choice in itertools.product([None, *room], repeat=len(asked.units)):
            taken: Counter[object] = Counter()
            for domain, unit in zip(choice, asked.units, strict=True):
                taken[domain] += len(unit)
            if all(taken[domain] <= room[domain] for domain in room):
                best = max(best or 0, sum(domain is not None for domain in choice))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_a_relaxed_placement_keeps_as_many_units_whole_as_any(seed: int) -> None:
    rng = random.Random(seed)
    num_split = 0
    for _ in range(40):
        nodes = random_cluster(rng, num_nodes=rng.randint(4, 14))
        asked = random_request(rng, max_nodes=8, equal=rng.random() < 0.7)
        asked = changed(asked, on_unsatisfied="Relax", group_within=rng.choice(("block", "rack")))
        answer = place(asked, nodes)
        free = [node for node in nodes if node.free >= asked.per_node]
        assert isinstance(answer, Placement) == (len(free) >= asked.num_nodes + asked.spares)
        if not isinstance(answer, Placement):
            assert answer.reason in ("NotEnoughNodes", "TopologyLabelsMissing")
            continue
        check(asked, nodes, answer)
        assert answer.satisfied == can_be_placed(asked, nodes)
        best = most_whole_units(asked, nodes)
        if best is None:  # the job has to leave its level
            assert not answer.satisfied and best_share(asked, nodes) == 0
            continue
        assert best_share(asked, nodes) == best / len(asked.units)
        by_name = {node.name: node for node in nodes}
        domains = [
            {place_of(by_name[answer.nodes[i]], asked.group_within) for i in unit}
            for unit in asked.units
        ]
        assert sum(len(unit) == 1 and None not in unit for unit in domains) == best
        num_split += best < len(asked.units)
    assert num_split > 0  # the clusters are worth the search


def test_the_order_of_the_nodes_does_not_matter() -> None:
    rng = random.Random(7)
    for _ in range(100):
        nodes = random_cluster(rng, num_nodes=14)
        asked = changed(random_request(rng, max_nodes=6, equal=True), on_unsatisfied="Relax")
        assert place(asked, rng.sample(nodes, len(nodes))) == place(asked, nodes)


def test_a_unit_takes_the_fullest_rack_that_fits() -> None:
    nodes = [*rack("a/b/r1", *[8] * 6), *rack("a/b/r2", *[8] * 3), *rack("a/b/r3", 8)]
    answer = placed(place(request(3, group="rack"), nodes))
    assert set(racks_of(answer)) == {"a-b-r2"}
    assert answer.domains == ("a/b/r2",)
    assert answer.satisfied


def test_of_two_units_both_take_full_racks_and_the_large_one_stays_whole() -> None:
    nodes = [*rack("a/b/r1", *[8] * 8), *rack("a/b/r2", 8, 8), *rack("a/b/r3", 8, 8, 8)]
    answer = placed(place(request(2, 2, group="rack"), nodes))
    assert Counter(racks_of(answer)) == {"a-b-r2": 2, "a-b-r3": 2}


def test_units_stay_in_one_block_where_one_has_room() -> None:
    nodes = [
        *rack("a/b1/r1", 8, 8),
        *rack("a/b2/r1", 8, 8, 8),
        *rack("a/b2/r2", 8, 8, 8),
        *rack("a/b3/r1", 8, 8),
    ]
    answer = placed(place(request(2, 2, group="rack"), nodes))
    assert Counter(racks_of(answer)) == {"a-b2-r1": 2, "a-b2-r2": 2}
    assert answer.job_domain == "a/b2"


def test_levels_of_one_name_are_said_once() -> None:
    answer = placed(place(request(2, group="rack"), rack("a/a/r1", 8, 8)))
    assert answer.job_domain == "a/r1"


def test_units_spread_over_the_fewest_blocks() -> None:
    nodes = [node for block in "123" for r in "12" for node in rack(f"a/b{block}/r{r}", 8, 8)]
    answer = placed(place(request(2, 2, 2, group="rack"), nodes))
    assert len({place.rsplit("-", 1)[0] for place in racks_of(answer)}) == 2


def test_the_last_units_go_to_the_fullest_block_that_takes_them() -> None:
    nodes = [
        *rack("a/b1/r1", *[8] * 8),
        *rack("a/b2/r1", *[8] * 5),
        *rack("a/b3/r1", *[8] * 4),
    ]
    answer = placed(place(request(4, 4, 4, group="rack"), nodes))
    assert Counter(racks_of(answer)) == {"a-b1-r1": 8, "a-b3-r1": 4}


def test_units_are_numbered_along_the_racks() -> None:
    nodes = [*rack("a/b/r1", *[8] * 5), *rack("a/b/r2", 8, 8)]
    answer = placed(place(request(2, 2, group="rack"), nodes))
    assert racks_of(answer) == ["a-b-r1"] * 2 + ["a-b-r2"] * 2


def test_what_is_closest_gives_way_where_it_leaves_a_unit_without_room() -> None:
    """One block takes the 3 first, but then two units of 2 do not fit the other."""
    nodes = [*rack("a/b1/r1", *[8] * 4), *rack("a/b2/r1", *[8] * 3), *rack("a/b2/r2", 8)]
    answer = placed(place(request(3, 2, 2, group="rack"), nodes))
    assert answer.satisfied


def test_of_equal_racks_the_same_name_in_two_zones_is_two_domains() -> None:
    nodes = [*rack("a/b/r1", 8), *rack("c/b/r1", 8)]
    assert refused(place(request(2, group="rack"), nodes)).reason == "NoRoomUnderTopology"


def test_a_partly_used_node_goes_before_an_empty_one() -> None:
    nodes = rack("a/b/r1", 16, 8, 16)
    asked = request(1, group="rack")
    assert placed(place(asked, nodes)).nodes == ("a-b-r1-1",)


def test_plan_nodes_follow_names_as_people_count() -> None:
    nodes = rack("a/b/r1", *[8] * 12)
    answer = placed(place(request(6, 6, group="block"), nodes))
    assert answer.nodes == tuple(f"a-b-r1-{i}" for i in range(12))


def test_with_no_level_asked_the_job_takes_the_fewest_racks() -> None:
    nodes = [
        *rack("a/b/r1", 8),
        *rack("a/b/r2", *[8] * 3),
        *rack("a/b/r3", *[8] * 4),
        *rack("c/b/r1", *[8] * 2),
    ]
    assert Counter(racks_of(placed(place(request(2, 2), nodes)))) == {"a-b-r3": 4}
    assert Counter(racks_of(placed(place(request(2, 2, 2), nodes)))) == {"a-b-r3": 4, "a-b-r2": 2}
    answer = placed(place(request(2, 2, 2), nodes))
    assert answer.spans == (1, 1, 1) and answer.satisfied
    assert answer.job_domain == "a/b"


def test_with_no_level_asked_the_largest_racks_fill_first_and_the_rest_goes_where_it_fits() -> None:
    nodes = [node for r, free in enumerate((3, 3, 4, 4)) for node in rack(f"a/b/r{r}", *[8] * free)]
    answer = placed(place(request(2, 2, 2, 2), nodes))
    assert Counter(racks_of(answer)) == {"a-b-r2": 4, "a-b-r3": 4}
    nodes = [node for r, free in enumerate((3, 4, 2)) for node in rack(f"a/b/r{r}", *[8] * free)]
    answer = placed(place(request(2, 2, 2), nodes))
    assert Counter(racks_of(answer)) == {"a-b-r1": 4, "a-b-r2": 2}


def test_a_unit_that_must_span_is_split_evenly_over_the_fewest_racks() -> None:
    nodes = [
        *rack("a/b/r1", *[8] * 5),
        *rack("a/b/r2", *[8] * 4),
        *rack("a/b/r3", *[8] * 2),
    ]
    answer = placed(place(request(8, group="rack", relax=True), nodes))
    assert Counter(racks_of(answer)) == {"a-b-r1": 4, "a-b-r2": 4}
    assert answer.spans == (2,) and not answer.satisfied
    assert answer.domains == ("a/b",)
    assert share_in_one_domain(answer) == 0


def test_an_even_split_takes_the_fullest_racks_it_fits() -> None:
    nodes = [node for r, free in enumerate((5, 4, 3, 3)) for node in rack(f"a/b/r{r}", *[8] * free)]
    answer = placed(place(request(6, group="rack", relax=True), nodes))
    assert Counter(racks_of(answer)) == {"a-b-r2": 3, "a-b-r3": 3}


def test_a_split_unit_stays_in_the_fullest_block_with_room() -> None:
    nodes = [
        *rack("a/b1/r1", *[8] * 3),
        *rack("a/b1/r2", *[8] * 3),
        *rack("a/b2/r1", *[8] * 3),
        *rack("a/b2/r2", 8, 8),
    ]
    answer = placed(place(request(4, group="rack", relax=True), nodes))
    assert Counter(racks_of(answer)) == {"a-b2-r1": 2, "a-b2-r2": 2}
    # The enclosing domain is the cluster here, as the whole unit and the split one need two blocks.
    both = placed(place(request(4, 3, 4, group="rack", relax=True), nodes))
    assert both.spans.count(1) == 1
    assert all(domain is not None for domain in both.domains)


def test_split_units_leave_the_emptiest_block_whole() -> None:
    rooms = {"b1": (3, 3), "b2": (3, 3), "b3": (3, 2)}
    nodes = [
        node
        for block, racks in rooms.items()
        for r, free in enumerate(racks)
        for node in rack(f"a/{block}/r{r}", *[8] * free)
    ]
    answer = placed(place(request(4, 4, group="rack", relax=True), nodes))
    assert {name.split("-")[1] for name in answer.nodes} == {"b1", "b3"}


def test_a_unit_split_over_blocks_takes_the_fewest_of_them() -> None:
    nodes = [node for b in range(4) for r in range(2) for node in rack(f"a/b{b}/r{r}", 8)]
    nodes += [node for b in (7, 8) for r in range(2) for node in rack(f"a/b{b}/r{r}", 8, 8)]
    answer = placed(place(request(7, group="rack", relax=True), nodes))
    assert {name.split("-")[1] for name in answer.nodes} == {"b7", "b8"}


def test_whole_units_count_for_more_than_a_close_job() -> None:
    nodes = [node for r in range(3) for node in rack(f"a/b1/r{r}", 8, 8)]
    nodes += rack("a/b2/r1", 8, 8, 8)
    answer = placed(place(request(3, 3, group="rack", relax=True), nodes))
    assert sorted(answer.spans) == [1, 2] and answer.job_domain == "a"


def test_split_units_stay_in_one_block_where_one_has_room() -> None:
    nodes = [node for r in range(4) for node in rack(f"a/b1/r{r}", 8, 8)]
    nodes += [node for r in range(2) for node in rack(f"a/b2/r{r}", 8, 8)]
    answer = placed(place(request(3, 3, group="rack", relax=True), nodes))
    assert answer.job_domain == "a/b1"


def test_relaxing_loosens_the_groups_before_the_job() -> None:
    nodes = [*rack("a/b1/r1", 8, 8), *rack("a/b2/r1", 8, 8), *rack("c/b1/r1", *[8] * 3)]
    asked = request(3, group="rack", job="zone", relax=True)
    whole = placed(place(asked, nodes))
    assert whole.satisfied and set(racks_of(whole)) == {"c-b1-r1"}
    split = placed(place(asked, nodes[:4]))
    assert not split.satisfied and split.job_domain == "a"
    apart = placed(place(request(4, group="rack", job="block", relax=True), nodes[:4]))
    assert not apart.satisfied and apart.job_domain == "a"


@pytest.mark.parametrize("policy", ["Wait", "Fail", "Shrink"])
def test_only_relax_takes_a_looser_placement(policy: OnUnsatisfied) -> None:
    nodes = [*rack("a/b/r1", 8, 8), *rack("a/b/r2", 8, 8)]
    asked = changed(request(3, group="rack"), on_unsatisfied=policy)
    assert refused(place(asked, nodes)).reason == "NoRoomUnderTopology"


def test_every_rack_in_use_gets_a_spare_before_one_gets_two() -> None:
    nodes = [*rack("a/b/r1", *[8] * 5), *rack("a/b/r2", *[8] * 4), *rack("a/b/r3", *[8] * 9)]
    answer = placed(place(request(3, 3, group="rack", spares=2), nodes))
    assert set(racks_of(answer)) == {"a-b-r1", "a-b-r2"}
    assert {name.rsplit("-", 1)[0] for name in answer.spares} == {"a-b-r1", "a-b-r2"}


def test_spares_have_room_in_each_of_several_blocks() -> None:
    nodes = [
        node
        for block in "12"
        for r, free in enumerate((3, 4))
        for node in rack(f"a/b{block}/r{r}", *[8] * free)
    ]
    answer = placed(place(request(3, 3, group="rack", spares=2), nodes))
    assert set(racks_of(answer)) == {"a-b1-r1", "a-b2-r1"}
    assert [name.rsplit("-", 1)[0] for name in answer.spares] == ["a-b1-r1", "a-b2-r1"]


def test_the_rack_with_most_pods_gets_the_first_spare() -> None:
    nodes = [*rack("a/b/r1", *[8] * 4), *rack("a/b/r2", *[8] * 8)]
    one = placed(place(request(3, 3, 3, group="rack", spares=1), nodes))
    assert Counter(racks_of(one)) == {"a-b-r1": 3, "a-b-r2": 6}
    assert one.spares[0].startswith("a-b-r2")
    two = placed(place(request(3, 3, 3, group="rack", spares=2), nodes))
    assert [name.rsplit("-", 1)[0] for name in two.spares] == ["a-b-r1", "a-b-r2"]


def test_a_second_spare_stays_beside_pods() -> None:
    nodes = [*rack("a/b/r1", *[8] * 5), *rack("a/b/r2", *[8] * 9)]
    answer = placed(place(request(3, group="rack", spares=2), nodes))
    assert all(name.startswith("a-b-r1") for name in (*answer.nodes, *answer.spares))


def test_a_unit_leaves_a_full_rack_to_have_its_spare_beside_it() -> None:
    nodes = [*rack("a/b/r1", *[8] * 3), *rack("a/b/r2", *[8] * 4)]
    answer = placed(place(request(3, group="rack", spares=1), nodes))
    assert set(racks_of(answer)) == {"a-b-r2"}
    assert answer.spares[0].startswith("a-b-r2")


def test_spares_count_under_the_bound_of_the_job() -> None:
    nodes = [*rack("a/b1/r1", *[8] * 4), *rack("a/b2/r1", *[8] * 5)]
    answer = placed(place(request(4, job="block", spares=1), nodes))
    assert {name.split("-")[1] for name in (*answer.nodes, *answer.spares)} == {"b2"}
    assert refused(place(request(4, job="block", spares=2), nodes)).reason == "NoRoomUnderTopology"


def test_units_of_odd_sizes_fit_where_best_fit_alone_fails() -> None:
    """Best fit puts a 5 into the rack of 9, and then one 3 finds no place."""
    nodes = [*rack("a/b/r1", *[8] * 10), *rack("a/b/r2", *[8] * 9)]
    assert placed(place(request(5, 5, 3, 3, 3, group="rack"), nodes)).satisfied


def test_c36_an_unknown_level_is_a_reason() -> None:
    answer = refused(place(request(2, group="rak"), rack("a/b/r1", 8, 8)))
    assert answer.reason == "UnknownTopologyLevel"
    assert "topology.reorderGroupWithin: 'rak'" in answer.message
    assert "zone, block, rack, node" in answer.message


def test_c36_nodes_without_the_label_are_counted_and_one_is_named() -> None:
    bare = [ClusterNode(name=f"bare-{i}", free=8, path=("a", "b", "", "")) for i in range(3)]
    answer = refused(place(request(4, group="rack"), [*bare, *rack("a/b/r1", 8, 8)]))
    assert answer.reason == "TopologyLabelsMissing"
    assert "3 of 5 nodes" in answer.message
    assert "'rack'" in answer.message and "'bare-0'" in answer.message


def test_a_node_without_the_label_is_never_in_a_domain_with_others() -> None:
    bare = [ClusterNode(name=f"bare-{i}", free=8, path=("a", "b", "", "")) for i in range(4)]
    answer = placed(place(request(4, group="rack", relax=True), bare))
    assert not answer.satisfied and answer.spans == (4,)


def test_too_few_nodes_say_how_many() -> None:
    nodes = [*rack("a/b/r1", 8, 8, 0, 4), *rack("a/b/r2", 8)]
    answer = refused(place(request(2, 2, spares=1), nodes))
    assert answer.reason == "NotEnoughNodes"
    assert "needs 5 nodes (1 of them spare) with 8 free each" in answer.message
    assert "3 nodes in the cluster have that, 2 too few" in answer.message


def test_a_refusal_says_what_the_best_domain_has() -> None:
    nodes = [*rack("a/b/r1", *[8] * 5), *rack("a/b/r2", *[8] * 2), *rack("c/b/r1", *[8] * 3)]
    answer = refused(place(request(3, 3, group="rack", job="zone"), nodes))
    assert answer.message == (
        "the job needs 6 nodes with 8 free each, all in one zone, 2 groups of 3 in one rack; "
        "10 nodes in the cluster have that, but the best zone, a, has 7, with room for 1 of "
        "2 groups inside one rack each; wait for room, ask for a wider level, or set "
        "topology.onUnsatisfied: Relax"
    )


def test_the_largest_plan_that_fits_is_taken() -> None:
    nodes = rack("a/b/r1", *[8] * 5)
    position, answer = (
        found
        if isinstance(found := largest_fit([request(8), request(4), request(2)], nodes), tuple)
        else pytest.fail(found.message)
    )
    assert position == 1 and len(answer.nodes) == 4
    last = largest_fit([request(8), request(7)], nodes)
    assert isinstance(last, NoPlacement) and "needs 7 nodes" in last.message


def test_c37_rank_r_runs_where_the_plan_says() -> None:
    """Four stages of 8 replicas on 8 nodes; groups of 4 replicas stride through the world."""
    layout = Layout(num_nodes=8, ranks_per_node=4, pp_size=4, dp_size=8)
    asked = changed(
        request(8, group="rack"), units=placement_units(layout, group_replicas=4), per_node=4
    )
    nodes = [*rack("a/b/r1", 4, 4, 4, 4), *rack("a/b/r2", 4, 4, 4, 4)]
    answer = placed(place(asked, nodes))
    for rank in range(layout.world_size):
        group = layout.coords(rank).dp_rank // 4
        node = answer.nodes[layout.node_of(rank)]
        assert node.startswith(f"a-b-r{group + 1}")  # every stage of a group is in its rack
        assert node.endswith(f"-{layout.coords(rank).pp_rank}")  # and they are in order


def big_cluster(fill: str, rng: random.Random) -> list[ClusterNode]:
    """1,000 nodes: 5 zones of 5 blocks of 5 racks of 8."""
    nodes = []
    for z, b, r in itertools.product(range(5), repeat=3):
        taken = {"empty": 0, "half": rng.choice((0, 4, 8)), "fragmented": rng.randint(0, 7)}[fill]
        nodes += rack(f"z{z}/b{b}/r{r}", *[0] * taken, *[8] * (8 - taken))
    return nodes


@pytest.mark.parametrize(
    ("fill", "num_nodes", "size"),
    [
        ("empty", 512, 4),
        ("empty", 512, 8),
        ("half", 256, 4),
        ("half", 256, 8),
        ("fragmented", 256, 4),
        ("fragmented", 400, 5),
        ("fragmented", 384, 3),
        ("fragmented", 256, 1),
    ],
)
def test_a_thousand_nodes_are_placed_as_well_as_can_be_and_in_no_time(
    fill: str, num_nodes: int, size: int
) -> None:
    nodes = big_cluster(fill, random.Random(7))
    asked = request(*[size] * (num_nodes // size), group="rack", relax=True)
    start = time.process_time()
    answer = placed(place(asked, nodes))
    seconds = time.process_time() - start
    check(asked, nodes, answer)
    room = Counter(place_of(node, "rack") for node in nodes if node.free)
    best = min(len(asked.units), sum(free // size for free in room.values()))
    assert share_in_one_domain(answer) == best_share(asked, nodes) == best / len(asked.units)
    assert seconds < 1.0
