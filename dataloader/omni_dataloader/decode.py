"""Bytes of a sample to the arrays an encoder takes. Pure: no I/O, no state but cached tables.

Every count (patches, frames) is the one `omni_planner.cost` predicts from the index; a sample
whose content says otherwise is corrupt.
"""

# Shapes: H, W pixels; R, C rows and columns of patches, P patch side, m merge side; N samples of a
# wave; F frames, B mel bins.

import io
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import soundfile
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from omni_contract.spec_model import UsmSpec, VitSpec
from omni_dataloader.index import CorruptSample
from omni_planner.cost import (
    AUDIO_RATE,
    HOP_SAMPLES,
    audio_frames,
    image_grid,
    resampled_samples,
)

MAX_PIXELS = 64_000_000
"""Pictures above this are refused before they are unpacked: a decompression bomb."""
MAX_SAMPLES = 2**31
WINDOW_SAMPLES = 400  # 25 ms
FFT_SAMPLES = 512
MEL_FLOOR = 1e-8
# Of log10 mel energies over the spoken descriptions of the demo data, so that features are about
# zero mean and unit variance. Constants, so that a recording's features depend on nothing else.
MEL_MEAN = -2.15
MEL_STD = 2.15

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")

Bytes = bytes | memoryview
Wave = NDArray[np.float32]


def decode_text(data: Bytes) -> str:
    """A text as UTF-8, without white space around it. Raises CorruptSample."""
    try:
        text = str(data, "utf-8").strip()
    except UnicodeDecodeError as exc:
        raise CorruptSample(f"the text is no UTF-8: {exc.reason} at byte {exc.start}") from None
    if not text:
        raise CorruptSample("the text is empty")
    return text


def image_size(data: Bytes) -> tuple[int, int]:
    """Width and height from the header alone. Raises CorruptSample."""
    with _opened_image(data) as image:
        return image.size


def decode_image(data: Bytes) -> NDArray[np.uint8]:
    """A picture as RGB over white, [H, W, 3]. Raises CorruptSample."""
    with _opened_image(data) as image:
        return np.asarray(_rgb(image))


def image_patches(
    data: Bytes, size: Sequence[int], vit: VitSpec
) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """A picture as patches [R*C, 3*P*P] and its grid (R, C); `size` is the indexed one."""
    with _opened_image(data) as image:
        if image.size != tuple(size):
            raise CorruptSample(f"the picture is {image.size} pixels, the index says {size}")
        rows, columns = (int(n) for n in image_grid(size[0], size[1], vit))
        wanted = (columns * vit.patch_size, rows * vit.patch_size)
        rgb = _rgb(image).resize(wanted, Image.Resampling.BICUBIC)
    patches = patchify(np.asarray(rgb), patch_size=vit.patch_size, merge_patches=vit.merge_patches)
    return patches, (rows, columns)


