"""Packs a document for a ConfigMap: compressed and cut into pieces below the 1 MiB limit."""

import gzip
from collections.abc import Mapping
from pathlib import Path

from omni_contract.errors import OmniError

_PIECE_BYTES = 700_000  # base64 makes a third more of it


def pack(name: str, text: str) -> dict[str, bytes]:
    """Pieces of a text by key, `NAME.gz.000` and on. The same text gives the same bytes."""
    data = gzip.compress(text.encode(), mtime=0)
    pieces = [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]
    return {f"{name}.gz.{number:03d}": piece for number, piece in enumerate(pieces)}


def unpack(name: str, pieces: Mapping[str, bytes]) -> str:
    """The text that was packed under `name`. Raises KeyError where none was."""
    keys = sorted(key for key in pieces if key.startswith(f"{name}.gz."))
    if not keys:
        raise KeyError(name)
    return gzip.decompress(b"".join(pieces[key] for key in keys)).decode()


def read_packed(folder: Path, name: str) -> str:
    """The text packed under `name` in a mounted ConfigMap. Raises OmniError where it is not."""
    try:
        paths = [path for path in folder.iterdir() if path.name.startswith(f"{name}.gz.")]
        return unpack(name, {path.name: path.read_bytes() for path in paths})
    except (OSError, EOFError, KeyError) as exc:
        raise OmniError(
            f"{folder}: no {name} is packed there ({exc}); mount its ConfigMap"
        ) from None
