"""The whole service: real sidecar processes, a real S3 server, two nodes of pp 2 x dp 2."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract import wire
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.spec_data import StorageSpec
from omni_contract.spec_model import Modality
from omni_dataloader.fetch import Fetcher
from omni_dataloader.index import SourceIndex
from omni_dataloader.sample_plan import place_step
from omni_dataloader.select import needs, wanted_parts
from omni_dataloader.sources import open_data, plan_samples
from omni_dataloader.store import Store
from tests.fakes.sidecar_client import (
    RefusedError,
    Sidecar,
    SidecarClient,
    Step,
    fake_plan,
    sidecars,
)
from tests.fakes.sources import SOURCES, FakeSources, make_sources

RANKS = range(4)
NUM_STEPS = 6
NAMES = sorted(SOURCES)
BATCH = {"globalSequences": 8, "sequenceTokens": 256}


@pytest.fixture(scope="module")
def store(s3_server: LocalS3) -> Iterator[Store]:
    with mock.patch.dict(os.environ, s3_server.env):
        yield Store.open(StorageSpec())


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> FakeSources:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def uri(store: Store, fakes: FakeSources) -> str:
    store.create_bucket("serve")
    fakes.upload(store, "s3://serve/good")
    return "s3://serve/good"


def plan_of(uri: str, **changes: Any) -> JobPlan:
    return fake_plan(uri, batch=BATCH, **changes)


def join_all(cars: list[Sidecar], plan: JobPlan, **hello: Any) -> list[SidecarClient]:
    return [
        SidecarClient.join(cars[plan.layout.node_of(r)].path, plan, rank=r, **hello) for r in RANKS
    ]


def take(clients: list[SidecarClient], step: int) -> list[Step]:
    for client in clients:
        client.ask(step)
    steps = []
    for client in clients:
        answer = client.take()
        assert isinstance(answer, Step)
        steps.append(answer)
        client.release(step)
    return steps


def walk(clients: list[SidecarClient], first: int, last: int) -> list[list[Step]]:
    return [take(clients, step) for step in range(first, last + 1)]


def assert_same(got: list[list[Step]], expected: list[list[Step]]) -> None:
    assert len(got) == len(expected)
    for got_ranks, expected_ranks in zip(got, expected, strict=True):
        for one, other in zip(got_ranks, expected_ranks, strict=True):
            assert one.batch.step == other.batch.step
            assert one.batch.corrupt_samples == other.batch.corrupt_samples
            assert one.batch.tokens_by_source == other.batch.tokens_by_source
            for mine, theirs in zip(one.microbatches, other.microbatches, strict=True):
                assert mine.keys() == theirs.keys()
                for name in mine:
                    assert (mine[name] == theirs[name]).all(), name


@pytest.fixture(scope="module")
def undisturbed(
    store: Store, uri: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[Step]], list[wire.LoaderState]]:
    """What every rank gets in each step, and the state after each step."""
    plan = plan_of(uri)
    with sidecars(plan, tmp_path_factory.mktemp("undisturbed")) as cars:
        clients = join_all(cars, plan)
        steps, states = [], []
        for step in range(1, NUM_STEPS + 1):
            steps.append(take(clients, step))
            states.append(clients[0].snapshot(step))
            assert clients[3].snapshot(step) == states[-1]  # the same on every node
        return steps, states


def test_every_sample_is_served_once_to_those_who_need_it(
    store: Store, uri: str, undisturbed: tuple[list[list[Step]], list[wire.LoaderState]]
) -> None:
    plan = plan_of(uri)
    data = open_data(plan.spec, store)
    samples = plan_samples(data, plan)
    state = samples.begin()
    for ranks in undisturbed[0]:
        expected, state = samples.step(state)
        served = [
            tuple(row[[0, 1, 2, 3, 5]].tolist())
            for rank in (2, 3)  # last stage of both replicas
            for microbatch in ranks[rank].microbatches
            for row in microbatch["samples"]
        ]
        assert sorted(served) == sorted(map(tuple, expected.pieces[:, [1, 2, 3, 4, 6]].tolist()))
        assert ranks[0].batch.weights == {name: 0.25 for name in NAMES}
        total = sum(row[4] for row in served)
        assert sum(ranks[0].batch.tokens_by_source.values()) == total
        assert sum(ranks[0].batch.tokens_by_modality.values()) == total


def test_stages_of_a_replica_agree_and_get_only_their_part(
    undisturbed: tuple[list[list[Step]], list[wire.LoaderState]],
) -> None:
    for ranks in undisturbed[0]:
        for replica in (0, 1):
            first, last = ranks[replica], ranks[replica + 2]
            for number, (a, b) in enumerate(
                zip(first.microbatches, last.microbatches, strict=True), start=1
            ):
                assert (a["samples"] == b["samples"]).all() and (a["spans"] == b["spans"]).all()
                encodes, other = (a, b) if (number - 1) % 2 == 0 else (b, a)
                encoder = {"image.patches", "image.grid", "audio.features", "audio.frames"}
                assert encoder <= encodes.keys() and not encoder & other.keys()
                assert a.keys() - encoder == {"samples", "spans", "tokens"}
                assert b.keys() - encoder == {"samples", "spans", "labels", "loss_mask"}
                check_labels(a, b)
                check_media(encodes)


def check_labels(first: Any, last: Any) -> None:
    """The label of a position is the next token of its piece, where that is text or end."""
    mask, labels, tokens = last["loss_mask"], last["labels"], first["tokens"]
    expected = np.zeros_like(mask)
    modal = np.zeros_like(mask)
    for _, _, start, count, _, _ in first["spans"].tolist():
        modal[start : start + count] = True
    covered = np.zeros_like(mask)
    for *_, start, count in first["samples"].tolist():
        expected[start : start + count - 1] = ~modal[start + 1 : start + count]
        covered[start : start + count] = True
    assert (mask == expected).all()
    positions = np.flatnonzero(mask)
    assert (labels[positions] == tokens[positions + 1]).all()
    assert (tokens[~covered] == 0).all() and (tokens[covered & ~modal] != 0).all()
    assert set(tokens[modal].tolist()) <= {2, 3}
    assert not set(tokens[covered & ~modal].tolist()) & {2, 3}


def check_media(encodes: Any) -> None:
    spans = encodes["spans"]
    images = spans[spans[:, 1] == Modality.IMAGE.number]
    recordings = spans[spans[:, 1] == Modality.AUDIO.number]
    assert (encodes["image.grid"].prod(axis=1) == images[:, 4]).all()
    assert len(encodes["image.patches"]) == images[:, 4].sum()
    assert (images[:, 4] == 4 * images[:, 3]).all()
    assert (encodes["audio.frames"] == recordings[:, 4]).all()
    assert len(encodes["audio.features"]) == recordings[:, 4].sum()


@pytest.mark.parametrize("after", [0, 1, 4])
def test_c11_a_new_generation_goes_on_from_the_saved_state(
    uri: str,
    tmp_path: Path,
    undisturbed: tuple[list[list[Step]], list[wire.LoaderState]],
    after: int,
) -> None:
    """The sidecars live on and rewind; what they made ready ahead changes nothing (C15)."""
    plan = plan_of(uri)
    expected, states = undisturbed
    with sidecars(plan, tmp_path) as cars:
        walk(join_all(cars, plan), 1, 5)
        again = join_all(
            cars,
            plan,
            generation=1,
            next_step=after + 1,
            state=states[after - 1] if after else None,
        )
        assert_same(walk(again, after + 1, NUM_STEPS), expected[after:])
        assert again[0].snapshot(NUM_STEPS) == states[-1]


def test_c11_a_restored_state_may_lie_before_the_step_asked_for(
    uri: str, tmp_path: Path, undisturbed: tuple[list[list[Step]], list[wire.LoaderState]]
) -> None:
    plan = plan_of(uri)
    expected, states = undisturbed
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan, attempt=3, next_step=5, state=states[1])
        assert_same(walk(clients, 5, NUM_STEPS), expected[4:])


def test_c11_a_state_of_another_seed_is_refused(
    uri: str, tmp_path: Path, undisturbed: tuple[list[list[Step]], list[wire.LoaderState]]
) -> None:
    plan = plan_of(uri, resources={"nodes": 1, "ranksPerNode": 4, "device": "cpu"})
    spec = plan.spec.model_dump(mode="json", by_alias=True)
    other = plan.model_validate(
        {
            **plan.model_dump(mode="json", by_alias=True),
            "spec": {**spec, "train": {**spec["train"], "seed": 8}},
        }
    )
    state = undisturbed[1][1]
    with sidecars(other, tmp_path) as (car,):
        with pytest.raises(RefusedError, match=r"train\.seed: 8 is not the 7") as refused:
            SidecarClient.join(car.path, other, rank=0, next_step=3, state=state)
        assert refused.value.refused.reason == "error"
        # Nothing is broken by it: who starts from the beginning is served.
        SidecarClient.join(car.path, other, rank=0, generation=1).step(1)


@pytest.mark.parametrize("killed", [[0], [1], [0, 1]], ids=["node-0", "node-1", "both"])
def test_a_killed_sidecar_is_started_again_and_nobody_notices(
    uri: str,
    tmp_path: Path,
    undisturbed: tuple[list[list[Step]], list[wire.LoaderState]],
    killed: list[int],
) -> None:
    plan = plan_of(uri)
    expected, states = undisturbed
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        assert_same(walk(clients, 1, 3), expected[:3])
        clients[1].ask(4)  # one rank of node 0 is ahead of the other
        ahead = clients[1].take()
        assert isinstance(ahead, Step)
        for node in killed:
            cars[node].kill()
        for node in killed:
            cars[node].restart()
        for rank in RANKS:
            if plan.layout.node_of(rank) in killed:
                with pytest.raises((EOFError, ConnectionError)):
                    clients[rank].step(9)
                clients[rank] = SidecarClient.join(
                    cars[plan.layout.node_of(rank)].path, plan, rank=rank,
                    next_step=5 if rank == 1 else 4,
                )  # fmt: skip
            elif rank == 1:
                clients[rank].release(4)
        others = [clients[r] for r in RANKS if r != 1]
        rest = take(others, 4)
        assert_same([[rest[0], ahead, *rest[1:]]], [expected[3]])
        assert_same(walk(clients, 5, NUM_STEPS), expected[4:])
        assert clients[2].snapshot(NUM_STEPS) == states[-1]


def test_a_lower_pair_is_refused_and_a_higher_one_sends_the_others_away(
    uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        path = cars[0].path
        old = SidecarClient.join(path, plan, rank=0, attempt=1, generation=5)
        SidecarClient.join(path, plan, rank=1, attempt=2, generation=0)
        with pytest.raises(RefusedError, match="attempt 2 generation 0 has taken over") as refused:
            old.take()
        assert refused.value.refused.reason == "stale"
        for attempt, generation in ((1, 5), (1, 9)):
            with pytest.raises(RefusedError) as refused:
                SidecarClient.join(path, plan, rank=0, attempt=attempt, generation=generation)
            assert refused.value.refused.reason == "stale"


def test_ranks_of_another_plan_node_or_state_are_refused(
    uri: str, tmp_path: Path, undisturbed: tuple[list[list[Step]], list[wire.LoaderState]]
) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        path = cars[0].path
        SidecarClient.join(path, plan, rank=0)
        other = fake_plan(uri)
        for hello, reason in (
            ({"plan": other, "rank": 1}, "mismatch"),
            ({"plan": plan, "rank": 2}, "mismatch"),
            ({"plan": plan, "rank": 1, "next_step": 2, "state": undisturbed[1][0]}, "error"),
            ({"plan": plan, "rank": 1, "next_step": 0}, "error"),
        ):
            with pytest.raises(RefusedError) as refused:
                SidecarClient.join(path, **hello)  # type: ignore[arg-type]
            assert refused.value.refused.reason == reason
        garbage = SidecarClient(path)
        garbage._socket.sendall((5).to_bytes(4, "big") + b"[1,2]")
        with pytest.raises(RefusedError, match="no frame of wire version"):
            garbage.receive()


def test_a_rank_that_does_not_release_waits_for_itself_alone(uri: str, tmp_path: Path) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        lazy, others = clients[0], clients[1:]
        for step in (1, 2):
            lazy.ask(step)
            assert isinstance(lazy.take(), Step)
            take(others, step)
        lazy.ask(3)
        take(others, 3)
        lazy._socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            lazy.take()
        lazy._socket.settimeout(20)
        lazy.release(1)
        answer = lazy.take()
        assert isinstance(answer, Step) and answer.batch.step == 3


def test_the_data_ends_at_the_same_step_for_all(uri: str, tmp_path: Path) -> None:
    plan = plan_of(uri)
    spec = plan.model_dump(mode="json", by_alias=True)
    spec["spec"]["data"]["sources"]["pictures"]["whenExhausted"] = "stop"
    plan = JobPlan.model_validate(spec)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        seen: list[int] = []
        for step in range(1, 50):
            for client in clients:
                client.ask(step)
            answers = [client.take() for client in clients]
            if isinstance(answers[0], wire.EndOfData):
                assert answers == [answers[0]] * 4
                assert answers[0].step == step
                assert "data.sources.pictures: all 60 samples are consumed" in answers[0].message
                break
            for client, answer in zip(clients, answers, strict=True):
                assert isinstance(answer, Step)
                client.release(step)
            seen += [
                index
                for rank in (2, 3)
                for m in answers[rank].microbatches  # type: ignore[union-attr]
                for source, _, index, *_ in m["samples"].tolist()
                if NAMES[source] == "pictures"
            ]
        assert sorted(seen) == list(range(60))
        assert clients[0].snapshot(step - 1).next_step == step


def test_after_the_plan_s_last_step_there_is_none(uri: str, tmp_path: Path) -> None:
    plan = plan_of(uri)
    plan = plan.model_copy(update={"num_steps": 2})
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        walk(clients, 1, 2)
        clients[0].ask(3)
        assert clients[0].take() == wire.EndOfData(
            step=3, message="all 2 steps of the plan are done"
        )


def corrupt(store: Store, fakes: FakeSources, uri: str, row: int) -> str:
    """Upload with one picture damaged, sizes unchanged; returns the sample's name."""
    fakes.upload(store, uri)
    index = SourceIndex.load(store, f"{uri}/pictures")
    part = index.part("png", Modality.IMAGE)
    shard = bytearray(store.read(index.shard_uri(row)))
    shard[part.offset[row] + part.length[row] // 2] ^= 0xFF
    store.write(index.shard_uri(row), bytes(shard))
    return index.name(row)


def test_c20_a_corrupt_picture_is_masked_on_all_nodes_and_counted_once(
    store: Store,
    fakes: FakeSources,
    tmp_path: Path,
    undisturbed: tuple[list[list[Step]], list[wire.LoaderState]],
) -> None:
    plan = plan_of("s3://serve/corrupt")
    where = first_seen(undisturbed[0], "pictures")
    name = corrupt(store, fakes, "s3://serve/corrupt", where.index)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        steps = walk(clients, 1, NUM_STEPS)
        log = "".join(car.log.read_text() for car in cars)
        assert name in log and "does not have the indexed checksum" in log.replace(
            "do not", "does not"
        )
    for number, (ranks, before) in enumerate(zip(steps, undisturbed[0], strict=True), start=1):
        for rank, (got, good) in enumerate(zip(ranks, before, strict=True)):
            assert got.batch.corrupt_samples >= (number >= where.step)
            for mine, theirs in zip(got.microbatches, good.microbatches, strict=True):
                assert (mine["samples"] == theirs["samples"]).all()  # the plan does not change
                rows = np.flatnonzero(
                    (mine["samples"][:, 0] == NAMES.index("pictures"))
                    & (mine["samples"][:, 2] == where.index)
                )
                flags = mine["spans"][:, 5].astype(bool)
                assert set(mine["spans"][flags][:, 0]) == set(rows.tolist())
                if rank >= 2:
                    expected = theirs["loss_mask"].copy()
                    for *_, start, count in mine["samples"][rows].tolist():
                        expected[start : start + count] = False
                    assert (mine["loss_mask"] == expected).all()
                if "image.grid" in mine:
                    assert len(mine["image.grid"]) == len(theirs["image.grid"]) - len(rows)
                    left = mine["spans"][(mine["spans"][:, 1] == 1) & ~flags]
                    assert len(mine["image.patches"]) == left[:, 4].sum()
    assert [r.batch.corrupt_samples for r in steps[where.step - 1]] == [1] * 4
    lost = before_and_after(undisturbed[0][where.step - 1], steps[where.step - 1])
    assert 0 < lost < 100


def before_and_after(before: list[Step], after: list[Step]) -> int:
    """Tokens of pictures no longer counted."""
    name = "pictures"
    return before[0].batch.tokens_by_source[name] - after[0].batch.tokens_by_source[name]


class Seen:
    def __init__(self, step: int, index: int) -> None:
        self.step, self.index = step, index


def first_seen(steps: list[list[Step]], source: str) -> Seen:
    """A sample that is consumed in step 2 and not before, by replica 0."""
    for row in steps[1][2].microbatches[0]["samples"].tolist():
        if NAMES[row[0]] == source and row[1] == 0:
            return Seen(2, row[2])
    raise AssertionError("step 2 has no such sample")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"action": "stop"}, r"data\.corruptSamples\.action is stop and step 2 holds"),
        ({"limit": 0}, r"data\.corruptSamples\.limit: 1 samples are corrupt by step 2"),
    ],
    ids=["stop", "limit"],
)
def test_c20_a_corrupt_picture_ends_the_job_where_the_policy_says_so(
    store: Store,
    fakes: FakeSources,
    tmp_path: Path,
    undisturbed: tuple[list[list[Step]], list[wire.LoaderState]],
    policy: dict[str, Any],
    message: str,
) -> None:
    where = first_seen(undisturbed[0], "pictures")
    name = corrupt(store, fakes, "s3://serve/stop", where.index)
    raw = plan_of("s3://serve/stop").model_dump(mode="json", by_alias=True)
    raw["spec"]["data"]["corruptSamples"] = {"action": "skip", "limit": 100, **policy}
    plan = JobPlan.model_validate(raw)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        take(clients, 1)
        for client in clients:
            client.ask(2)
        for client in clients:
            with pytest.raises(RefusedError, match=message) as refused:
                client.take()
            assert refused.value.refused.reason == "error"
            text = refused.value.refused.message
            assert f"source=pictures epoch=0 index={where.index}" in text and name in text