def patchify(image: NDArray[np.uint8], *, patch_size: int, merge_patches: int) -> NDArray[np.uint8]:
    """Cut [R*P, C*P, 3] into patches [R*C, 3*P*P], in the order of `cost.patch_positions`."""
    height, width, channels = image.shape
    p, m = patch_size, merge_patches
    rows, columns = height // p, width // p
    if height % (p * m) or width % (p * m):
        raise ValueError(f"{height} x {width} pixels are no whole blocks of {p * m}")
    blocks = image.reshape(rows // m, m, p, columns // m, m, p, channels)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # [R/m, C/m, m, m, 3, P, P]
    return np.ascontiguousarray(blocks).reshape(rows * columns, channels * p * p)


def audio_size(data: Bytes) -> tuple[int, int]:
    """Samples of one channel and samples per second, from the headers. Raises CorruptSample."""
    with _opened_audio(data) as file:
        return file.frames, file.samplerate


def check_audio(data: Bytes) -> tuple[int, int]:
    """The size of a recording, after decoding all of it. Raises CorruptSample."""
    channels, rate = _decoded(data, None)
    return len(channels), rate


def decode_audio(
    data: Bytes, *, max_samples: int | None = None, size: Sequence[int] | None = None
) -> Wave:
    """A recording as one channel at AUDIO_RATE, [N], at most its first `max_samples`.

    Raises CorruptSample, also where its (samples, samples a second) are not `size`.
    """
    channels, rate = _decoded(data, max_samples, size)
    # By columns: numpy's mean over a short last axis takes four times as long.
    mono = sum(channels.T[1:], start=channels[:, 0]) / np.float32(channels.shape[1])
    wave = resample(mono, rate)
    return wave if max_samples is None else wave[:max_samples]


def audio_features(data: Bytes, size: Sequence[int], usm: UsmSpec) -> NDArray[np.float32]:
    """A recording as log-mel frames [F, B]; `size` is the indexed one. Raises CorruptSample."""
    num_frames = int(audio_frames(size[0], size[1], usm))
    wave = decode_audio(data, max_samples=num_frames * HOP_SAMPLES, size=size)
    features = log_mel(wave, usm.mel_bins)
    assert len(features) == num_frames, "decoder and cost model disagree"
    return features


def resample(wave: Wave, rate: int) -> Wave:
    """One channel from `rate` to AUDIO_RATE by windowed sinc: [N] -> [resampled_samples(N)]."""
    if rate == AUDIO_RATE:
        return wave
    up, down = AUDIO_RATE // math.gcd(rate, AUDIO_RATE), rate // math.gcd(rate, AUDIO_RATE)
    taps = _sinc_taps(up, down)  # [up, 2L]
    half = taps.shape[1] // 2
    num_out = int(resampled_samples(len(wave), rate))
    windows = sliding_window_view(np.pad(wave, (half - 1, half + 1)), 2 * half)  # [N+2, 2L]
    out = np.empty(num_out, np.float32)
    for first in range(min(up, num_out)):  # outputs `up` apart share their taps
        count = -(-(num_out - first) // up)
        begin, phase = divmod(first * down, up)
        out[first::up] = windows[begin::down][:count] @ taps[phase]
    return out


def log_mel(wave: Wave, mel_bins: int) -> NDArray[np.float32]:
    """Log mel energies of 25 ms every 10 ms: [N] -> [ceil(N / HOP_SAMPLES), B]."""
    num_frames = -(-len(wave) // HOP_SAMPLES)
    padding = (num_frames - 1) * HOP_SAMPLES + WINDOW_SAMPLES - len(wave)
    padded = np.pad(wave, (0, max(0, padding)))
    frames = sliding_window_view(padded, WINDOW_SAMPLES)[::HOP_SAMPLES][:num_frames]  # [F, 400]
    window = np.hanning(WINDOW_SAMPLES + 1)[:-1].astype(np.float32)
    spectrum = np.fft.rfft(frames * window, FFT_SAMPLES)  # [F, 257]
    power = (spectrum.real**2 + spectrum.imag**2).astype(np.float32)
    mel = power @ _mel_filters(mel_bins)  # [F, B]
    features: Wave = (np.log10(np.maximum(mel, MEL_FLOOR)) - MEL_MEAN) / MEL_STD  # [F, B]
    return features.astype(np.float32)


def _opened_image(data: Bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as exc:
        # Pillow names the buffer's address, which differs from run to run.
        reason = "unknown format" if isinstance(exc, UnidentifiedImageError) else str(exc)
        raise CorruptSample(f"the picture cannot be read: {reason}") from None
    except Image.DecompressionBombError:
        raise CorruptSample(f"the picture has over {MAX_PIXELS} pixels") from None
    if image.width * image.height > MAX_PIXELS:
        raise CorruptSample(
            f"the picture has {image.width} x {image.height} pixels, over the {MAX_PIXELS} allowed"
        )
    return image


def _rgb(image: Image.Image) -> Image.Image:
    """Decode, and lay what is transparent over white."""
    try:
        if image.mode == "I;16":  # 16-bit grey, which Pillow would clip instead of scale
            grey = (np.asarray(image) >> 8).astype(np.uint8)
            return Image.fromarray(grey).convert("RGB")
        if image.mode == "RGB" and "transparency" not in image.info:
            image.load()
            return image
        rgba = image.convert("RGBA")
    except (OSError, ValueError, SyntaxError, MemoryError, EOFError) as exc:
        raise CorruptSample(f"the picture cannot be decoded: {exc}") from None
    white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, rgba).convert("RGB")


def _opened_audio(data: Bytes) -> soundfile.SoundFile:
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.SoundFileError, RuntimeError) as exc:
        reason = str(exc).rpartition(": ")[2]  # soundfile names the buffer's address
        raise CorruptSample(f"the recording cannot be read: {reason}") from None
    if not 0 < file.frames <= MAX_SAMPLES or not 1000 <= file.samplerate <= 384_000:
        raise CorruptSample(
            f"the recording has {file.frames} samples at {file.samplerate} a second"
        )
    return file


def _decoded(
    data: Bytes, max_samples: int | None, size: Sequence[int] | None = None
) -> tuple[Wave, int]:
    """All channels [N, C] at the recording's own rate, enough for `max_samples` at AUDIO_RATE."""
    with _opened_audio(data) as file:
        rate, total = int(file.samplerate), int(file.frames)
        if size is not None and (total, rate) != tuple(size):
            raise CorruptSample(
                f"the recording has (samples, samples a second) {(total, rate)}, the index says "
                f"{tuple(size)}"
            )
        wanted = total
        if max_samples is not None:
            # A little more than is kept, so that the cut does not show in the last samples.
            wanted = min(total, -(-max_samples * rate // AUDIO_RATE) + rate // 10)
        try:
            channels: Wave = file.read(wanted, dtype="float32", always_2d=True)
        except (soundfile.SoundFileError, RuntimeError) as exc:
            raise CorruptSample(f"the recording cannot be decoded: {exc}") from None
    if len(channels) != wanted:
        raise CorruptSample(
            f"the recording says it has {total} samples and ends after {len(channels)}"
        )
    if not np.isfinite(channels).all():
        raise CorruptSample("the recording holds values that are no numbers")
    return channels, rate


@lru_cache(maxsize=16)
def _sinc_taps(up: int, down: int) -> NDArray[np.float32]:
    """Filter taps by phase [up, 2L]: low-pass at the lower of both rates, Hann window."""
    cutoff = min(1.0, up / down)
    half = math.ceil(16 / cutoff)
    phase = np.arange(up)[:, None] / up
    distance = np.arange(1 - half, half + 1)[None, :] - phase  # input samples to the output
    window = np.cos(np.clip(distance / half, -1, 1) * (np.pi / 2)) ** 2
    taps = cutoff * np.sinc(cutoff * distance) * window
    taps /= taps.sum(axis=1, keepdims=True)
    return np.asarray(taps, np.float32)


@lru_cache(maxsize=16)
def _mel_filters(mel_bins: int) -> NDArray[np.float32]:
    """Triangles evenly spaced on the mel scale from 0 Hz to half the rate, [257, B]."""
    top = 2595 * np.log10(1 + AUDIO_RATE / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, mel_bins + 2) / 2595) - 1)  # Hz
    hertz = np.linspace(0, AUDIO_RATE / 2, FFT_SAMPLES // 2 + 1)[:, None]
    rising = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)
