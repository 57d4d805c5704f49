"""Opening a job's sources: what is wrong is said at the start, with field, file and way out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omni_contract.errors import OmniError
from omni_contract.spec import JobSpec
from omni_contract.spec_model import Modality
from omni_dataloader.build import Indexer, RawSample, index_folder, upload_source, write_shards
from omni_dataloader.sources import open_data
from omni_dataloader.store import Store
from tests.dataloader.serving import NAMES, plan_of
from tests.fakes.sources import RECORDING, FakeSources, fake_samples

Spec = dict[str, Any]


def raw_spec(uri: str) -> Spec:
    return plan_of(uri).spec.model_dump(mode="json", by_alias=True)


def no_bucket(spec: Spec) -> None:
    spec["data"]["sources"]["books"]["uri"] = "s3://not-there/books"


def wrong_key(spec: Spec) -> None:
    spec["data"]["sources"]["books"]["uri"] = "s3://serve/nothing/books"


def no_tokenizer(spec: Spec) -> None:
    spec["model"]["llm"]["tokenizer"] = "s3://serve/nothing.json"


def small_vocabulary(spec: Spec) -> None:
    spec["model"]["llm"]["vocabSize"] = 100


def wrong_part(spec: Spec) -> None:
    spec["data"]["sources"]["drawings"]["parts"]["image"] = "jpg"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_bucket, r"s3://not-there: there is no such bucket"),
        (wrong_key, r"s3://serve/nothing/books/index\.json: missing"),
        (no_tokenizer, r"s3://serve/nothing\.json: there is no such object"),
        (small_vocabulary, r"spec\.model\.llm\.vocabSize: 100 is smaller than the \d+ tokens"),
        (wrong_part, r"drawings: has no part {image: jpg}; its parts are {image: png"),
    ],
)
def test_a_wrong_source_is_named(
    shared_store: Store, uri: str, change: Callable[[Spec], None], message: str
) -> None:
    spec = raw_spec(uri)
    change(spec)
    with pytest.raises(OmniError, match=message):
        open_data(JobSpec.parse(spec), shared_store)


def test_c20_a_truncated_shard_is_named(shared_store: Store, fakes: FakeSources) -> None:
    fakes.upload(shared_store, "s3://serve/cut")
    shard = "s3://serve/cut/speech/shard-000000.tar"
    shared_store.write(shard, shared_store.read(shard)[:-1000])
    with pytest.raises(OmniError, match=rf"{shard}: has \d+ bytes.*truncated"):
        open_data(JobSpec.parse(raw_spec("s3://serve/cut")), shared_store)


def test_a_source_of_which_no_sample_fits_is_refused(
    shared_store: Store, fakes: FakeSources, uri: str, tmp_path: Path
) -> None:
    samples = (
        RawSample(key=sample.key, files={**sample.files, "txt": b"frog boat hill sea " * 90})
        for sample in fake_samples(RECORDING, num_samples=10, seed=0)
    )
    write_shards(samples, tmp_path / "long", shard_bytes=10**6)
    index_folder(tmp_path / "long", Indexer(parts=RECORDING, tokenizer=fakes.tokenizer))
    upload_source(shared_store, tmp_path / "long", "s3://serve/long")
    spec = raw_spec(uri)
    spec["data"]["sources"]["speech"]["uri"] = "s3://serve/long"
    with pytest.raises(OmniError, match=r"data\.sources\.speech: none of its 10 samples can be"):
        open_data(JobSpec.parse(spec), shared_store)


def test_samples_longer_than_a_sequence_are_left_out_and_the_rest_is_kept(
    shared_store: Store, uri: str
) -> None:
    spec = raw_spec(uri)
    spec["batch"] |= {"sequenceTokens": 40}
    opened = {s.name: s for s in open_data(JobSpec.parse(spec), shared_store).sources}
    table = opened["pictures"].table
    assert 0 < len(table.rows) < len(table.tokens)
    assert table.tokens[table.rows].max() <= 40
    assert len(opened["books"].table.rows) == 60  # texts are cut, never left out


def test_oversize_skip_leaves_large_pictures_out(shared_store: Store, uri: str) -> None:
    spec = raw_spec(uri)
    spec["model"]["encoders"]["image"] |= {"maxPatches": 64}
    shrunk = open_data(JobSpec.parse(spec), shared_store).sources[NAMES.index("pictures")]
    spec["model"]["encoders"]["image"] |= {"oversize": "skip"}
    skipped = open_data(JobSpec.parse(spec), shared_store).sources[NAMES.index("pictures")]
    assert len(skipped.table.rows) < len(shrunk.table.rows) == 60


def test_the_template_s_order_decides_where_media_lie(shared_store: Store, uri: str) -> None:
    spec = raw_spec(uri)
    first = open_data(JobSpec.parse(spec), shared_store).sources[NAMES.index("pictures")].table
    spec["data"]["sources"]["pictures"]["template"] = "{text}<image>"
    source = open_data(JobSpec.parse(spec), shared_store).sources[NAMES.index("pictures")]
    (media,) = source.table.media
    assert media.modality is Modality.IMAGE
    assert (media.first == source.index.parts["txt"].text_tokens).all()
    assert (first.media[0].first == 0).all()
    assert (source.table.tokens == first.tokens).all()
    assert source.table.fingerprint != first.fingerprint
