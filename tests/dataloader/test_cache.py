"""Small sources are fetched once; large ones exactly."""

import numpy as np
import pytest

from omni_dataloader.cache import CachedReader, small_shards
from omni_dataloader.index import SourceIndex
from omni_dataloader.sources import open_data
from omni_dataloader.store import Store
from tests.dataloader.serving import NAMES, plan_of


@pytest.fixture
def indexes(shared_store: Store, uri: str) -> list[SourceIndex]:
    return [source.index for source in open_data(plan_of(uri).spec, shared_store).sources]


def shard_bytes(index: SourceIndex) -> int:
    return sum(shard.size_bytes for shard in index.manifest.shards)


def test_the_smallest_sources_are_kept_as_far_as_the_limit_goes(
    indexes: list[SourceIndex],
) -> None:
    sizes = sorted((shard_bytes(index), name) for index, name in zip(indexes, NAMES, strict=True))
    limit = sizes[0][0] + sizes[1][0]
    kept = {uri.split("/")[-2] for uri in small_shards(indexes, limit)}
    assert kept == {name for _, name in sizes[:2]}
    assert not small_shards(indexes, 0)
    everything = small_shards(indexes, 2**40)
    assert len(everything) == sum(len(index.manifest.shards) for index in indexes)


def test_a_kept_source_gives_the_same_bytes_and_fetches_each_once(s3: Store, bucket: str) -> None:
    uri = f"{bucket}/shard-000000.tar"
    data = np.random.default_rng(0).bytes(3 * 2**20 + 12_345)
    s3.write(uri, data)
    reader = CachedReader(s3, frozenset([uri]))
    before = s3.fetched_bytes
    parts = [(5, 100), (2**20 - 10, 20), (0, 0), (10, 3 * 2**20), (3 * 2**20, 12_345)]
    for _ in range(3):
        got = reader.read_ranges(uri, parts)
        assert [bytes(part) for part in got] == [data[o : o + n] for o, n in parts]
    assert s3.fetched_bytes - before == len(data)
    past_the_end = reader.read_ranges(uri, [(len(data) - 10, 50)])
    assert bytes(past_the_end[0]) == data[-10:]


def test_a_large_source_is_read_by_exact_ranges(s3: Store, bucket: str) -> None:
    uri = f"{bucket}/shard-000000.tar"
    s3.write(uri, bytes(2**20))
    reader = CachedReader(s3, frozenset())
    before = s3.fetched_bytes
    reader.read_ranges(uri, [(5, 100), (900_000, 20)])
    assert s3.fetched_bytes - before == 120
