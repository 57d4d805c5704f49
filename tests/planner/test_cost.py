"""Sizes to units, tokens and cost: what sidecar, decoder and planner must agree on."""

import numpy as np
import pytest

from omni_contract.spec_model import UsmSpec, VitSpec
from omni_planner.cost import (
    audio_frames,
    encoder_cost,
    encoder_units,
    image_grid,
    is_oversize,
    out_len,
    patch_positions,
    resampled_samples,
)

VIT = VitSpec(layers=2, hidden_size=64, heads=4)
USM = UsmSpec(layers=2, hidden_size=64, heads=4)


def sizes(num_samples: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.exp(rng.uniform(0, 10, (num_samples, 2))).astype(np.int64)


@pytest.mark.parametrize(
    ("merge", "most"), [(1, 4), (1, 256), (2, 4), (2, 256), (2, 1023), (3, 100), (4, 4096)]
)
def test_every_grid_fits_and_is_whole_blocks(merge: int, most: int) -> None:
    vit = VitSpec(layers=1, hidden_size=64, heads=4, merge_patches=merge, max_patches=most)
    width, height = sizes().T
    rows, columns = image_grid(width, height, vit)
    assert (rows % merge == 0).all() and (columns % merge == 0).all()
    assert rows.min() >= merge and columns.min() >= merge
    assert (rows * columns).max() <= most


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (28, 28, (2, 2)),
        (1, 1, (2, 2)),
        (41, 28, (2, 2)),
        (42, 28, (2, 4)),  # 1.5 blocks round up
        (280, 140, (10, 20)),
        (2800, 1400, (10, 22)),  # shrunk, aspect about kept
        (28_000, 28, (2, 128)),  # a side of one block cannot shrink
    ],
)
def test_a_picture_keeps_its_resolution_until_it_is_too_large(
    width: int, height: int, grid: tuple[int, int]
) -> None:
    rows, columns = image_grid(width, height, VIT)
    assert (int(rows), int(columns)) == grid


def test_shrinking_keeps_the_aspect_and_uses_most_of_the_bound() -> None:
    width, height = sizes().T
    square = (width < 3 * height) & (height < 3 * width) & (width * height > 10**6)
    rows, columns = image_grid(width[square], height[square], VIT)
    assert (rows * columns).min() >= 0.6 * VIT.max_patches
    ratio = (columns / rows) / (width[square] / height[square])
    assert ratio.min() > 0.6 and ratio.max() < 1.6


def test_one_sample_counts_as_in_a_whole_array() -> None:
    many = sizes(200)
    for encoder in (VIT, USM):
        for function in (encoder_units, out_len, encoder_cost, is_oversize):
            whole = function(many, encoder)
            assert [function(size, encoder) for size in many] == whole.tolist()


def test_out_len_of_a_picture_is_its_merge_blocks() -> None:
    width, height = sizes().T
    rows, columns = image_grid(width, height, VIT)
    assert (out_len(sizes(), VIT) == rows // 2 * (columns // 2)).all()


@pytest.mark.parametrize(
    ("samples", "rate", "frames", "tokens"),
    [
        (1, 44_100, 1, 1),
        (160, 16_000, 1, 1),
        (161, 16_000, 2, 1),
        (44_100, 44_100, 100, 13),
        (8_000, 8_000, 100, 13),
        (16_000 * 60, 16_000, 1500, 188),
    ],
)
def test_frames_and_tokens_of_a_recording(
    samples: int, rate: int, frames: int, tokens: int
) -> None:
    assert audio_frames(samples, rate, USM) == frames
    assert out_len((samples, rate), USM) == tokens


def test_resampling_rounds_up_exactly() -> None:
    assert resampled_samples(2**31, 44_100) == -(-(2**31) * 16_000 // 44_100)


def test_oversize_is_what_shrinking_or_cutting_changes() -> None:
    assert is_oversize([(224, 224), (252, 224), (28_000, 28)], VIT).tolist() == [False, True, True]
    assert is_oversize([(16_000 * 15, 16_000), (16_000 * 15 + 1, 16_000)], USM).tolist() == [
        False,
        True,
    ]


def test_cost_grows_faster_than_length() -> None:
    for encoder, size in ((VIT, (112, 112)), (USM, (16_000, 16_000))):
        small = int(encoder_cost(size, encoder))
        large = int(encoder_cost((size[0] * 4, size[1]), encoder))
        units = encoder_units([size, (size[0] * 4, size[1])], encoder)
        assert units[1] == 4 * units[0] and large > 4 * small


def test_patches_of_a_merge_block_are_neighbours() -> None:
    positions = patch_positions(4, 6, 2)
    assert sorted(map(tuple, positions.tolist())) == [(r, c) for r in range(4) for c in range(6)]
    assert positions[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert positions[4:6].tolist() == [[0, 2], [0, 3]]
    blocks = positions.reshape(-1, 4, 2) // 2
    assert (blocks == blocks[:, :1]).all()
