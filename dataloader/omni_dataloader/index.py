"""The index of a source: where each sample's parts lie and how large they are once decoded.

A source is an S3 folder of WebDataset shards, `shard-000000.tar` and so on, each with an
Energon-compatible `.tar.idx`. Beside them lie `index.json` (what the source is) and `index.npy`
(one record a sample), so the whole sample plan is made from two GETs, without opening a shard.
"""

import hashlib
import io
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_contract.errors import DataError, OmniError, StorageError, UnavailableError
from omni_contract.spec_model import Modality
from omni_dataloader.store import Store

INDEX_VERSION = 1
MANIFEST_NAME = "index.json"
SAMPLES_NAME = "index.npy"
AGAIN = "index the source again with `omni data index`"

Ints = NDArray[np.int64]


class CorruptSample(OmniError):
    """The content of one sample cannot be used; the job's policy decides what follows."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardInfo(_Model):
    """One tar file of a source."""

    name: str
    """File name inside the source's folder."""
    size_bytes: int
    sha256: str


class Manifest(_Model):
    """`index.json`: what a source is. The records of its samples are in `index.npy`."""

    version: Literal[1] = 1
    parts: dict[Annotated[str, Field(pattern=r"^[a-z0-9.]+$")], Modality]
    """Modality of each file of a sample by extension, such as {png: image, txt: text}."""
    num_samples: int
    samples_sha256: str
    """Of `index.npy`, byte for byte."""
    tokenizer_hash: str
    """SHA-256 of the tokenizer.json under which text tokens were counted."""
    shards: list[ShardInfo]
    skipped: dict[str, int] = {}
    """Samples in the shards that the index leaves out, by reason."""

    @property
    def fingerprint(self) -> str:
        """Identity of the source: equal exactly when shards, samples and token counts are."""
        document = self.model_dump(mode="json", exclude={"skipped"})
        canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def record_dtype(parts: Mapping[str, Modality], *, key_bytes: int) -> np.dtype[np.void]:
    """The record of a sample in `index.npy`, little-endian.

    `key`: the sample's name in the tar. `shard`: number in the manifest's list. Then for each
    part, ascending by extension: `offset` and `length` in bytes in the shard, CRC-32 of these
    bytes, and two raw sizes: image (width, height) in pixels; audio (samples of one channel,
    samples per second); text (characters, tokens without the end token).
    """
    part = np.dtype([("offset", "<u8"), ("length", "<u8"), ("crc32", "<u4"), ("size", "<u4", (2,))])
    fields = [("key", f"S{max(1, key_bytes)}"), ("shard", "<u4")]
    return np.dtype([*fields, *((f"part.{ext}", part) for ext in sorted(parts))])


