"""Small sources kept in memory, so that each of their bytes is fetched once and not every epoch.

Samples are drawn at random, so each costs a request; for a source that fits into memory, blocks
are fetched instead and kept. Large sources are read by exact ranges: there a block would be
thrown away before its next sample is drawn.
"""

import threading
from collections.abc import Iterable, Sequence

from omni_dataloader.index import SourceIndex
from omni_dataloader.store import Store

CACHE_BYTES = 512 * 2**20
"""Default bound of the memory for small sources."""

_BLOCK_BYTES = 2**20

Range = tuple[int, int]
"""Offset and length in bytes."""


def small_shards(indexes: Iterable[SourceIndex], limit_bytes: int) -> frozenset[str]:
    """Addresses of the shards of all sources that fit into the limit together, smallest first."""
    sizes = {
        index.uri: (sum(s.size_bytes for s in index.manifest.shards), index) for index in indexes
    }
    chosen: set[str] = set()
    for size, index in sorted(sizes.values(), key=lambda item: (item[0], item[1].uri)):
        if size > limit_bytes:
            break
        limit_bytes -= size
        chosen.update(f"{index.uri}/{shard.name}" for shard in index.manifest.shards)
    return frozenset(chosen)


class CachedReader:
    """Ranges of shards, those of small sources out of kept blocks. Safe for several threads."""

    def __init__(self, store: Store, small: frozenset[str]) -> None:
        self._store = store
        self._small = small
        self._blocks: dict[tuple[str, int], memoryview] = {}
        self._lock = threading.Lock()

    def read_ranges(self, uri: str, ranges: Sequence[Range]) -> list[memoryview]:
        """The ranges of an object, in the order asked for; one past the end comes back short."""
        if uri not in self._small:
            return self._store.read_ranges(uri, ranges)
        wanted = {block for part in ranges for block in _blocks_of(part)}
        with self._lock:
            missing = sorted(block for block in wanted if (uri, block) not in self._blocks)
        # Two threads may fetch the same block; that costs less than one waiting for the other.
        fetched = self._store.read_ranges(
            uri, [(block * _BLOCK_BYTES, _BLOCK_BYTES) for block in missing]
        )
        with self._lock:
            for block, data in zip(missing, fetched, strict=True):
                self._blocks[uri, block] = data
            return [self._cut(uri, part) for part in ranges]

    def _cut(self, uri: str, part: Range) -> memoryview:
        blocks = [self._blocks[uri, block] for block in _blocks_of(part)]
        data = blocks[0] if len(blocks) == 1 else memoryview(b"".join(blocks))
        begin = part[0] % _BLOCK_BYTES
        return data[begin : begin + part[1]]


def _blocks_of(part: Range) -> range:
    offset, length = part
    return range(offset // _BLOCK_BYTES, (offset + max(length, 1) - 1) // _BLOCK_BYTES + 1)
