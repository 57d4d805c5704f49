"""What a reader of a source is told when its index or its shards are not what they should be."""

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from omni_contract.errors import DataError
from omni_contract.spec_model import Modality
from omni_dataloader.index import CorruptSample, SourceIndex, dump_records
from omni_dataloader.store import Store
from tests.fakes.sources import FakeSources, make_sources

Document = dict[str, object]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> FakeSources:
    return make_sources(tmp_path_factory.mktemp("sources"), num_samples=12)


@pytest.fixture
def uri(sources: FakeSources, s3: Store, bucket: str) -> str:
    sources.upload(s3, bucket)
    return f"{bucket}/pictures"


def test_an_index_round_trips_through_s3(uri: str, s3: Store, sources: FakeSources) -> None:
    index = SourceIndex.load(s3, uri)
    index.check_tokenizer(sources.tokenizer.hash)
    index.check_shards(s3)
    png = index.part("png", Modality.IMAGE)
    assert len(index) == 12 and png.width.shape == (12,)
    assert png.height.min() >= 8 and png.width.max() < 200
    [data] = s3.read_ranges(index.shard_uri(7), [(int(png.offset[7]), int(png.length[7]))])
    index.check_part(7, png, data)


def test_sources_with_the_same_samples_have_one_fingerprint(
    uri: str, s3: Store, bucket: str, tmp_path: Path
) -> None:
    again = make_sources(tmp_path, num_samples=12)
    again.upload(s3, f"{bucket}/again")
    one, two = (SourceIndex.load(s3, u) for u in (uri, f"{bucket}/again/pictures"))
    other = SourceIndex.load(s3, f"{bucket}/drawings")
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_audio_and_text_have_their_sizes(uri: str, s3: Store, bucket: str) -> None:
    index = SourceIndex.load(s3, f"{bucket}/speech")
    ogg = index.part("ogg", Modality.AUDIO)
    assert set(ogg.sample_rate.tolist()) == {22_050}
    assert ogg.num_samples.min() >= 2205
    assert index.part("txt", Modality.TEXT).text_tokens.min() > 0


@pytest.mark.parametrize(
    ("extension", "modality"), [("jpg", Modality.IMAGE), ("png", Modality.AUDIO)]
)
def test_a_part_the_source_does_not_have(
    uri: str, s3: Store, extension: str, modality: Modality
) -> None:
    with pytest.raises(DataError, match=r"pictures: has no part .*its parts are \{image: png"):
        SourceIndex.load(s3, uri).part(extension, modality)


def test_another_tokenizer_is_refused(uri: str, s3: Store) -> None:
    with pytest.raises(DataError, match=r"pictures: its text tokens .*omni data index"):
        SourceIndex.load(s3, uri).check_tokenizer("0" * 64)


def test_a_folder_without_index(s3: Store, bucket: str) -> None:
    with pytest.raises(DataError, match=r"/nothing/index\.json: missing.*omni data index"):
        SourceIndex.load(s3, f"{bucket}/nothing")


def _version(document: Document) -> Document:
    return {**document, "version": 9}


def _field(document: Document) -> Document:
    return {**document, "num_samples": "many"}


def _count(document: Document) -> Document:
    return {**document, "num_samples": 13}


@pytest.mark.parametrize(
    ("change", "says"),
    [(_version, "version 9"), (_field, "num_samples"), (_count, "index.npy: holds")],
)
def test_a_manifest_that_cannot_be_read(
    uri: str, s3: Store, change: Callable[[Document], Document], says: str
) -> None:
    document = json.loads(s3.read(f"{uri}/index.json"))
    s3.write(f"{uri}/index.json", json.dumps(change(document)).encode())
    with pytest.raises(DataError, match=says):
        SourceIndex.load(s3, uri)


def test_a_truncated_manifest(uri: str, s3: Store) -> None:
    s3.write(f"{uri}/index.json", s3.read(f"{uri}/index.json")[:-20])
    with pytest.raises(DataError, match=r"index\.json: is no JSON"):
        SourceIndex.load(s3, uri)


def test_a_truncated_or_missing_sample_table(uri: str, s3: Store) -> None:
    s3.write(f"{uri}/index.npy", s3.read(f"{uri}/index.npy")[:-1])
    with pytest.raises(DataError, match=r"index\.npy: does not belong to index\.json"):
        SourceIndex.load(s3, uri)
    s3.delete(f"{uri}/index.npy")
    with pytest.raises(DataError, match=r"index\.npy: there is no such object"):
        SourceIndex.load(s3, uri)


def test_c22_empty_source(uri: str, s3: Store) -> None:
    """Someone's writer made an index of nothing; ours refuses to."""
    index = SourceIndex.load(s3, uri)
    records = np.load(io.BytesIO(s3.read(f"{uri}/index.npy")), allow_pickle=False)
    raw = dump_records(records[:0])
    manifest = index.manifest.model_copy(
        update={
            "num_samples": 0,
            "samples_sha256": hashlib.sha256(raw).hexdigest(),
            "skipped": {"without png": 3},
        }
    )
    with pytest.raises(DataError, match=r"source is empty.*left out: 3 without png"):
        SourceIndex.of(uri, manifest, raw)


def test_c20_truncated_shard(uri: str, s3: Store) -> None:
    index = SourceIndex.load(s3, uri)
    shard = index.shard_uri(0)
    whole = s3.read(shard)
    s3.write(shard, whole[:-100])
    with pytest.raises(DataError, match=f"{shard}: has {len(whole) - 100} bytes.*{len(whole)}"):
        index.check_shards(s3)
    s3.write(shard, b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        index.check_shards(s3)
    s3.delete(shard)
    with pytest.raises(DataError, match="it is not there"):
        index.check_shards(s3)


def test_c20_corrupt_member(uri: str, s3: Store) -> None:
    index = SourceIndex.load(s3, uri)
    png = index.part("png", Modality.IMAGE)
    begin, length = int(png.offset[3]), int(png.length[3])
    raw = bytearray(s3.read(index.shard_uri(3)))
    raw[begin + length // 2] ^= 1
    s3.write(index.shard_uri(3), bytes(raw))
    index.check_shards(s3)  # the size is right
    [data] = s3.read_ranges(index.shard_uri(3), [(begin, length)])
    with pytest.raises(CorruptSample, match=r"shard-000000\.tar: sample '000003'.*checksum"):
        index.check_part(3, png, data)
    with pytest.raises(CorruptSample, match="bytes, the index says"):
        index.check_part(3, png, data[:-1])