def test_a_node_fetches_the_bytes_it_needs_and_no_others(store: Store, uri: str) -> None:
    plan = plan_of(uri)
    data = open_data(plan.spec, store)
    samples = plan_samples(data, plan)
    step, _ = samples.step(samples.begin())
    placed = place_step(step, samples.tables, plan)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as executor:
        for node in range(2):
            own = Store.open(StorageSpec())
            wanted = wanted_parts(needs(plan, node), placed, samples.tables)
            fetched = Fetcher(data, own, executor).fetch(wanted)
            assert not fetched.corrupt
            lengths = 0
            for source, row, modality in wanted:
                opened = data.sources[source]
                part = opened.index.part(opened.spec.parts[modality], modality)
                lengths += int(part.length[row])
            assert own.needed_bytes == lengths > 0


def test_c21_a_killed_sidecar_leaves_nothing_that_blocks_the_next(uri: str, tmp_path: Path) -> None:
    plan = plan_of(uri)
    before = set(os.listdir("/dev/shm"))
    with sidecars(plan, tmp_path) as cars:
        walk(join_all(cars, plan), 1, 2)
        assert set(os.listdir("/dev/shm")) <= before
        cars[0].kill()
        assert cars[0].path.exists()  # a stale socket, which the next one replaces
        cars[0].restart()
        SidecarClient.join(cars[0].path, plan, rank=0, generation=1)
    assert set(os.listdir("/dev/shm")) <= before


