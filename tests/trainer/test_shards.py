"""Optimizer state of one number of ranks, taken over by another."""

import itertools

import pytest
import torch
from torch import Tensor

from omni_contract.errors import OmniError
from omni_contract.topology import Layout
from omni_trainer.multiplex.shards import ShardFiller, by_name, donors, shard_key

NUMBERS = torch.arange(100.0)


def shard(start: int, end: int) -> dict[str, Tensor]:
    return {"main": NUMBERS[start:end].clone(), "exp_avg": -NUMBERS[start:end]}


def filler_of(start: int, end: int) -> tuple[ShardFiller, dict[str, Tensor]]:
    tensors = {"main": torch.full((end - start,), -1.0), "exp_avg": torch.full((end - start,), 1.0)}
    return ShardFiller("weight", start, end, tensors), tensors


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_a_shard_is_filled_from_any_cut_in_any_order(order: tuple[int, ...]) -> None:
    cuts = [(0, 13), (13, 40), (40, 41), (41, 100)]
    filler, tensors = filler_of(10, 60)
    for index in order:
        assert filler.missing is not None
        assert filler.take(*cuts[index], shard(*cuts[index]), where="optimizer-00000")
    assert filler.missing is None
    assert torch.equal(tensors["main"], NUMBERS[10:60])
    assert torch.equal(tensors["exp_avg"], -NUMBERS[10:60])


def test_what_was_left_out_is_named_and_what_is_there_is_not_taken_again() -> None:
    filler, tensors = filler_of(10, 60)
    assert not filler.take(60, 100, shard(60, 100), where="optimizer-00001")
    assert filler.take(20, 30, shard(20, 30), where="optimizer-00001")
    twice = {name: torch.zeros(40) for name in tensors}
    assert filler.take(0, 40, twice, where="optimizer-00002")
    assert torch.equal(tensors["main"][10:20], NUMBERS[20:30])
    assert not tensors["main"][:10].any() and not tensors["main"][20:30].any()
    assert filler.missing == "weight[40:60]"


def test_a_shard_of_another_size_than_its_key_says_is_refused() -> None:
    filler, _ = filler_of(0, 50)
    with pytest.raises(OmniError, match=r"optimizer-00002: weight\[0:50\]: 'main' .* \[20\]"):
        filler.take(0, 50, shard(0, 20), where="optimizer-00002")


def test_saved_shards_are_found_by_parameter() -> None:
    keys = [shard_key("a.b", 0, 5), shard_key("a.b", 9, 12), shard_key("c[0]", 0, 4)]
    found = by_name({key: {} for key in keys}, where="optimizer-00000")
    assert {name: [place[:2] for place in places] for name, places in found.items()} == {
        "a.b": [(0, 5), (9, 12)], "c[0]": [(0, 4)],
    }  # fmt: skip
    with pytest.raises(OmniError, match="optimizer-00000: 'step' is no shard"):
        by_name({"step": {}}, where="optimizer-00000")


def layout(*, pp_size: int, dp_size: int) -> Layout:
    return Layout(num_nodes=1, ranks_per_node=pp_size * dp_size, pp_size=pp_size, dp_size=dp_size)


def test_of_the_same_layout_a_rank_asks_itself_first() -> None:
    same = layout(pp_size=3, dp_size=4)
    for rank in range(12):
        order = donors(rank, same, same)
        assert order[0] == rank and sorted(order) == list(range(12))


def test_ranks_of_the_stage_that_held_the_same_part_are_asked_early() -> None:
    """Half as many replicas: each rank needs what two of its stage held, and two of the world."""
    before, after = layout(pp_size=2, dp_size=8), layout(pp_size=2, dp_size=4)
    order = donors(after.rank_of(pp_rank=1, dp_rank=2), after, before)
    stage = {before.rank_of(pp_rank=1, dp_rank=d) for d in (4, 5)}
    world = {12, 13}  # rank 6 of 8 is ranks 12 and 13 of 16
    assert stage | world <= set(order[:6])
    assert sorted(order) == list(range(16))
