import numpy as np
import pytest

from omni_dataloader.draw import Permutation


def order(size: int, *, seed: int = 7, source: str = "books", epoch: int = 0) -> list[int]:
    permutation = Permutation.of(size, seed=seed, source=source, epoch=epoch)
    return [int(row) for row in permutation.at(np.arange(size))]


@pytest.mark.parametrize("size", [*range(1, 70), 128, 255, 256, 257, 1000, 4096, 99_991])
def test_every_sample_is_drawn_exactly_once(size: int) -> None:
    assert sorted(order(size)) == list(range(size))


def test_any_position_can_be_asked_alone() -> None:
    permutation = Permutation.of(1000, seed=7, source="books", epoch=3)
    whole = permutation.at(np.arange(1000))
    for position in (999, 0, 517, 517):
        assert permutation.at(np.array([position]))[0] == whole[position]


@pytest.mark.parametrize("other", [{"seed": 8}, {"source": "speech"}, {"epoch": 1}])
def test_each_key_gives_another_order(other: dict[str, int]) -> None:
    assert order(1000) != order(1000, **other)  # type: ignore[arg-type]


def test_the_order_never_changes_between_versions() -> None:
    """A saved position means the same sample after an upgrade of numpy or Python."""
    assert order(10) == FIRST_TEN
    big = Permutation.of(10**12, seed=1, source="web", epoch=2)
    assert big.at(np.array([0, 1, 10**12 - 1])).tolist() == BIG


def test_neighbours_land_far_apart() -> None:
    """A structured order would feed the model a source sorted by shard."""
    drawn = np.array(order(10_000))
    assert abs(np.corrcoef(np.arange(10_000), drawn)[0, 1]) < 0.05
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05
    thirds, _ = np.histogram(drawn[:1000], bins=10, range=(0, 10_000))
    assert thirds.min() > 60 and thirds.max() < 140


FIRST_TEN = [4, 2, 5, 1, 9, 6, 7, 8, 0, 3]
BIG = [520695981866, 771490434248, 428229741751]
