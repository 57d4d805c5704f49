"""Shards and their index: the same bytes each time, and every kind of damage named (C20, C22)."""

import io
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest

from omni_contract.errors import DataError
from omni_contract.spec_model import Modality
from omni_dataloader.build import (
    Indexer,
    RawSample,
    index_folder,
    index_source,
    scan_shard,
    upload_source,
    write_shards,
)
from omni_dataloader.index import SourceIndex, parse_manifest
from omni_dataloader.store import Store
from omni_dataloader.tokenizer import TextTokenizer
from tests.fakes.sources import PICTURE, fake_samples, fake_tokenizer, make_sources

NUM = 8


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(fake_tokenizer())


def build(
    folder: Path, tokenizer: TextTokenizer, samples: list[RawSample], *, skip_bad: bool = False
) -> Indexer:
    write_shards(samples, folder)
    indexer = Indexer(parts=PICTURE, tokenizer=tokenizer, skip_bad=skip_bad)
    index_folder(folder, indexer)
    return indexer


def some(num_samples: int = NUM) -> list[RawSample]:
    return list(fake_samples(PICTURE, num_samples=num_samples, seed=0))


def load(folder: Path) -> SourceIndex:
    """The index of a local folder."""
    manifest = parse_manifest((folder / "index.json").read_bytes(), str(folder))
    return SourceIndex.of("s3://b/p", manifest, (folder / "index.npy").read_bytes())


def refused_and_skipped(
    folder: Path, tokenizer: TextTokenizer, *, shard: str, says: str, left: int, reason: str
) -> None:
    """Damage is an error that names its place, or with --skip-bad counted and left out."""
    with pytest.raises(DataError, match=says) as caught:
        index_folder(folder, Indexer(parts=PICTURE, tokenizer=tokenizer))
    assert shard in str(caught.value) and "--skip-bad" in str(caught.value)
    indexer = Indexer(parts=PICTURE, tokenizer=tokenizer, skip_bad=True)
    manifest = index_folder(folder, indexer)
    assert manifest.num_samples == left
    assert manifest.skipped == {reason: 1} and len(indexer.messages) == 1
    assert len(load(folder)) == left


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_sources(tmp_path / name, num_samples=10)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) > 16
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file


def test_the_index_points_at_the_very_bytes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    samples = some()
    write_shards(samples, tmp_path, shard_bytes=2000)
    manifest = index_folder(tmp_path, Indexer(parts=PICTURE, tokenizer=tokenizer))
    assert len(manifest.shards) > 1
    index = load(tmp_path)
    assert [key.decode() for key in index.keys] == [sample.key for sample in samples]
    for row, sample in enumerate(samples):
        shard = (tmp_path / manifest.shards[index.shard[row]].name).read_bytes()
        for extension, part in index.parts.items():
            begin = int(part.offset[row])
            data = shard[begin : begin + int(part.length[row])]
            assert data == sample.files[extension]
            index.check_part(row, part, data)
        text = sample.files["txt"].decode()
        assert index.parts["txt"].text_tokens[row] == len(tokenizer.encode(text))


