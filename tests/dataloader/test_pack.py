import numpy as np
import pytest

from omni_dataloader.pack import MIN_PIECE_TOKENS, Packer, Place
from omni_dataloader.reorder import deal


def test_a_sample_goes_where_it_leaves_the_least_room() -> None:
    packer = Packer(num_sequences=2, sequence_tokens=100)
    assert packer.place(60) == Place(sequence=0, start=0, tokens=60)
    assert packer.place(50) == Place(sequence=1, start=0, tokens=50)
    assert packer.place(40) == Place(sequence=0, start=60, tokens=40)
    assert packer.place(51) is None
    assert packer.place(50) == Place(sequence=1, start=50, tokens=50)
    assert packer.place(1) is None


def test_a_long_text_fills_whole_sequences_then_gaps() -> None:
    packer = Packer(num_sequences=3, sequence_tokens=100)
    packer.place(60)
    assert packer.place_text(1000) == Place(sequence=1, start=0, tokens=100)
    assert packer.place_text(900) == Place(sequence=2, start=0, tokens=100)
    assert packer.place_text(800) == Place(sequence=0, start=60, tokens=40)
    assert packer.place_text(760) is None


def test_no_text_is_cut_into_crumbs_but_its_end_may_be_short() -> None:
    packer = Packer(num_sequences=1, sequence_tokens=100)
    packer.place(100 - MIN_PIECE_TOKENS + 1)
    assert packer.place_text(1000) is None
    assert packer.place_text(5) == Place(sequence=0, start=69, tokens=5)


def test_pieces_never_overlap_and_never_leave_the_sequence() -> None:
    rng = np.random.default_rng(3)
    packer = Packer(num_sequences=8, sequence_tokens=64)
    used = np.zeros((8, 64), int)
    for tokens in rng.integers(1, 200, 300).tolist():
        place = packer.place(tokens) if tokens < 30 else packer.place_text(tokens)
        if place is not None:
            used[place.sequence, place.start : place.start + place.tokens] += 1
            assert place.start + place.tokens <= 64
    assert used.max() == 1


@pytest.mark.parametrize(("replicas", "per_microbatch"), [(1, 1), (2, 1), (2, 4), (4, 2)])
def test_dealing_gives_each_sequence_to_one_place(replicas: int, per_microbatch: int) -> None:
    order = deal(
        np.arange(16),
        num_replicas=replicas,
        microbatch_sequences=per_microbatch,
        group_replicas=1,
        algorithm="identity",
    )
    assert order.shape == (replicas, 16 // replicas // per_microbatch, per_microbatch)
    assert sorted(order.ravel().tolist()) == list(range(16))
