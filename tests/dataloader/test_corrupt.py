"""C20: samples that cannot be used are agreed on, named, masked and counted, or end the job."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_contract.spec_model import Modality
from omni_dataloader.fetch import Fetcher
from omni_dataloader.index import SourceIndex
from omni_dataloader.sample_plan import place_step
from omni_dataloader.select import needs, wanted_parts
from omni_dataloader.sources import open_data, plan_samples
from omni_dataloader.store import Store
from tests.dataloader.serving import (
    NAMES,
    NUM_STEPS,
    Undisturbed,
    assert_same,
    join_all,
    plan_of,
    take,
    walk,
)
from tests.fakes.sidecar_client import (
    RefusedError,
    SidecarClient,
    Step,
    services,
    sidecars,
)
from tests.fakes.sources import FakeSources


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One sample whose bytes were changed in S3, sizes unchanged."""

    uri: str
    source: str
    index: int
    step: int
    """First step that consumes it."""
    name: str
    """Shard and key."""

    def rows(self, samples: Any) -> Any:
        """Its pieces among a microbatch's."""
        number = NAMES.index(self.source)
        return np.flatnonzero((samples[:, 0] == number) & (samples[:, 2] == self.index))


def damaged(
    store: Store, fakes: FakeSources, run: Undisturbed, source: str, extension: str
) -> Damage:
    """A copy of the sources in which a sample of step 2 is damaged."""
    uri = f"s3://serve/bad-{source}-{extension}"
    fakes.upload(store, uri)
    number = NAMES.index(source)
    earlier = {tuple(r[:3]) for r in consumed(run.steps[0])}
    row = next(r for r in consumed(run.steps[1]) if r[0] == number and tuple(r[:3]) not in earlier)
    index = SourceIndex.load(store, f"{uri}/{source}")
    part = index.parts[extension]
    good = store.read(f"s3://serve/good/{source}/{index.shard_uri(row[2]).rpartition('/')[2]}")
    shard = bytearray(good)
    shard[part.offset[row[2]] + part.length[row[2]] // 2] ^= 0xFF
    store.write(index.shard_uri(row[2]), bytes(shard))
    return Damage(uri=uri, source=source, index=row[2], step=2, name=index.name(row[2]))


def consumed(ranks: list[Step]) -> list[list[int]]:
    return [r for rank in (2, 3) for m in ranks[rank].microbatches for r in m["samples"].tolist()]


@pytest.mark.parametrize(
    ("source", "extension"),
    [("pictures", "png"), ("speech", "ogg"), ("speech", "txt"), ("books", "txt")],
)
def test_c20_a_corrupt_sample_is_masked_on_all_nodes_and_counted_once(
    shared_store: Store,
    fakes: FakeSources,
    uri: str,
    tmp_path: Path,
    undisturbed: Undisturbed,
    caplog: pytest.LogCaptureFixture,
    source: str,
    extension: str,
) -> None:
    bad = damaged(shared_store, fakes, undisturbed, source, extension)
    plan = plan_of(bad.uri)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        steps = walk(clients, 1, NUM_STEPS)
        again = join_all(paths, plan, generation=1, next_step=3, state=clients[1].snapshot(2))
        assert_same(walk(again, 3, NUM_STEPS), steps[2:])  # the set is part of the state
    named = f"source={source} epoch=0 index={bad.index}: {bad.name}: the bytes of {extension}"
    assert named in caplog.text
    for number, (ranks, before) in enumerate(zip(steps, undisturbed.steps, strict=True), start=1):
        epochs = set()
        for rank, (got, good) in enumerate(zip(ranks, before, strict=True)):
            for mine, theirs in zip(got.microbatches, good.microbatches, strict=True):
                check_masked(mine, theirs, bad, rank=rank)
                epochs |= set(mine["samples"][bad.rows(mine["samples"])][:, 1].tolist())
        counts = {got.batch.corrupt_samples for got in ranks}
        assert len(counts) == 1 and counts == ({0} if number < bad.step else counts - {0})
        lost = before[0].batch.tokens_by_source[source] - ranks[0].batch.tokens_by_source[source]
        assert (lost > 0) == bool(epochs)
    assert steps[bad.step - 1][0].batch.corrupt_samples == 1


def check_masked(mine: Any, theirs: Any, bad: Damage, *, rank: int) -> None:
    """Only the damaged sample's pieces differ from the undisturbed run."""
    assert (mine["samples"] == theirs["samples"]).all()  # the plan does not change
    rows = bad.rows(mine["samples"])
    flags = mine["spans"][:, 5] == 1
    assert set(mine["spans"][flags][:, 0].tolist()) == set(rows.tolist())
    if rank >= 2:
        expected = theirs["loss_mask"].copy()
        for *_, start, count in mine["samples"][rows].tolist():
            expected[start : start + count] = False
        assert (mine["loss_mask"] == expected).all()
        assert (mine["labels"][expected] == theirs["labels"][expected]).all()
    if "image.grid" in mine:
        for modality, lengths, units in (
            (Modality.IMAGE, mine["image.grid"].prod(axis=1), mine["image.patches"]),
            (Modality.AUDIO, mine["audio.frames"], mine["audio.features"]),
        ):
            left = mine["spans"][(mine["spans"][:, 1] == modality.number) & ~flags]
            assert (lengths == left[:, 4]).all() and len(units) == left[:, 4].sum()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"action": "stop"}, r"data\.corruptSamples\.action is stop and step 2 holds"),
        ({"limit": 0}, r"data\.corruptSamples\.limit: 1 samples are corrupt by step 2"),
    ],
    ids=["stop", "limit"],
)
def test_c20_a_corrupt_picture_ends_the_job_where_the_policy_says_so(
    shared_store: Store,
    fakes: FakeSources,
    uri: str,
    tmp_path: Path,
    undisturbed: Undisturbed,
    policy: dict[str, Any],
    message: str,
) -> None:
    bad = damaged(shared_store, fakes, undisturbed, "pictures", "png")
    plan = plan_of(bad.uri, corruptSamples=policy)
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        take(clients, 1)
        for client in clients:
            client.ask(2)
        for client in clients:
            with pytest.raises(RefusedError, match=message) as refused:
                client.take()
            assert refused.value.refused.reason == "error"
            text = refused.value.refused.message
            assert f"source=pictures epoch=0 index={bad.index}" in text and bad.name in text


