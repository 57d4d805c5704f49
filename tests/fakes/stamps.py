"""A folder in the shape of the unpacked Debian packages, small."""

from pathlib import Path

import numpy as np

from omni_dataloader.bible import BIBLE_FILE
from omni_dataloader.stamps import STAMPS_FOLDER
from tests.fakes.sources import picture, recording

LANGUAGES = ("en", "ro", "fr", "ca@valencia", "zh_TW")

_SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="36pt" height="18pt">'
    '<rect width="100%" height="100%" fill="#f00"/></svg>'
)


def make_stamps(folder: Path, *, num_stamps: int, bible: bytes | None = None) -> None:
    """Even stamps are photos, odd ones drawings; each is spoken in English and Romanian."""
    root = folder / STAMPS_FOLDER / "animals"
    root.mkdir(parents=True)
    for number in range(num_stamps):
        stem = root / f"stamp_{number}"
        captions = [f"en caption {number}"]
        captions += [f"{lang}.utf8={lang} caption {number}" for lang in LANGUAGES[1:]]
        stem.with_suffix(".txt").write_text("\n".join(captions) + "\n")
        rng = np.random.default_rng(number)
        if number % 2:
            stem.with_suffix(".svg").write_text(_SVG)
        else:
            png = picture(rng, width=20 + number, height=30)
            stem.with_suffix(".png").write_bytes(png)
        for ending in ("_desc.ogg", "_desc_ro.ogg"):
            spoken = recording(rng, seconds=0.2)
            (root / f"stamp_{number}{ending}").write_bytes(spoken)
    (root / "stamp_0_desc_ml.ogg").write_bytes(recording(rng, seconds=0.2))  # has no caption
    if bible is not None:
        (folder / BIBLE_FILE).parent.mkdir(parents=True)
        (folder / BIBLE_FILE).write_bytes(bible)
