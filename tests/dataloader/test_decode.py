"""Bytes to arrays: counts as predicted, colours and tones as recorded, damage as CorruptSample."""

import io
import warnings
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from omni_contract.spec_model import UsmSpec, VitSpec
from omni_dataloader.decode import (
    audio_features,
    audio_size,
    check_audio,
    decode_audio,
    decode_image,
    decode_text,
    image_patches,
    image_size,
    log_mel,
    patchify,
    resample,
)
from omni_dataloader.index import CorruptSample
from omni_planner.cost import audio_frames, image_grid, patch_positions
from tests.fakes.sources import picture, recording

VIT = VitSpec(layers=2, hidden_size=64, heads=4)
USM = UsmSpec(layers=2, hidden_size=64, heads=4, max_frames=200)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def tone(hertz: float, rate: int, seconds: float = 1.0) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return np.sin(2 * np.pi * hertz * time).astype(np.float32)


def ogg(wave: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format="OGG", subtype="VORBIS")
    return buffer.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L", "1", "I;16"])
def test_every_kind_of_png_becomes_rgb(mode: str) -> None:
    grey = np.full((5, 7), 255, np.uint8)
    if mode == "I;16":
        image = Image.fromarray(np.full((5, 7), 65535, np.uint16))
    else:
        image = Image.fromarray(grey).convert(mode)
    pixels = decode_image(png(image))
    assert pixels.shape == (5, 7, 3) and pixels.dtype == np.uint8
    assert (pixels == 255).all()


def test_transparency_lies_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 255))
    assert decode_image(png(image)).tolist() == [[[255, 255, 255], [200, 0, 0]]]


def test_patches_lie_as_the_planner_says() -> None:
    rows, columns, side = 4, 6, 3
    image = np.zeros((rows * side, columns * side, 3), np.uint8)
    for row in range(rows):
        for column in range(columns):
            image[row * side : (row + 1) * side, column * side : (column + 1) * side] = (
                row,
                column,
                7,
            )
    patches = patchify(image, patch_size=side, merge_patches=2)
    assert patches.shape == (24, 27)
    by_channel = patches.reshape(24, 3, 9)
    assert (by_channel == by_channel[:, :, :1]).all()
    assert (by_channel[:, :2, 0] == patch_positions(rows, columns, 2)).all()


@pytest.mark.parametrize("size", [(1, 1), (7, 12), (100, 100), (900, 300), (5, 700)])
def test_a_picture_has_the_patches_its_size_predicts(size: tuple[int, int]) -> None:
    data = picture(np.random.default_rng(0), width=size[0], height=size[1])
    patches, grid = image_patches(data, image_size(data), VIT)
    assert grid == tuple(int(n) for n in image_grid(*size, VIT))
    assert patches.shape == (grid[0] * grid[1], 3 * 14 * 14)


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 12_345, 100_000])
def test_a_recording_has_the_frames_its_size_predicts(rate: int, num_samples: int) -> None:
    wave = tone(440, rate, num_samples / rate)
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, rate, format="WAV")
    data = buffer.getvalue()
    features = audio_features(data, audio_size(data), USM)
    assert features.shape == (int(audio_frames(num_samples, rate, USM)), USM.mel_bins)
    assert features.dtype == np.float32 and np.isfinite(features).all()


def test_a_recording_that_is_cut_begins_like_the_whole_one() -> None:
    data = ogg(tone(440, 44_100, 3), 44_100)
    whole = decode_audio(data)
    cut = decode_audio(data, max_samples=16_000)
    assert len(whole) == 48_000 and (cut == whole[:16_000]).all()


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    expected = tone(1000, 16_000)
    actual = resample(tone(1000, rate), rate)
    assert len(actual) == 16_000
    assert np.abs(actual - expected)[500:-500].max() < 1e-3


def test_resampling_drops_what_the_lower_rate_cannot_hold() -> None:
    assert np.abs(resample(tone(12_000, 44_100), 44_100))[500:-500].max() < 1e-3


def test_a_higher_tone_lies_in_a_higher_mel_bin() -> None:
    loudest = [int(log_mel(tone(hertz, 16_000), 80).mean(axis=0).argmax()) for hertz in
               (200, 1000, 4000)]  # fmt: skip
    assert loudest == sorted(loudest) and len(set(loudest)) == 3


def test_stereo_is_averaged() -> None:
    left = tone(440, 16_000)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([left, -left], 1), 16_000, format="WAV", subtype="FLOAT")
    assert np.abs(decode_audio(buffer.getvalue())).max() == 0


def test_text_is_stripped_utf8() -> None:
    assert decode_text(" Un rățoi.\n".encode()) == "Un rățoi."
    for bad in (b"\xff\xfe", b" \n", b""):
        with pytest.raises(CorruptSample):
            decode_text(bad)


def test_a_decompression_bomb_is_refused_unread() -> None:
    header = bytearray(png(Image.new("L", (1, 1))))
    header[16:24] = (30_000).to_bytes(4, "big") * 2  # width and height of the IHDR chunk
    header[29:33] = zlib.crc32(header[12:29]).to_bytes(4, "big")
    with pytest.raises(CorruptSample, match="pixels"):
        decode_image(bytes(header))


def test_content_that_differs_from_the_index_is_corrupt() -> None:
    rng = np.random.default_rng(0)
    data = picture(rng, width=20, height=30)
    with pytest.raises(CorruptSample, match="the index says"):
        image_patches(data, (30, 20), VIT)
    sound = recording(rng, seconds=0.5)
    num_samples, rate = audio_size(sound)
    with pytest.raises(CorruptSample, match="the index says"):
        audio_features(sound, (num_samples + 1, rate), USM)


@pytest.mark.parametrize("ending", ["png", "jpg", "ogg", "flac"])
def test_damage_never_raises_anything_but_corrupt_sample(ending: str) -> None:
    rng = np.random.default_rng(1)
    if ending in ("png", "jpg"):
        noise = Image.fromarray(rng.integers(0, 255, (40, 60, 3), np.uint8))
        buffer = io.BytesIO()
        noise.save(buffer, "PNG" if ending == "png" else "JPEG")
        good, check = buffer.getvalue(), decode_image
    else:
        good = ogg(tone(440, 16_000), 16_000) if ending == "ogg" else recording(rng, seconds=0.5)
        check = check_audio  # type: ignore[assignment]
    check(good)
    num_refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow may warn as well as refuse
        for trial in range(300):
            bad = bytearray(good)
            if trial % 3 == 0:
                del bad[int(rng.integers(0, len(bad))) :]
            else:
                for at in rng.integers(0, len(bad) if trial % 3 == 1 else 60, 5):
                    bad[at] = int(rng.integers(0, 256))
            try:
                check(bytes(bad))
            except CorruptSample as exc:
                assert "0x" not in str(exc), "a message must not differ from run to run"
                num_refused += 1
    assert num_refused > 50


def test_features_do_not_depend_on_what_was_decoded_before() -> None:
    one, two = (recording(np.random.default_rng(seed), seconds=0.7) for seed in (1, 2))
    first = audio_features(one, audio_size(one), USM)
    audio_features(two, audio_size(two), USM)
    assert (audio_features(one, audio_size(one), USM) == first).all()