@pytest.mark.usefixtures("s3_env")
def test_c20_a_sample_damaged_after_its_step_was_agreed_on_is_named(
    shared_store: Store, fakes: FakeSources, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """It cannot be masked any more: other ranks have trained on it already."""
    bad = damaged(shared_store, fakes, undisturbed, "speech", "txt")
    shard = bad.name.partition(": ")[0]
    torn = shared_store.read(shard)
    shared_store.write(shard, shared_store.read(shard.replace(bad.uri, "s3://serve/good")))
    plan = plan_of(bad.uri)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all([car.path for car in cars], plan)
        take(clients, 1)
        take(clients[:3], 2)
        cars[1].kill()
        shared_store.write(shard, torn)
        cars[1].restart()
        last = SidecarClient.join(cars[1].path, plan, rank=3, next_step=2)
        last.ask(2)
        with pytest.raises(RefusedError, match="step 2 was agreed on when") as told:
            last.take()
        assert told.value.refused.reason == "error" and bad.name in str(told.value)


def test_a_shard_that_goes_away_is_an_error_on_every_node(
    shared_store: Store, fakes: FakeSources, tmp_path: Path
) -> None:
    """Not a corrupt sample: no policy may skip a whole source."""
    fakes.upload(shared_store, "s3://serve/gone")
    plan = plan_of("s3://serve/gone")
    with services(plan, tmp_path, shared_store) as paths:
        clients = join_all(paths, plan)
        take(clients, 1)
        for info in shared_store.list("s3://serve/gone/books"):
            if info.uri.endswith(".tar"):
                shared_store.delete(info.uri)
        with pytest.raises(RefusedError, match="there is no such object") as refused:
            walk(clients, 2, 40)
        assert refused.value.refused.reason == "error"


def test_a_node_fetches_the_bytes_it_needs_and_no_others(
    shared_store: Store, uri: str, s3: Store
) -> None:
    plan = plan_of(uri)
    data = open_data(plan.spec, shared_store)
    samples = plan_samples(data, plan)
    step, _ = samples.step(samples.begin())
    placed = place_step(step, samples.tables, plan)
    with ThreadPoolExecutor(2) as executor:
        for node in range(2):
            wanted = wanted_parts(needs(plan, node), placed, samples.tables)
            before = s3.needed_bytes
            fetcher = Fetcher(data, s3, executor, cache_bytes=0)
            assert not fetcher.fetch(wanted).corrupt
            expected = 0
            for source, row, modality in wanted:
                opened = data.sources[source]
                part = opened.index.part(opened.spec.parts[modality], modality)
                expected += int(part.length[row])
            assert s3.needed_bytes - before == expected > 0
            fetcher.fetch(part for part in wanted if part[0] == NAMES.index("books"))
            assert s3.needed_bytes - before == expected  # documents are read once