def test_c21_a_second_sidecar_on_a_live_socket_is_refused(uri: str, tmp_path: Path) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        client = SidecarClient.join(cars[0].path, plan, rank=0)
        first = cars[0].process
        cars[0].restart()
        try:
            assert cars[0].process.wait(20) == Exit.USER
            text = cars[0].log.read_text()
            assert "another data service answers there" in text and "Traceback" not in text
        finally:
            cars[0].process = first
        SidecarClient.join(cars[1].path, plan, rank=2)
        SidecarClient.join(cars[1].path, plan, rank=3)
        client.ask(1)
        assert isinstance(client.take(), Step)  # the first lives on undisturbed


def test_sigterm_ends_it_within_two_seconds_and_removes_the_socket(
    uri: str, tmp_path: Path
) -> None:
    plan = plan_of(uri)
    with sidecars(plan, tmp_path) as cars:
        clients = join_all(cars, plan)
        clients[0].ask(1)
        begin_s = time.monotonic()
        assert cars[0].stop() == Exit.INTERRUPTED
        assert time.monotonic() - begin_s < 2
        assert not cars[0].path.exists()
        assert "Traceback" not in cars[0].log.read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("bucket", "there is no such bucket"),
        ("key", "missing, so s3://serve/nothing/books is no indexed source"),
        ("vocab", "spec.model.llm.vocabSize: 100 is smaller than the 512 tokens"),
        ("part", "has no part {image: jpg}"),
        ("shard", "so it is truncated"),
        ("sequence", "none of its 60 samples can be used"),
        ("peers", "--peers: 2 addresses for the 1 nodes"),
        ("listen", "use a free port"),
    ],
)
def test_a_mistake_of_the_user_is_one_sentence(
    store: Store, fakes: FakeSources, uri: str, tmp_path: Path, change: str, message: str
) -> None:
    raw = plan_of(uri).model_dump(mode="json", by_alias=True)
    spec = raw["spec"]
    match change:
        case "bucket":
            for source in spec["data"]["sources"].values():
                source["uri"] = "s3://not-there/x"
        case "key":
            for source in spec["data"]["sources"].values():
                source["uri"] = source["uri"].replace("good", "nothing")
        case "vocab":
            spec["model"]["llm"]["vocabSize"] = 100
        case "part":
            spec["data"]["sources"]["drawings"]["parts"]["image"] = "jpg"
        case "shard":
            fakes.upload(store, "s3://serve/cut")
            name = "s3://serve/cut/speech/shard-000000.tar"
            store.write(name, store.read(name)[:-1000])
            spec["data"]["sources"]["speech"]["uri"] = "s3://serve/cut/speech"
        case "sequence":
            spec["batch"]["sequenceTokens"] = 16
            spec["model"]["encoders"]["image"]["maxPatches"] = 4
            spec["model"]["encoders"]["audio"]["maxFrames"] = 8
            store.create_bucket("long")
            spec["data"]["sources"] = {"speech": {**spec["data"]["sources"]["speech"]}}
            spec["data"]["mixture"] = []
            spec["model"]["encoders"]["audio"]["maxFrames"] = 1500
            spec["data"]["sources"]["speech"]["uri"] = long_texts(store, fakes, tmp_path)
        case "peers":
            raw["layout"] |= {"num_nodes": 1, "ranks_per_node": 4}
    plan = JobPlan.model_validate(raw)
    folder = tmp_path / "run"
    folder.mkdir()
    plan.save(folder / "plan.json")
    from tests.fakes.sidecar_client import free_ports

    ports = free_ports(2)
    if change == "listen":
        import socket

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ports[0] = taken.getsockname()[1]
            car = Sidecar(plan, 0, folder, ports)
            code = car.process.wait(30)
    else:
        car = Sidecar(plan, 0, folder, ports)
        code = car.process.wait(30)
    text = car.log.read_text()
    assert code == Exit.USER, text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0]
    assert "Traceback" not in text


def long_texts(store: Store, fakes: FakeSources, folder: Path) -> str:
    """A source whose every sample is longer than 16 tokens."""
    from omni_dataloader.build import Indexer, index_folder, upload_source, write_shards
    from tests.fakes.sources import RECORDING, fake_samples

    samples = list(fake_samples(RECORDING, num_samples=60, seed=0))
    for sample in samples:
        sample.files["txt"] = b"frog boat hill sea " * 10
    write_shards(iter(samples), folder / "long", shard_bytes=10**6)
    index_folder(folder / "long", Indexer(parts=RECORDING, tokenizer=fakes.tokenizer))
    upload_source(store, folder / "long", "s3://long/speech")
    return "s3://long/speech"
