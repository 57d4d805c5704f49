"""Stamps on disk to samples: the right caption with the right picture and the right voice."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from omni_contract.errors import DataError
from omni_dataloader.decode import decode_image
from omni_dataloader.stamps import (
    STAMPS_FOLDER,
    drawings,
    find_stamps,
    parse_captions,
    pictures,
    speech,
)
from tests.fakes.sources import picture, recording
from tests.fakes.stamps import LANGUAGES, make_stamps


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_stamps(tmp_path, num_stamps=40)
    return tmp_path


def test_captions_by_language() -> None:
    text = "A frog.\nro.utf8=O broască.\nca@valencia.utf8=Una granota. \nfr.utf8=\nnonsense\n"
    assert parse_captions(text) == {
        "en": "A frog.",
        "ro": "O broască.",
        "ca@valencia": "Una granota.",
    }
    assert parse_captions("") == {}


def test_each_picture_keeps_its_own_captions(folder: Path) -> None:
    samples = list(pictures(find_stamps(folder), captions_per_picture=3))
    assert len(samples) == 3 * 20
    for sample in samples:
        stem, _, language = sample.key.rpartition("-")
        number = stem.rpartition("_")[2]
        assert sample.files["txt"].decode() == f"{language} caption {number}"
        seed = np.random.default_rng(int(number))
        assert sample.files["png"] == picture(seed, width=20 + int(number), height=30)


def test_english_is_always_there_and_the_others_take_turns(folder: Path) -> None:
    samples = list(pictures(find_stamps(folder), captions_per_picture=3))
    languages = Counter(sample.key.rpartition("-")[2] for sample in samples)
    assert languages.pop("en") == 20
    assert set(languages) == set(LANGUAGES) - {"en"}
    assert max(languages.values()) < 20


def test_drawings_are_rasterised_at_their_own_size(folder: Path) -> None:
    skipped: Counter[str] = Counter()
    samples = list(drawings(find_stamps(folder), captions_per_picture=1, skipped=skipped))
    assert len(samples) == 20 and not skipped
    pixels = decode_image(samples[0].files["png"])
    assert pixels.shape == (24, 48, 3)  # 18pt by 36pt at 96 dots an inch
    assert (pixels == (255, 0, 0)).all()


def test_a_drawing_that_cannot_be_rasterised_is_counted(folder: Path) -> None:
    bad = next((folder / STAMPS_FOLDER).rglob("*.svg"))
    bad.write_text("<svg")
    skipped: Counter[str] = Counter()
    samples = list(drawings(find_stamps(folder), captions_per_picture=1, skipped=skipped))
    assert len(samples) == 19 and skipped == {"that cannot be rasterised": 1}


def test_a_recording_goes_with_the_text_in_its_language(folder: Path) -> None:
    skipped: Counter[str] = Counter()
    samples = list(speech(find_stamps(folder), skipped=skipped))
    assert len(samples) == 2 * 40
    by_key = {sample.key: sample.files["txt"].decode() for sample in samples}
    assert by_key["animals-stamp_7-ro"] == "ro caption 7"
    assert by_key["animals-stamp_7-en"] == "en caption 7"
    assert skipped == {"without a caption in the language spoken": 1}


def test_a_folder_without_stamps(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no stamps"):
        find_stamps(tmp_path)


def test_a_sound_that_is_no_description_is_left_alone(folder: Path) -> None:
    before = sum(len(stamp.recordings) for stamp in find_stamps(folder))
    croak = recording(np.random.default_rng(0), seconds=0.2)
    (folder / STAMPS_FOLDER / "animals" / "stamp_1.ogg").write_bytes(croak)
    assert sum(len(stamp.recordings) for stamp in find_stamps(folder)) == before