def test_offsets_are_energons(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Little-endian u64: where each sample's first header block begins, then the end."""
    build(tmp_path, tokenizer, some())
    offsets = np.frombuffer((tmp_path / "shard-000000.tar.idx").read_bytes(), "<u8")
    with tarfile.open(tmp_path / "shard-000000.tar") as tar:
        members = tar.getmembers()
    assert offsets[:-1].tolist() == [m.offset for m in members if m.name.endswith(".png")]
    last = members[-1]
    assert offsets[-1] == last.offset_data + -(-last.size // 512) * 512


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_a_foreign_tar_with_long_names_and_folders(
    tmp_path: Path, tokenizer: TextTokenizer, form: int
) -> None:
    """pax `x` and GNU `L` headers belong to the sample's begin; extra files are left alone."""
    samples = some()
    with tarfile.open(tmp_path / "x.tar", "w", format=form) as tar:
        folder = tarfile.TarInfo("dir")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for number, sample in enumerate(samples):
            stem = f"dir/{'ä' * 120}{number}"
            for extension, data in {**sample.files, "meta.json": b"{}"}.items():
                info = tarfile.TarInfo(f"{stem}.{extension.upper()}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    manifest = index_folder(tmp_path, Indexer(parts=PICTURE, tokenizer=tokenizer))
    assert manifest.num_samples == NUM
    scan = scan_shard(tmp_path / "x.tar")
    raw = (tmp_path / "x.tar").read_bytes()
    types = {raw[sample.begin + 156 : sample.begin + 157] for sample in scan.samples[1:]}
    assert types == ({b"x"} if form == tarfile.PAX_FORMAT else {b"L"})
    assert {"png", "txt", "meta.json"} == set(scan.samples[1].members)


@pytest.mark.parametrize("where", ["in a file", "in a header", "between samples", "no end mark"])
def test_c20_truncated_tar(tmp_path: Path, tokenizer: TextTokenizer, where: str) -> None:
    build(tmp_path, tokenizer, some())
    shard = tmp_path / "shard-000000.tar"
    scan = scan_shard(shard)
    last = scan.samples[-1]
    cut = {
        "in a file": last.members["png"].offset + 5,
        "in a header": last.begin + 100,
        "between samples": last.begin,
        "no end mark": scan.end,
    }[where]
    shard.write_bytes(shard.read_bytes()[:cut])
    scan = scan_shard(shard)
    assert scan.damage is not None and "cut short" in scan.damage
    assert len(scan.samples) in (NUM - 1, NUM - 2)
    refused_and_skipped(
        tmp_path,
        tokenizer,
        shard="shard-000000.tar",
        says="cut short behind byte",
        left=len(scan.samples),
        reason="in a truncated or damaged shard",
    )


def test_c20_damaged_header_in_the_middle(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Python's tarfile stops there without a word, as if the archive ended."""
    build(tmp_path, tokenizer, some())
    shard = tmp_path / "shard-000000.tar"
    raw = bytearray(shard.read_bytes())
    begin = scan_shard(shard).samples[4].begin
    raw[begin : begin + 512] = b"\x07" * 512
    shard.write_bytes(raw)
    refused_and_skipped(
        tmp_path,
        tokenizer,
        shard="shard-000000.tar",
        says="no tar header",
        left=3,
        reason="in a truncated or damaged shard",
    )


@pytest.mark.parametrize(
    ("files", "says", "reason"),
    [
        ({"png": None}, "has no png, only txt", "without png"),
        ({"txt": None}, "has no txt, only png", "without txt"),
        ({"png": b""}, "its png has zero bytes", "with an empty png"),
        ({"txt": b""}, "its txt has zero bytes", "with an empty txt"),
        ({"png": b"GIF no"}, "the picture cannot be read", "with a corrupt png"),
        ({"txt": b"\xff\xff"}, "no UTF-8", "with a corrupt txt"),
    ],
    ids=["no picture", "no text", "empty picture", "empty text", "corrupt picture", "bad text"],
)
def test_c20_bad_sample(
    tmp_path: Path,
    tokenizer: TextTokenizer,
    files: dict[str, bytes | None],
    says: str,
    reason: str,
) -> None:
    samples = some()
    changed = {**samples[3].files, **files}
    kept = {ext: data for ext, data in changed.items() if data is not None}
    samples[3] = RawSample(key=samples[3].key, files=kept)
    write_shards(samples, tmp_path)
    refused_and_skipped(
        tmp_path,
        tokenizer,
        shard="shard-000000.tar: sample '000003'",
        says=says,
        left=NUM - 1,
        reason=reason,
    )


def test_c20_picture_whose_body_is_damaged(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """The header is right, so only decoding finds it."""
    samples = some()
    png = bytearray(samples[3].files["png"])
    middle = png.index(b"IDAT") + 10
    png[middle] ^= 0xFF
    samples[3] = RawSample(key=samples[3].key, files={**samples[3].files, "png": bytes(png)})
    write_shards(samples, tmp_path)
    refused_and_skipped(
        tmp_path,
        tokenizer,
        shard="sample '000003'",
        says="cannot be decoded",
        left=NUM - 1,
        reason="with a corrupt png",
    )
    by_header = Indexer(parts=PICTURE, tokenizer=tokenizer, verify=False)
    assert index_folder(tmp_path, by_header).num_samples == NUM


def test_c20_a_corrupt_picture_is_left_out_with_each_of_its_captions(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    samples = some()
    torn = samples[3].files["png"][:-40]
    for number in (3, 5):
        files = {**samples[number].files, "png": torn}
        samples[number] = RawSample(key=samples[number].key, files=files)
    indexer = build(tmp_path, tokenizer, samples, skip_bad=True)
    assert indexer.skipped == {"with a corrupt png": 2}


def test_c20_zero_byte_object(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    build(tmp_path, tokenizer, some())
    (tmp_path / "shard-000001.tar").write_bytes(b"")
    refused_and_skipped(
        tmp_path,
        tokenizer,
        shard="shard-000001.tar",
        says="zero bytes",
        left=NUM,
        reason="in a truncated or damaged shard",
    )


def test_c22_empty_source(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    indexer = Indexer(parts=PICTURE, tokenizer=tokenizer, skip_bad=True)
    with pytest.raises(DataError, match="empty: there is no"):
        index_folder(tmp_path, indexer)
    write_shards([RawSample(key="a", files={"txt": b"x"})], tmp_path)
    with pytest.raises(DataError, match="no usable sample in 1 shards; 1 without png"):
        index_folder(tmp_path, indexer)
    assert not (tmp_path / "index.json").exists()


def test_uploading_twice_changes_nothing(
    tmp_path: Path, s3: Store, bucket: str, tokenizer: TextTokenizer
) -> None:
    build(tmp_path, tokenizer, some())
    assert upload_source(s3, tmp_path, f"{bucket}/p")
    assert not upload_source(s3, tmp_path, f"{bucket}/p")
    index = SourceIndex.load(s3, f"{bucket}/p")
    index.check_shards(s3)
    shard, good = index.shard_uri(0), s3.read(index.shard_uri(0))
    torn = bytearray(good)
    torn[len(torn) // 2] ^= 1
    for name, bad in ((shard, b"short"), (shard, bytes(torn)), (f"{shard}.idx", b"no index")):
        s3.write(name, bad)
        assert upload_source(s3, tmp_path, f"{bucket}/p"), "what is damaged is uploaded again"
        assert s3.read(shard) == good
        assert s3.read(f"{shard}.idx") == (tmp_path / "shard-000000.tar.idx").read_bytes()
    s3.delete(f"{shard}.idx")
    assert upload_source(s3, tmp_path, f"{bucket}/p")
    assert not upload_source(s3, tmp_path, f"{bucket}/p")


def test_a_smaller_rebuild_leaves_no_old_shard(
    tmp_path: Path, s3: Store, bucket: str, tokenizer: TextTokenizer
) -> None:
    for name, shard_bytes in (("many", 1000), ("one", 10**9)):
        write_shards(some(), tmp_path / name, shard_bytes=shard_bytes)
        index_folder(tmp_path / name, Indexer(parts=PICTURE, tokenizer=tokenizer))
        upload_source(s3, tmp_path / name, f"{bucket}/p")
    names = [info.uri.rpartition("/")[2] for info in s3.list(f"{bucket}/p")]
    assert names == ["index.json", "index.npy", "shard-000000.tar", "shard-000000.tar.idx"]


def test_shards_in_s3_are_indexed_in_place(
    tmp_path: Path, s3: Store, bucket: str, tokenizer: TextTokenizer
) -> None:
    build(tmp_path / "local", tokenizer, some())
    s3.write_file(f"{bucket}/p/shard-000000.tar", tmp_path / "local" / "shard-000000.tar")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    index_source(s3, f"{bucket}/p", scratch, Indexer(parts=PICTURE, tokenizer=tokenizer))
    there = SourceIndex.load(s3, f"{bucket}/p")
    assert there.fingerprint == load(tmp_path / "local").fingerprint
    assert not list(scratch.glob("*.tar"))
    with pytest.raises(DataError, match=f"{bucket}/none: the source is empty"):
        index_source(s3, f"{bucket}/none", scratch, Indexer(parts=PICTURE, tokenizer=tokenizer))


def test_checksums_are_of_the_stored_bytes(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    build(tmp_path, tokenizer, some())
    index = load(tmp_path)
    assert index.parts["png"].modality is Modality.IMAGE
    assert index.parts["png"].crc32[0] == zlib.crc32(some()[0].files["png"])
