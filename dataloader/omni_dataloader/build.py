"""Make a source: samples to WebDataset shards, shards to an index, both to S3.

Shards of anyone's making can be indexed. The same samples always give the same bytes.
"""

import io
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO

import numpy as np

from omni_contract.errors import DataError, StorageError
from omni_contract.spec_model import Modality
from omni_dataloader.decode import audio_size, check_audio, decode_image, decode_text, image_size
from omni_dataloader.index import (
    MANIFEST_NAME,
    SAMPLES_NAME,
    CorruptSample,
    Manifest,
    ShardInfo,
    SourceIndex,
    dump_records,
    record_dtype,
)
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer

SHARD_BYTES = 64 * 2**20
"""A new shard begins once the last one is this large."""

PartRecord = tuple[int, int, int, tuple[int, int]]
"""Offset, length, CRC-32 and raw size, as in `index.record_dtype`."""

_BLOCK = 512  # of the tar format
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSample:
    """A sample to be written: file contents by extension under one key."""

    key: str
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file in a shard."""

    offset: int
    length: int


@dataclass(slots=True, kw_only=True)
class TarSample:
    """A run of files in a shard that share a key."""

    key: str
    begin: int
    """First byte, extended headers of the first file included."""
    members: dict[str, Member] = field(default_factory=dict)
    """By extension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardScan:
    """What lies in a tar file."""

    samples: list[TarSample]
    end: int
    """First byte behind the last sample."""
    damage: str | None
    """Why the scan stopped before the archive's end; the last sample is then left out."""


