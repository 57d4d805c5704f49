"""Long documents for the demo: the text of Debian's package bible-kjv-text.

The file is a table of 64 KiB windows, each packed by the code of Unix `compress`.
"""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

from omni_contract.errors import DataError
from omni_dataloader.build import RawSample

BIBLE_FILE = Path("usr/lib/bible.data")
DOCUMENT_CHARACTERS = 12_000
"""A document ends with the chapter in which it gets this long: about 3,000 tokens."""

_MAGIC = b"EC02Compressed Data File"
_TABLE = 0x58  # count of windows, then their offsets, big-endian
_CLEAR = 256  # the code that empties the dictionary
_FIRST_BITS, _MOST_BITS = 9, 16
_VERSE = re.compile(r"([1-3]?[A-Za-z]+)(\d+):(\d+) (.+)")


def documents(data: bytes) -> Iterator[RawSample]:
    """Whole chapters, a verse a line, grouped to documents of DOCUMENT_CHARACTERS and more."""
    lines: list[str] = []
    length = number = 0
    first = chapter = ""
    for line in unpack(data).splitlines():
        match = _VERSE.fullmatch(line.strip())
        if match is None:
            continue  # the title
        book, chapter_number, verse, text = match.groups()
        if (here := f"{book} {chapter_number}") != chapter:
            if length >= DOCUMENT_CHARACTERS:
                yield _document(number, first, lines)
                number, length, lines = number + 1, 0, []
            if not lines:
                first = here
            chapter = here
            lines.append(here)
        lines.append(f"{verse} {text}")
        length += len(lines[-1]) + 1
    if not lines:
        raise DataError("bible.data: holds no verses; it is not the file of bible-kjv-text 4.38")
    yield _document(number, first, lines)


def _document(number: int, first: str, lines: list[str]) -> RawSample:
    key = f"{number:05d}-{first.replace(' ', '-')}"
    return RawSample(key=key, files={"txt": "\n".join(lines).encode()})


def unpack(data: bytes) -> str:
    """The text of the windowed file. Raises DataError where it is another format."""
    if not data.startswith(_MAGIC):
        raise DataError(f"bible.data: does not begin with {_MAGIC.decode()!r}")
    try:
        (num_windows,) = struct.unpack_from(">I", data, _TABLE)
        begins = struct.unpack_from(f">{num_windows}I", data, _TABLE + 4)
    except struct.error:
        raise DataError("bible.data: is truncated") from None
    ends = (*begins[1:], len(data))
    windows = (data[begin:end] for begin, end in zip(begins, ends, strict=True))
    return b"".join(decompress(window) for window in windows).decode("latin-1")


def decompress(packed: bytes) -> bytes:
    """Undo Unix `compress` (LZW, 9 to 16 bits a code), without its three-byte header."""
    table = [bytes([byte]) for byte in range(256)] + [b""]
    out: list[bytes] = []
    bits, position, group = _FIRST_BITS, 0, 0
    previous: bytes | None = None
    while position + bits <= len(packed) * 8:
        word = int.from_bytes(packed[position >> 3 : (position >> 3) + 4], "little")
        code = (word >> (position & 7)) & ((1 << bits) - 1)
        position += bits
        if code == _CLEAR:
            position = group = _next_group(position, group, bits)
            del table[_CLEAR + 1 :]
            bits, previous = _FIRST_BITS, None
            continue
        if code < len(table):
            entry = table[code]
        elif code == len(table) and previous is not None:
            entry = previous + previous[:1]
        else:
            raise DataError("bible.data: is damaged: a code that no dictionary holds")
        out.append(entry)
        if previous is not None and len(table) < 1 << _MOST_BITS:
            table.append(previous + entry[:1])
            if len(table) == 1 << bits and bits < _MOST_BITS:
                position = group = _next_group(position, group, bits)
                bits += 1
        previous = entry
    return b"".join(out)


def _next_group(position: int, group: int, bits: int) -> int:
    """Codes are written eight at a time; a change of width wastes the rest of the eight."""
    return group + -(-(position - group) // (bits * 8)) * (bits * 8)
