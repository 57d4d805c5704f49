"""What a sample weighs, from its raw size alone: encoder units, LLM tokens, encoder cost.

Everything is whole arrays in, integers out, bit for bit the same everywhere: sidecar, planner and
decoder must agree to the last token. A raw size is a pair: picture (width, height) in pixels,
recording (samples of one channel, samples per second).
"""

# Shapes: n samples; every function takes and returns arrays of n, or scalars.

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omni_contract.spec_model import EncoderSpec, UsmSpec, VitSpec

Ints = NDArray[np.int64]

AUDIO_RATE = 16_000
"""Samples per second that recordings are resampled to."""
HOP_SAMPLES = 160
"""Samples at AUDIO_RATE from one frame to the next: 10 ms."""


def image_grid(width: ArrayLike, height: ArrayLike, vit: VitSpec) -> tuple[Ints, Ints]:
    """Rows and columns of patches that a picture is scaled to; multiples of mergePatches.

    Native resolution rounded to whole merge blocks, at least one block each way. Where that is
    over maxPatches, both sides shrink alike until it fits, whatever `oversize` says.
    """
    rows, columns = _native_blocks(width, height, vit)
    most = _most_blocks(vit)
    # The largest common factor that fits; floor keeps the product under the bound.
    scale = np.sqrt(most / (rows * columns))
    over = rows * columns > most
    small_rows = np.clip((rows * scale).astype(np.int64), 1, most)
    small_columns = np.clip((columns * scale).astype(np.int64), 1, most)
    # A side that would be under one block is held at one; the other may take the whole bound.
    small_rows = np.minimum(small_rows, most // small_columns)
    small_columns = np.minimum(small_columns, most // small_rows)
    merge = vit.merge_patches
    return (
        np.where(over, small_rows, rows) * merge,
        np.where(over, small_columns, columns) * merge,
    )


def patch_positions(rows: int, columns: int, merge_patches: int) -> Ints:
    """Row and column [rows * columns, 2] of each patch in the order patches are laid out.

    Merge blocks row by row, inside a block row by row: merging is a plain reshape to
    [blocks, mergePatches**2, ...].
    """
    m = merge_patches
    grid = np.indices((rows, columns), np.int64)  # [2, R, C]
    grid = grid.reshape(2, rows // m, m, columns // m, m)  # [2, R/m, m, C/m, m]
    return grid.transpose(1, 3, 2, 4, 0).reshape(rows * columns, 2)  # [R*C, 2]


def resampled_samples(num_samples: ArrayLike, sample_rate: ArrayLike) -> Ints:
    """Samples of a recording after resampling to AUDIO_RATE, rounded up."""
    scaled = np.asarray(num_samples, np.int64) * AUDIO_RATE
    return -(-scaled // np.asarray(sample_rate, np.int64))


def audio_frames(num_samples: ArrayLike, sample_rate: ArrayLike, usm: UsmSpec) -> Ints:
    """10 ms frames of a recording, the last one filled up with silence; cut at maxFrames."""
    frames = -(-resampled_samples(num_samples, sample_rate) // HOP_SAMPLES)
    return np.minimum(frames, usm.max_frames)


def encoder_units(size: ArrayLike, encoder: EncoderSpec) -> Ints:
    """Patches of pictures or frames of recordings; `size` is [n, 2] or one pair."""
    first, second = np.moveaxis(np.asarray(size, np.int64), -1, 0)
    if isinstance(encoder, VitSpec):
        rows, columns = image_grid(first, second, encoder)
        return rows * columns
    return audio_frames(first, second, encoder)


def out_len(size: ArrayLike, encoder: EncoderSpec) -> Ints:
    """LLM tokens that the encoder makes of each sample; `size` is [n, 2] or one pair."""
    units = encoder_units(size, encoder)
    if isinstance(encoder, VitSpec):
        return units // encoder.merge_patches**2
    return -(-units // encoder.frames_per_token)


def is_oversize(size: ArrayLike, encoder: EncoderSpec) -> NDArray[np.bool_]:
    """Whether a sample is over maxPatches or maxFrames before it is shrunk or cut."""
    first, second = np.moveaxis(np.asarray(size, np.int64), -1, 0)
    if isinstance(encoder, VitSpec):
        rows, columns = _native_blocks(first, second, encoder)
        return np.asarray(rows * columns > _most_blocks(encoder))
    frames = -(-resampled_samples(first, second) // HOP_SAMPLES)
    return np.asarray(frames > encoder.max_frames)


def encoder_cost(size: ArrayLike, encoder: EncoderSpec) -> Ints:
    """Forward cost of each sample in multiply-adds, as integers; `size` is [n, 2] or one pair.

    Linear in the sequence for projections and MLPs, quadratic for attention inside the sample.
    """
    hidden, layers = encoder.hidden_size, encoder.layers
    if isinstance(encoder, VitSpec):
        length = encoder_units(size, encoder)
        front = 3 * encoder.patch_size**2 * hidden
        layer = 12 * hidden**2  # 4 projections, an MLP of 4 times the width
    else:
        length = out_len(size, encoder)  # the Conformer runs behind the strided convolution
        front = encoder.frames_per_token * encoder.mel_bins * hidden
        layer = 23 * hidden**2  # 4 projections, two MLPs, the convolution module
    return length * (front + layers * layer) + 2 * layers * hidden * length * length


def _native_blocks(width: ArrayLike, height: ArrayLike, vit: VitSpec) -> tuple[Ints, Ints]:
    """Rows and columns of merge blocks at native resolution, rounded half up, at least 1."""
    unit = vit.patch_size * vit.merge_patches
    rows = (2 * np.asarray(height, np.int64) + unit) // (2 * unit)
    columns = (2 * np.asarray(width, np.int64) + unit) // (2 * unit)
    return np.maximum(rows, 1), np.maximum(columns, 1)


def _most_blocks(vit: VitSpec) -> int:
    """Merge blocks under maxPatches; a picture has at least one, even where that is over."""
    return max(1, vit.max_patches // vit.merge_patches**2)
