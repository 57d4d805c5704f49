"""The windowed, packed text of bible-kjv-text."""

import shutil
import subprocess

import pytest

from omni_contract.errors import DataError
from omni_dataloader.bible import DOCUMENT_CHARACTERS, decompress, documents, unpack
from tests.fakes.bible import bible, pack, verses


def test_windows_join_to_the_text() -> None:
    text = verses()
    assert unpack(bible(text, window_bytes=5000)) == text
    assert unpack(bible(text)) == text


@pytest.mark.skipif(shutil.which("gzip") is None, reason="needs gzip, which undoes compress")
def test_our_packer_speaks_unix_compress() -> None:
    """Or the tests above would only show that two mistakes agree."""
    raw = verses().encode()
    done = subprocess.run(
        ["gzip", "-dc"], input=b"\x1f\x9d\x90" + pack(raw), capture_output=True, timeout=30
    )
    assert done.stdout == raw, done.stderr
    assert decompress(pack(raw)) == raw


def test_documents_are_whole_chapters_and_long() -> None:
    samples = list(documents(bible(verses())))
    texts = [sample.files["txt"].decode() for sample in samples]
    assert len(samples) > 3
    assert all(len(text) >= DOCUMENT_CHARACTERS for text in texts[:-1])
    lines = "\n".join(texts).splitlines()
    assert [line for line in lines if "Ki " in line] == [
        f"{book}Ki {chapter}" for book in (1, 2, 3) for chapter in range(1, 11)
    ]
    assert sum(line.startswith("30 word") for line in lines) == 30
    assert len({sample.key for sample in samples}) == len(samples)
    assert not any("." in sample.key for sample in samples), "a key ends at its first dot"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"plain text", "does not begin with"),
        (b"EC02Compressed Data File", "truncated"),
        (bible("no verses here"), "no verses"),
    ],
)
def test_another_file_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(DataError, match=says):
        list(documents(data))


@pytest.mark.parametrize("packed", [b"\xff\xff\xff", pack(b"abc") + b"\xff\xff"])
def test_a_damaged_window_is_named(packed: bytes) -> None:
    """A code beyond the dictionary, as the very first one too."""
    with pytest.raises(DataError, match=r"bible\.data: is damaged"):
        decompress(packed)