@dataclass(frozen=True, slots=True, kw_only=True)
class PartIndex:
    """One part of all samples of a source. All arrays have one entry a sample."""

    extension: str
    modality: Modality
    offset: Ints
    """First byte in the shard."""
    length: Ints
    """Bytes in the shard."""
    crc32: NDArray[np.uint32]
    """Of these bytes."""
    size: Ints
    """[n, 2]: image (width, height) in pixels; audio (samples of one channel, samples per
    second); text (characters, tokens without the end token)."""

    @property
    def width(self) -> Ints:
        """Pixels of a picture."""
        return self.size[:, 0]

    @property
    def height(self) -> Ints:
        """Pixels of a picture."""
        return self.size[:, 1]

    @property
    def num_samples(self) -> Ints:
        """Samples of one channel of a recording, at its own rate."""
        return self.size[:, 0]

    @property
    def sample_rate(self) -> Ints:
        """Samples per second of a recording."""
        return self.size[:, 1]

    @property
    def text_tokens(self) -> Ints:
        """Tokens of a text, without the end token."""
        return self.size[:, 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIndex:
    """A source as the sample plan sees it. An index that exists has at least one sample."""

    uri: str
    manifest: Manifest
    keys: NDArray[np.bytes_]
    """Name of each sample in its tar."""
    shard: Ints
    """Number of each sample's shard in `manifest.shards`."""
    parts: Mapping[str, PartIndex]
    """By extension."""

    @classmethod
    def load(cls, store: Store, uri: str) -> Self:
        """Read and check both index objects. Raises DataError naming the file and the rule."""
        found = f"{uri}/{MANIFEST_NAME}"
        if not store.exists(found):
            raise DataError(f"{found}: missing, so {uri} is no indexed source; {AGAIN}")
        manifest = parse_manifest(store.read(found), found)
        try:
            raw = store.read(f"{uri}/{SAMPLES_NAME}")
        except UnavailableError:
            raise
        except StorageError as exc:
            raise DataError(f"{exc}; {AGAIN}") from None
        return cls.of(uri, manifest, raw)

    @classmethod
    def of(cls, uri: str, manifest: Manifest, raw: bytes) -> Self:
        """Unpack the bytes of `index.npy` under their manifest."""
        records = _parse_records(raw, manifest, f"{uri}/{SAMPLES_NAME}")
        if not len(records):
            raise DataError(
                f"{uri}: the source is empty: {len(manifest.shards)} shards, no usable sample"
                f"{_listed(manifest.skipped)}"
            )
        parts = {
            ext: PartIndex(
                extension=ext,
                modality=modality,
                offset=records[f"part.{ext}"]["offset"].astype(np.int64),
                length=records[f"part.{ext}"]["length"].astype(np.int64),
                crc32=records[f"part.{ext}"]["crc32"].copy(),
                size=records[f"part.{ext}"]["size"].astype(np.int64),
            )
            for ext, modality in manifest.parts.items()
        }
        shard = records["shard"].astype(np.int64)
        if shard.max() >= len(manifest.shards):
            raise DataError(
                f"{uri}/{SAMPLES_NAME}: names shard {shard.max()} of "
                f"{len(manifest.shards)}; {AGAIN}"
            )
        return cls(uri=uri, manifest=manifest, keys=records["key"].copy(), shard=shard, parts=parts)

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def fingerprint(self) -> str:
        """Identity of the source, see `Manifest.fingerprint`."""
        return self.manifest.fingerprint

    def part(self, extension: str, modality: Modality) -> PartIndex:
        """The part a job asks for. Raises DataError where the source has none such."""
        part = self.parts.get(extension)
        if part is None or part.modality is not modality:
            have = ", ".join(f"{m}: {ext}" for ext, m in sorted(self.manifest.parts.items()))
            raise DataError(
                f"{self.uri}: has no part {{{modality}: {extension}}}; its parts are {{{have}}}"
            )
        return part

    def check_tokenizer(self, tokenizer_hash: str) -> None:
        """Raise DataError unless text tokens were counted under this tokenizer."""
        if self.manifest.tokenizer_hash != tokenizer_hash:
            raise DataError(
                f"{self.uri}: its text tokens were counted under tokenizer "
                f"{self.manifest.tokenizer_hash[:12]}, the job's is {tokenizer_hash[:12]}; "
                f"{AGAIN}, or name the tokenizer it was indexed with in model.llm.tokenizer"
            )

    def check_shards(self, store: Store) -> None:
        """Compare all shards with one listing. Raises DataError for one missing or cut short."""
        sizes = {info.uri: info.size_bytes for info in store.list(self.uri)}
        for shard in self.manifest.shards:
            check_shard_size(f"{self.uri}/{shard.name}", shard.size_bytes, sizes)

    def shard_uri(self, row: int) -> str:
        """Address of the shard that holds a sample."""
        return f"{self.uri}/{self.manifest.shards[self.shard[row]].name}"

    def name(self, row: int) -> str:
        """A sample as messages name it: shard and key."""
        key = self.keys[row].decode(errors="replace")
        return f"{self.shard_uri(row)}: sample {key!r}"

    def check_part(self, row: int, part: PartIndex, data: bytes | memoryview) -> None:
        """Raise CorruptSample unless these are the bytes that were indexed."""
        if len(data) != part.length[row]:
            raise CorruptSample(
                f"{self.name(row)}: {part.extension} has {len(data)} bytes, "
                f"the index says {part.length[row]}"
            )
        if zlib.crc32(data) != part.crc32[row]:
            raise CorruptSample(
                f"{self.name(row)}: the bytes of {part.extension} do not have the indexed checksum"
            )


def check_shard_size(uri: str, expected_bytes: int, sizes: Mapping[str, int]) -> None:
    """Raise DataError unless `sizes` (address -> bytes) holds the shard at its indexed size."""
    actual = sizes.get(uri)
    if actual is None:
        raise DataError(f"{uri}: the index names this shard, but it is not there; {AGAIN}")
    if actual != expected_bytes:
        what = "truncated" if actual < expected_bytes else "another file"
        raise DataError(
            f"{uri}: has {actual} bytes, the index says {expected_bytes}, so it is {what}; "
            f"upload it again, or {AGAIN}"
        )


def dump_records(records: NDArray[np.void]) -> bytes:
    """The bytes of `index.npy`."""
    buffer = io.BytesIO()
    np.save(buffer, records, allow_pickle=False)
    return buffer.getvalue()


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """Read `index.json`. Raises DataError that names it `name`."""
    try:
        document = json.loads(raw)
    except ValueError:
        raise DataError(f"{name}: is no JSON, so it is truncated or foreign; {AGAIN}") from None
    version = document.get("version") if isinstance(document, dict) else None
    if version != INDEX_VERSION:
        raise DataError(
            f"{name}: has index version {version}, this program reads {INDEX_VERSION}; {AGAIN}"
        )
    try:
        return Manifest.model_validate(document)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{name}: {where}: {first['msg']}; {AGAIN}") from None


def _parse_records(raw: bytes, manifest: Manifest, name: str) -> NDArray[np.void]:
    if hashlib.sha256(raw).hexdigest() != manifest.samples_sha256:
        raise DataError(
            f"{name}: does not belong to {MANIFEST_NAME} beside it (another checksum), so it is "
            f"truncated or of another build; {AGAIN}"
        )
    try:
        records: NDArray[np.void] = np.load(io.BytesIO(raw), allow_pickle=False)
    except (ValueError, EOFError) as exc:
        raise DataError(f"{name}: is no array file ({exc}); {AGAIN}") from None
    key_bytes = records.dtype["key"].itemsize if "key" in (records.dtype.names or ()) else 1
    expected = record_dtype(manifest.parts, key_bytes=key_bytes)
    if records.dtype != expected or records.shape != (manifest.num_samples,):
        raise DataError(
            f"{name}: holds {records.dtype} {records.shape}, {MANIFEST_NAME} says {expected} "
            f"({manifest.num_samples},); {AGAIN}"
        )
    return records


def _listed(skipped: Mapping[str, int]) -> str:
    if not skipped:
        return ""
    return " (left out: " + ", ".join(f"{n} {why}" for why, n in sorted(skipped.items())) + ")"
