"""Pictures and recordings for the demo: the stamps of Debian's tuxpaint-stamps-default.

A stamp `frog` is frog.png or frog.svg, frog.txt (English, then one line a language) and
frog_desc_LANGUAGE.ogg (the same words spoken; without a language, English).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import resvg_py

from omni_contract.errors import DataError
from omni_dataloader.build import RawSample

STAMPS_FOLDER = Path("usr/share/tuxpaint/stamps")

_ENGLISH = "en"
_CAPTION = re.compile(r"([A-Za-z_@]+)\.utf8=(.+)")
_RECORDING = re.compile(r"(.+)_desc(?:_([A-Za-z_@]+))?\.ogg")
_DOTS_PER_INCH = 96  # of CSS; resvg's default leaves drawings measured in points without a size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """One stamp, with at least an English caption."""

    name: str
    """Path in the stamps folder, without an ending; fit for a key in a tar."""
    captions: Mapping[str, str]
    """By language."""
    png: Path | None
    svg: Path | None
    recordings: Mapping[str, Path]
    """By language."""

    def some_captions(self, num_captions: int) -> Iterator[tuple[str, str]]:
        """English and a choice of other languages that is even over many stamps, and fixed."""
        english = self.captions[_ENGLISH]
        others = [lang for lang, text in self.captions.items() if text != english]
        others.sort(key=lambda lang: sha256(f"{self.name} {lang}".encode()).digest())
        for language in [_ENGLISH, *others][:num_captions]:
            yield language, self.captions[language]


def find_stamps(folder: Path) -> list[Stamp]:
    """All stamps under a folder of unpacked packages, ascending by name."""
    root = folder / STAMPS_FOLDER
    recordings: dict[Path, dict[str, Path]] = {}
    for path in sorted(root.rglob("*.ogg")):
        match = _RECORDING.fullmatch(path.name)
        if match is not None:
            stem, language = match.groups()
            recordings.setdefault(path.with_name(stem), {})[language or _ENGLISH] = path
    stamps: list[Stamp] = []
    for path in sorted(root.rglob("*.txt")):
        captions = parse_captions(path.read_text(encoding="utf-8", errors="replace"))
        if _ENGLISH not in captions:
            continue
        stem = path.with_suffix("")
        png, svg = path.with_suffix(".png"), path.with_suffix(".svg")
        stamps.append(
            Stamp(
                name=re.sub(r"[/.\s]", "-", str(stem.relative_to(root))),
                captions=captions,
                png=png if png.exists() else None,
                svg=svg if svg.exists() else None,
                recordings=recordings.get(stem, {}),
            )
        )
    if not stamps:
        raise DataError(f"{root}: holds no stamps (a picture with a .txt beside it)")
    return stamps


def parse_captions(text: str) -> dict[str, str]:
    """Captions by language: the first line is English, the others are `LANGUAGE.utf8=TEXT`."""
    first, *rest = text.strip().splitlines() or [""]
    captions = {_ENGLISH: first.strip()} if first.strip() else {}
    for line in rest:
        match = _CAPTION.fullmatch(line.strip())
        if match is not None and match[2].strip():
            captions.setdefault(match[1], match[2].strip())
    return captions


def pictures(stamps: Sequence[Stamp], *, captions_per_picture: int) -> Iterator[RawSample]:
    """Each photo with several of its captions: parts png, txt."""
    for stamp in stamps:
        if stamp.png is not None:
            yield from _captioned(stamp, stamp.png.read_bytes(), captions_per_picture)


def drawings(
    stamps: Sequence[Stamp], *, captions_per_picture: int, skipped: Counter[str]
) -> Iterator[RawSample]:
    """Each drawing, rasterised at its own size, with several of its captions: parts png, txt."""
    for stamp in stamps:
        if stamp.svg is None:
            continue
        try:
            # Fonts differ from system to system; none at all gives everyone the same pixels.
            png = bytes(
                resvg_py.svg_to_bytes(
                    svg_path=str(stamp.svg), dpi=_DOTS_PER_INCH, skip_system_fonts=True
                )
            )
        except ValueError:
            skipped["that cannot be rasterised"] += 1
            continue
        yield from _captioned(stamp, png, captions_per_picture)


def speech(stamps: Sequence[Stamp], *, skipped: Counter[str]) -> Iterator[RawSample]:
    """Each recording with the caption in its language: parts ogg, txt."""
    for stamp in stamps:
        for language, path in stamp.recordings.items():
            text = stamp.captions.get(language)
            if text is None:
                skipped["without a caption in the language spoken"] += 1
                continue
            yield RawSample(
                key=f"{stamp.name}-{language}",
                files={"ogg": path.read_bytes(), "txt": text.encode()},
            )


def _captioned(stamp: Stamp, png: bytes, num_captions: int) -> Iterator[RawSample]:
    for language, text in stamp.some_captions(num_captions):
        yield RawSample(key=f"{stamp.name}-{language}", files={"png": png, "txt": text.encode()})
