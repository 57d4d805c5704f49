"""Read and decode the parts of samples that a node consumes, and no others."""

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_contract.spec_model import EncoderSpec, Modality, UsmSpec, VitSpec
from omni_dataloader.cache import CACHE_BYTES, CachedReader, small_shards
from omni_dataloader.decode import audio_features, decode_text, image_patches
from omni_dataloader.index import CorruptSample, PartIndex
from omni_dataloader.sources import OpenedData
from omni_dataloader.store import Store

TEXT_CACHE_TOKENS = 16_000_000
"""Tokens of long documents kept, so that one cut over many steps is read and tokenized once."""

Part = tuple[int, int, Modality]
"""Source number, sample, modality."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInput:
    """What an encoder gets of one sample."""

    units: NDArray[np.generic]
    """Patches uint8 [R*C, 3*P*P], or log-mel frames float32 [F, B]."""
    shape: tuple[int, ...]
    """Grid (R, C), or (F,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Decoded parts of one step."""

    texts: dict[tuple[int, int], NDArray[np.int32]] = field(default_factory=dict)
    """Token ids without end token, by (source, sample)."""
    media: dict[Part, EncoderInput] = field(default_factory=dict)
    corrupt: dict[tuple[int, int], str] = field(default_factory=dict)
    """Why a sample cannot be used, by (source, sample)."""


class Fetcher:
    """Reads parts by range and decodes them on an executor. Safe to use from several threads."""

    def __init__(
        self, data: OpenedData, store: Store, executor: Executor, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._data = data
        small = small_shards((source.index for source in data.sources), cache_bytes)
        self._reader = CachedReader(store, small)
        self._executor = executor
        self._texts: OrderedDict[tuple[int, int], NDArray[np.int32]] = OrderedDict()
        self._cached_tokens = 0
        self._lock = threading.Lock()

    def fetch(self, wanted: Iterable[Part]) -> Fetched:
        """Read and decode; blocks. What cannot be decoded is reported, never raised.

        Raises StorageError where the store fails for good.
        """
        fetched = Fetched()
        missing = []
        for source, row, modality in sorted(set(wanted)):
            cached = self._kept(source, row) if modality is Modality.TEXT else None
            if cached is None:
                missing.append((source, row, modality))
            else:
                fetched.texts[source, row] = cached
        by_shard: dict[str, list[Part]] = defaultdict(list)
        for part in missing:
            by_shard[self._data.sources[part[0]].index.shard_uri(part[1])].append(part)
        raw: dict[Part, memoryview] = {}
        for shard in self._executor.map(self._read, by_shard.items()):
            raw |= shard
        for part, content in self._executor.map(self._decode, raw.items()):
            source, row, modality = part
            if isinstance(content, str):
                fetched.corrupt.setdefault((source, row), content)
            elif isinstance(content, EncoderInput):
                fetched.media[part] = content
            else:
                fetched.texts[source, row] = content
                if not self._data.sources[source].table.media:
                    self._keep(source, row, content)
        return fetched

    def _read(self, work: tuple[str, Sequence[Part]]) -> Mapping[Part, memoryview]:
        uri, parts = work
        indexes = [self._part(part) for part in parts]
        ranges = [
            (int(index.offset[row]), int(index.length[row]))
            for index, (_, row, _) in zip(indexes, parts, strict=True)
        ]
        return dict(zip(parts, self._reader.read_ranges(uri, ranges), strict=True))

    def _decode(
        self, work: tuple[Part, memoryview]
    ) -> tuple[Part, NDArray[np.int32] | EncoderInput | str]:
        part, data = work
        source, row, modality = part
        index = self._data.sources[source].index
        try:
            index.check_part(row, self._part(part), data)
            try:
                if modality is Modality.TEXT:
                    return part, self._text(part, data)
                size = tuple(self._part(part).size[row].tolist())
                return part, encoder_input(data, size, self._data.encoders[modality])
            except CorruptSample as exc:  # the decoders know neither shard nor sample
                raise CorruptSample(f"{index.name(row)}: {exc}") from None
        except CorruptSample as exc:
            return part, str(exc)

    def _text(self, part: Part, data: memoryview) -> NDArray[np.int32]:
        ids = self._data.tokenizer.encode(decode_text(data))
        indexed = int(self._part(part).text_tokens[part[1]])
        if len(ids) != indexed:
            raise CorruptSample(f"the text has {len(ids)} tokens, the index says {indexed}")
        return ids

    def _part(self, part: Part) -> PartIndex:
        source = self._data.sources[part[0]]
        return source.index.part(source.spec.parts[part[2]], part[2])

    def _kept(self, source: int, row: int) -> NDArray[np.int32] | None:
        with self._lock:
            ids = self._texts.get((source, row))
            if ids is not None:
                self._texts.move_to_end((source, row))
            return ids

    def _keep(self, source: int, row: int, ids: NDArray[np.int32]) -> None:
        with self._lock:
            if (source, row) not in self._texts:
                self._cached_tokens += len(ids)
            self._texts[source, row] = ids
            while self._cached_tokens > TEXT_CACHE_TOKENS:
                self._cached_tokens -= len(self._texts.popitem(last=False)[1])


def encoder_input(data: memoryview, size: tuple[int, ...], encoder: EncoderSpec) -> EncoderInput:
    """Decode one picture or recording for its encoder. Raises CorruptSample."""
    match encoder:
        case VitSpec():
            patches, grid = image_patches(data, size, encoder)
            return EncoderInput(units=patches, shape=grid)
        case UsmSpec():
            features = audio_features(data, size, encoder)
            return EncoderInput(units=features, shape=(len(features),))