def write_shards(
    samples: Iterable[RawSample], folder: Path, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Write samples to `shard-000000.tar` and so on, each with its `.tar.idx`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    current: tarfile.TarFile | None = None
    begins: list[int] = []
    try:
        for sample in samples:
            if current is None or current.offset >= shard_bytes:
                _close(current, begins)
                current = None
                path = folder / f"shard-{len(paths):06d}.tar"
                # GNU headers: names of any length and script without a clock or a process id.
                current = tarfile.open(path, "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
                paths.append(path)
                begins = []
            begins.append(current.offset)
            for extension, data in sample.files.items():
                info = tarfile.TarInfo(f"{sample.key}.{extension}")  # mtime 0, owner 0
                info.size = len(data)
                current.addfile(info, io.BytesIO(data))
    finally:
        _close(current, begins)
    return paths


def _close(tar: tarfile.TarFile | None, begins: list[int]) -> None:
    if tar is None:
        return
    end = tar.offset
    tar.close()
    assert isinstance(tar.name, str)
    _write_tar_index(Path(tar.name), [*begins, end])


def _write_tar_index(shard: Path, offsets: list[int]) -> None:
    """Energon's index: where each sample begins, then the end, as little-endian u64."""
    shard.with_name(shard.name + ".idx").write_bytes(np.asarray(offsets, "<u8").tobytes())


def scan_shard(path: Path) -> ShardScan:
    """List the samples of a tar file, as WebDataset groups files: by name up to the first dot."""
    samples: list[TarSample] = []
    end = 0
    is_cut = False
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return ShardScan(samples=[], end=0, damage="is an object of zero bytes")
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
            # tar.next() instead of iteration, so that the end reached is the end believed.
            while (info := tar.next()) is not None:
                if is_cut := info.offset_data + info.size > size:
                    break
                end = info.offset_data + -(-info.size // _BLOCK) * _BLOCK
                if info.isreg():
                    _add(samples, info)
        except (tarfile.TarError, OSError):
            pass  # no header where one must be: the missing end mark tells
        file.seek(end)
        mark = file.read(_BLOCK)
    if mark == bytes(_BLOCK):
        return ShardScan(samples=samples, end=end, damage=None)
    if samples:
        end = samples.pop().begin  # it may lack files
    what = "is cut short" if is_cut or len(mark) < _BLOCK else "holds what is no tar header"
    return ShardScan(samples=samples, end=end, damage=f"{what} behind byte {end} of {size}")


def _add(samples: list[TarSample], info: tarfile.TarInfo) -> None:
    folder, _, base = info.name.rpartition("/")
    stem, _, extension = base.partition(".")
    key = f"{folder}/{stem}" if folder else stem
    if not samples or samples[-1].key != key:
        samples.append(TarSample(key=key, begin=info.offset))
    samples[-1].members[extension.lower()] = Member(offset=info.offset_data, length=info.size)


@dataclass(slots=True, kw_only=True)
class Indexer:
    """Reads shards and collects the records of their samples.

    A bad sample raises DataError that names shard and sample, or with `skip_bad` is counted and
    left out. `verify` decodes every picture and recording instead of reading its header alone.
    """

    parts: Mapping[str, Modality]
    tokenizer: TextTokenizer
    skip_bad: bool = False
    verify: bool = True
    skipped: Counter[str] = field(default_factory=Counter)
    """Bad samples by reason."""
    messages: list[str] = field(default_factory=list)
    """One sentence for each bad sample."""
    _shards: list[ShardInfo] = field(default_factory=list)
    _keys: list[str] = field(default_factory=list)
    _rows: list[tuple[int, list[PartRecord]]] = field(default_factory=list)
    _verified: set[tuple[int, int]] = field(default_factory=set)

    def add(self, path: Path, *, name: str | None = None) -> None:
        """Read one shard; `name` is what messages call its folder, if not the path's."""
        shown = name or str(path)
        scan = scan_shard(path)
        if scan.damage is not None:
            self._bad(shown, "in a truncated or damaged shard", f"the shard {scan.damage}")
        with path.open("rb") as file:
            for sample in scan.samples:
                self._add_sample(file, sample, f"{shown}: sample {sample.key!r}")
            file.seek(0)
            digest = sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            size = file.tell()
        self._shards.append(ShardInfo(name=path.name, size_bytes=size, sha256=digest.hexdigest()))
        _write_tar_index(path, [*(s.begin for s in scan.samples), scan.end])

    def finish(self, folder: Path) -> Manifest:
        """Write index.npy, then index.json. Raises DataError for a source without samples."""
        if not self._rows:
            raise DataError(
                f"{folder}: the source is empty: no usable sample in {len(self._shards)} shards"
                + "".join(f"; {n} {why}" for why, n in sorted(self.skipped.items()))
            )
        parts = dict(sorted(self.parts.items()))
        key_bytes = max(len(key.encode()) for key in self._keys)
        records = np.zeros(len(self._rows), record_dtype(parts, key_bytes=key_bytes))
        records["key"] = [key.encode() for key in self._keys]
        records["shard"] = [shard for shard, _ in self._rows]
        for column, extension in enumerate(parts):
            records[f"part.{extension}"] = [row[column] for _, row in self._rows]
        raw = dump_records(records)
        manifest = Manifest(
            parts=parts,
            num_samples=len(records),
            samples_sha256=sha256(raw).hexdigest(),
            tokenizer_hash=self.tokenizer.hash,
            shards=self._shards,
            skipped=dict(sorted(self.skipped.items())),
        )
        _replace(folder / SAMPLES_NAME, raw)
        _replace(folder / MANIFEST_NAME, manifest.model_dump_json(indent=1).encode())
        return manifest

    def _add_sample(self, file: IO[bytes], sample: TarSample, shown: str) -> None:
        row: list[PartRecord] = []
        for extension, modality in sorted(self.parts.items()):
            member = sample.members.get(extension)
            if member is None:
                have = ", ".join(sorted(sample.members))
                self._bad(shown, f"without {extension}", f"has no {extension}, only {have}")
                return
            if member.length == 0:
                self._bad(shown, f"with an empty {extension}", f"its {extension} has zero bytes")
                return
            file.seek(member.offset)
            data = file.read(member.length)
            checksum = zlib.crc32(data)
            try:
                size = self._raw_size(data, modality, checksum)
            except CorruptSample as exc:
                self._bad(shown, f"with a corrupt {extension}", str(exc))
                return
            row.append((member.offset, member.length, checksum, size))
        self._keys.append(sample.key)
        self._rows.append((len(self._shards), row))

    def _raw_size(self, data: bytes, modality: Modality, checksum: int) -> tuple[int, int]:
        if modality is Modality.TEXT:
            text = decode_text(data)
            return len(text), self.tokenizer.count([text])[0]
        seen = (checksum, len(data))  # a picture recurs with many captions
        must_decode = self.verify and seen not in self._verified
        if modality is Modality.IMAGE:
            if must_decode:
                decode_image(data)
            size = image_size(data)
        else:
            size = check_audio(data) if must_decode else audio_size(data)
        self._verified.add(seen)
        return size

    def _bad(self, shown: str, reason: str, message: str) -> None:
        if not self.skip_bad:
            raise DataError(f"{shown}: {message}; mend it, or leave such samples out by --skip-bad")
        self.skipped[reason] += 1
        self.messages.append(f"{shown}: {message}")


def index_folder(folder: Path, indexer: Indexer) -> Manifest:
    """Index the shards of a local folder, in the order of their names."""
    shards = sorted(folder.glob("*.tar"))
    if not shards:
        raise DataError(f"{folder}: the source is empty: there is no *.tar file")
    for path in shards:
        indexer.add(path)
    return indexer.finish(folder)


def index_source(store: Store, uri: str, scratch: Path, indexer: Indexer) -> Manifest:
    """Index shards that lie in S3 already, in place; one at a time passes through `scratch`."""
    shards = [info.uri for info in store.list(uri) if info.uri.endswith(".tar")]
    if not shards:
        raise DataError(f"{uri}: the source is empty: there is no *.tar object under it")
    for shard in shards:
        name = shard.removeprefix(f"{uri}/")
        if "/" in name:
            raise DataError(f"{shard}: lies in a subfolder; index each folder as its own source")
        path = scratch / name
        try:
            store.read_file(shard, path)
            indexer.add(path, name=shard)
            store.write_file(f"{shard}.idx", path.with_name(name + ".idx"))
        finally:
            path.unlink(missing_ok=True)
    manifest = indexer.finish(scratch)
    store.write_file(f"{uri}/{SAMPLES_NAME}", scratch / SAMPLES_NAME)
    store.write_file(f"{uri}/{MANIFEST_NAME}", scratch / MANIFEST_NAME)
    return manifest


def upload_source(
    store: Store, folder: Path, uri: str, *, report: Callable[[int], None] = lambda _: None
) -> bool:
    """Upload a built source; False when it is there already, byte for byte: all of it is read back.

    index.json goes last, so a reader never meets an index of shards that are not there yet. Older
    shards that the new index does not name are deleted after it. `report` gets bytes uploaded.
    """
    manifest = Manifest.model_validate_json((folder / MANIFEST_NAME).read_bytes())
    if _is_uploaded(store, manifest, folder, uri):
        return False
    keep = {MANIFEST_NAME, SAMPLES_NAME}
    for shard in manifest.shards:
        for name in (shard.name, f"{shard.name}.idx"):
            store.write_file(f"{uri}/{name}", folder / name)
            keep.add(name)
        report(shard.size_bytes)
    for name in (SAMPLES_NAME, MANIFEST_NAME):
        store.write_file(f"{uri}/{name}", folder / name)
    for info in store.list(uri):
        name = info.uri.removeprefix(f"{uri}/")
        if name.endswith((".tar", ".tar.idx")) and name not in keep:
            store.delete(info.uri)
    return True


def _is_uploaded(store: Store, manifest: Manifest, folder: Path, uri: str) -> bool:
    try:
        there = SourceIndex.load(store, uri)
        there.check_shards(store)
        # Sizes and index tell nothing of a shard whose bytes were changed.
        return there.fingerprint == manifest.fingerprint and all(
            sha256(store.read(f"{uri}/{shard.name}")).hexdigest() == shard.sha256
            and store.read(f"{uri}/{shard.name}.idx") == (folder / f"{shard.name}.idx").read_bytes()
            for shard in manifest.shards
        )
    except (DataError, StorageError, FileNotFoundError):
        return False  # what keeps it from being read may keep it from being written, and says so


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(path.name + ".tmp")
    partial.write_bytes(data)
    partial.replace(path)
