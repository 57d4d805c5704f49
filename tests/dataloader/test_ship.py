"""Logs reach the store as they are, whatever happens to it, and take no more room than allowed."""

import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract.errors import StorageError
from omni_contract.log_store import LogBlock, LogFile, begun, job_folder
from omni_contract.spec_data import StorageSpec
from omni_dataloader.ship import BEGUN_FILE, Block, Limits, Shipper, choose_surplus, punch
from omni_dataloader.store import Store
from tests.fakes.forwarder import forwarding
from tests.fakes.refusing_s3 import RefusingS3
from tests.trainer.test_rendezvous import free_address

JOB = "stamps-5d1ce"
POD = f"{JOB}-1-0"
SMALL = Limits(block_bytes=1 << 16, stored_bytes=1 << 20, file_bytes=1 << 20)
Capture = pytest.CaptureFixture[str]


@dataclass(slots=True, kw_only=True)
class Pod:
    """The log files of a pod, and what should be found of them."""

    logs: Path
    uri: str
    open_store: Callable[[], Store]
    limits: Limits = SMALL
    written: dict[str, bytes] = field(default_factory=dict)

    def shipper(self, pod: str = POD) -> Shipper:
        return Shipper(
            logs=self.logs, uri=self.uri, pod=pod, open_store=self.open_store, limits=self.limits
        )

    def write(self, name: str, data: bytes) -> None:
        self.logs.mkdir(exist_ok=True)
        with (self.logs / name).open("ab") as file:
            file.write(data)
        self.written[name] = self.written.get(name, b"") + data


class MiserlyStore(Store):
    """Takes so many writes, and deletes nothing."""

    writes_left = 1000

    def write(self, uri: str, data: bytes) -> None:
        if not self.writes_left:
            raise StorageError(f"{uri}: the store is full")
        self.writes_left -= 1
        super().write(uri, data)

    def delete(self, uri: str) -> None:
        raise StorageError(f"{uri}: must not be deleted")

    def delete_folder(self, uri: str) -> None:
        self.delete(uri)


@pytest.fixture
def pod(tmp_path: Path, s3: Store, bucket: str) -> Pod:
    return Pod(logs=tmp_path / "logs", uri=bucket, open_store=lambda: s3)


def blocks(store: Store, uri: str) -> dict[LogBlock, bytes]:
    """All that is stored."""
    begin = f"{uri}/{job_folder(JOB)}/"
    found: dict[LogBlock, bytes] = {}
    for info in store.list(f"{uri}/{job_folder(JOB)}"):
        block = LogBlock.parse(info.uri.removeprefix(begin), JOB)
        assert block is not None, info.uri
        found[block] = store.read(info.uri)
    return found


def stored(store: Store, uri: str) -> dict[str, bytes]:
    """What is stored of each file, in one piece."""
    texts: dict[str, bytes] = {}
    for block, data in blocks(store, uri).items():
        place = block.place
        kind, _, rest = block.stream.partition("-")
        number, _, generation = rest.partition(".")
        file = LogFile(
            kind=kind,  # type: ignore[arg-type]
            number=int(number) if number else place.node,
            attempt=place.attempt,
            generation=int(generation) if generation else None,
        )
        assert len(texts.get(file.name, b"")) == block.offset
        texts[file.name] = texts.get(file.name, b"") + data
    return texts


def test_a_log_that_grows_slowly_is_few_objects(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    for number in range(40):
        pod.write("trainer-0.1.log", f"line {number}\n".encode() * 400)
        shipper.look()
        assert stored(s3, pod.uri) == pod.written
    (first, *others) = blocks(s3, pod.uri)
    began = begun((pod.logs / BEGUN_FILE).stat().st_mtime)
    assert first.place.folder == f"logs/{JOB}/attempt-0001/node-0000/{POD}.{began}"
    assert len(others) == len(pod.written["trainer-0.1.log"]) // pod.limits.block_bytes


def test_nothing_is_stored_where_nothing_was_said(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    shipper.look()
    pod.write("trainer-0.1.log", b"")
    pod.write("rank-3.1.0.log", b"")
    shipper.look()
    assert blocks(s3, pod.uri) == {}


def test_the_place_is_known_once_the_pod_has_said_its_node(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    pod.write("rank-3.2.0.log", b"I rank\n")
    shipper.look()
    assert blocks(s3, pod.uri) == {}
    pod.write("trainer-1.2.log", b"I train\n")
    shipper.look()
    assert {(b.place.node, b.stream) for b in blocks(s3, pod.uri)} == {
        (1, "rank-3.0"), (1, "trainer"),
    }  # fmt: skip
    assert stored(s3, pod.uri) == pod.written


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_written_arrives_through_restarts_of_the_container(
    seed: int, pod: Pod, s3: Store
) -> None:
    dice = random.Random(seed)
    pod.limits = replace(SMALL, stored_bytes=1 << 30, file_bytes=1 << 30)
    names = ["trainer-0.1.log", "data-0.1.log", "rank-0.1.0.log", "rank-1.1.0.log"]
    names += ["trainer-0.2.log", "rank-0.2.0.log", "rank-0.2.1.log", "rank-1.2.1.log"]
    shipper = pod.shipper()
    for turn in range(30):
        for name in dice.sample(names[: 4 + turn // 4], 2):
            size = dice.choice([1, 70, 5000, 65_536, 100_000])
            pod.write(name, dice.randbytes(size))
        match dice.choice(["look", "look", "restart", "wait"]):
            case "look":
                shipper.look()
            case "restart":
                shipper = pod.shipper()
    shipper.look()
    assert stored(s3, pod.uri) == pod.written


def test_the_beginning_and_the_newest_stay_where_a_pod_says_too_much(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    pod.write("trainer-0.1.log", b"quiet\n")
    for number in range(60):
        pod.write("rank-0.1.0.log", number.to_bytes() * 50_000)
        shipper.look()
        if number % 10 == 9:
            there = blocks(s3, pod.uri)
            assert sum(map(len, there.values())) <= pod.limits.stored_bytes
    of_rank = {b.offset: data for b, data in there.items() if b.stream == "rank-0.0"}
    text = pod.written["rank-0.1.0.log"]
    assert all(text[offset : offset + len(data)] == data for offset, data in of_rank.items())
    first = pod.limits.first_blocks
    assert sorted(of_rank)[:first] == [i * pod.limits.block_bytes for i in range(first)]
    last = max(of_rank)
    assert last + len(of_rank[last]) == len(text)
    assert sum(map(len, of_rank.values())) > pod.limits.stored_bytes - 2 * pod.limits.block_bytes
    assert [data for b, data in there.items() if b.stream == "trainer"] == [b"quiet\n"]


@pytest.mark.parametrize("seed", range(20))
def test_the_surplus_is_what_is_least_missed(seed: int) -> None:
    dice = random.Random(seed)
    streams = []
    for _ in range(dice.randint(1, 12)):
        sizes = [100] * dice.randint(0, 30) + [dice.randint(1, 100)]
        streams.append([Block(offset=100 * i, size=size) for i, size in enumerate(sizes)])
    doomed = choose_surplus(streams, most_bytes=1000, first_blocks=2)
    gone = {i: {b.offset for s, b in doomed if s == i} for i in range(len(streams))}
    kept = [[b for b in blocks if b.offset not in gone[i]] for i, blocks in enumerate(streams)]
    left = sum(block.size for blocks in kept for block in blocks)
    total = sum(block.size for blocks in streams for block in blocks)
    assert left <= 1000
    assert left > 1000 - 101 or not doomed and left == total
    short = [i for i, blocks in enumerate(kept) if len(blocks) < min(3, len(streams[i]))]
    assert short == list(range(len(short)))  # beginnings and ends go in order, the oldest first


def test_a_flood_is_stored_as_far_as_it_is_new(pod: Pod, s3: Store, capsys: Capture) -> None:
    shipper = pod.shipper()
    pod.write("rank-0.1.0.log", b"begin\n")
    pod.write("trainer-0.1.log", b"quiet\n")
    shipper.look()
    pod.write("rank-0.1.0.log", os.urandom(5 << 20))
    shipper.look()
    assert "4.0 MiB of the log rank-0.0 were not stored" in capsys.readouterr().err
    of_rank = {b.offset: data for b, data in blocks(s3, pod.uri).items() if b.stream != "trainer"}
    assert of_rank[0] == b"begin\n"
    newest = of_rank[max(of_rank)]
    assert pod.written["rank-0.1.0.log"].endswith(newest) and newest


def test_logs_are_stored_when_the_store_is_back(
    pod: Pod, s3: Store, s3_server: LocalS3, capsys: Capture
) -> None:
    port = free_address().port
    spec = StorageSpec.model_validate({"endpoint": f"http://127.0.0.1:{port}"})
    pod.open_store = lambda: Store.open(spec)
    shipper = pod.shipper()
    refusing = RefusingS3(status=403, code="AccessDenied")
    with refusing, forwarding(port, to=int(refusing.endpoint.rpartition(":")[2])):
        for number in range(3):
            pod.write("trainer-0.1.log", f"line {number}\n".encode())
            shipper.look()
    said = capsys.readouterr().err
    assert said.count("not stored for now") == 1 and "refuses these credentials" in said
    with forwarding(port, to=int(s3_server.endpoint.rpartition(":")[2])):
        shipper.look()
        assert "are stored again" in capsys.readouterr().err
        pod.write("trainer-0.1.log", b"more\n")
        shipper.look()
    assert stored(s3, pod.uri) == pod.written
    shipper.look()  # the store is away again, and nothing is asked of it
    assert capsys.readouterr().err == ""


def test_a_log_that_cannot_be_read_holds_no_other_up(pod: Pod, s3: Store, capsys: Capture) -> None:
    shipper = pod.shipper()
    for attempt in (1, 2):
        pod.write(f"trainer-0.{attempt}.log", b"line\n")
        (pod.logs / f"rank-1.{attempt}.0.log").symlink_to("nowhere")
        pod.write(f"rank-0.{attempt}.0.log", b"line\n")
        with (pod.logs / f"rank-2.{attempt}.0.log").open("wb") as hole:
            hole.truncate(1 << 20)
        pod.write(f"rank-3.{attempt}.0.log", b"line\n")
    for _ in range(2):
        shipper.look()
        assert stored(s3, pod.uri) == pod.written
        for attempt in (1, 2):
            pod.write(f"rank-0.{attempt}.0.log", b"more\n")
    said = capsys.readouterr().err
    assert said.count("not stored for now") == 1
    assert f"{pod.logs / 'rank-2.2.0.log'}: cannot be read (No such device" in said


def test_a_store_that_lets_nobody_delete_gets_the_logs(
    pod: Pod, s3: Store, capsys: Capture
) -> None:
    pod.limits = replace(SMALL, attempts=3, stored_bytes=1 << 17)
    past = replace(pod, logs=pod.logs.with_name("past"), written={})
    past.write("trainer-1.1.log", b"line\n")
    past.shipper(f"{JOB}-1-1").look()
    pod.open_store = partial(MiserlyStore.open, StorageSpec())
    shipper = pod.shipper()
    for _ in range(2):
        for attempt in (4, 5):
            pod.write(f"trainer-0.{attempt}.log", os.urandom(300_000))
        shipper.look()
        assert stored(s3, pod.uri) == past.written | pod.written
    assert "must not be deleted" in capsys.readouterr().err


def test_the_newest_attempt_is_stored_first(pod: Pod, s3: Store) -> None:
    store = MiserlyStore.open(StorageSpec())
    store.writes_left = 1
    pod.open_store = lambda: store
    for attempt in (1, 2, 3):
        pod.write(f"trainer-0.{attempt}.log", b"line\n")
    pod.shipper().look()
    assert set(stored(s3, pod.uri)) == {"trainer-0.3.log"}


def test_a_bucket_that_is_not_there_is_not_made(pod: Pod, s3: Store, capsys: Capture) -> None:
    """The trainer tells its user of the wrong name, unless somebody made it right."""
    pod.uri = "s3://no-such-bucket/run"
    pod.write("trainer-0.1.log", b"line\n")
    pod.shipper().look()
    assert "no such bucket" in capsys.readouterr().err
    with pytest.raises(Exception, match="no such bucket"):
        s3.exists("s3://no-such-bucket/x")


def test_a_store_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        spec = StorageSpec.model_validate({"endpoint": endpoint})
        keys = ("key", "secret")
        pod = Pod(
            logs=tmp_path / "logs",
            uri="s3://somewhere/run",
            open_store=lambda: Store.open(spec, keys=keys),
            limits=replace(SMALL, every_s=0.01),
        )
        pod.write("trainer-0.1.log", b"line\n")
        shipper = pod.shipper()
        shipper.start()
        connection, _ = silent.accept()
        with connection:  # it has asked
            begin_s = time.monotonic()
            shipper.hurry()
            shipper.close(0.5)
            assert time.monotonic() - begin_s < 2


def test_the_disk_does_not_fill(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    path = pod.logs / "rank-0.1.0.log"
    pod.write("trainer-0.1.log", b"quiet\n")
    for number in range(40):
        pod.write(path.name, number.to_bytes() * (1 << 18))
        shipper.look()
        assert path.stat().st_blocks * 512 <= pod.limits.file_bytes + (1 << 19)
    text = pod.written[path.name]
    assert path.stat().st_size == len(text)
    assert path.read_bytes().endswith(text[-pod.limits.file_bytes // 2 :])
    of_rank = {b.offset: data for b, data in blocks(s3, pod.uri).items() if b.stream != "trainer"}
    assert all(text[offset : offset + len(data)] == data for offset, data in of_rank.items())


def test_a_container_started_again_leaves_out_what_the_disk_has_lost(pod: Pod, s3: Store) -> None:
    """What is read from a hole would be zeros."""
    pod.write("trainer-0.1.log", b"quiet\n")
    pod.write("rank-0.1.0.log", os.urandom(600_000))
    punch(pod.logs / "rank-0.1.0.log", 300_000)
    pod.shipper().look()
    of_rank = {b.offset: data for b, data in blocks(s3, pod.uri).items() if b.stream != "trainer"}
    assert min(of_rank) == 300_000 - 300_000 % (1 << 16)
    text = pod.written["rank-0.1.0.log"]
    assert all(text[offset : offset + len(data)] == data for offset, data in of_rank.items())
    assert sum(map(len, of_rank.values())) == len(text) - min(of_rank)


def test_logs_of_old_generations_leave_the_disk_first(pod: Pod) -> None:
    pod.limits = replace(SMALL, disk_bytes=2 << 20)
    shipper = pod.shipper()
    pod.write("trainer-0.1.log", b"quiet\n")
    paths = [pod.logs / f"rank-0.1.{generation}.log" for generation in range(6)]
    for at, path in enumerate(paths):
        pod.write(path.name, os.urandom(900_000))
        os.utime(path, (at, at))
    shipper.look()
    used = [path.stat().st_blocks * 512 for path in paths]
    assert all(size <= 3 * pod.limits.tail_bytes for size in used[:3])
    assert min(used[-2:]) >= 900_000


@pytest.mark.parametrize("is_store_there", [True, False], ids=["store", "no store"])
def test_logs_long_past_leave_the_disk(is_store_there: bool, pod: Pod, s3: Store) -> None:
    def away() -> Store:
        raise StorageError("the store is away")

    pod.limits = replace(SMALL, attempts=3, generations=2)
    pod.open_store = pod.open_store if is_store_there else away
    shipper = pod.shipper()
    for attempt in range(1, 6):
        pod.write(f"trainer-0.{attempt}.log", b"line\n")
        pod.write(f"rank-0.{attempt}.0.log", b"line\n")
        shipper.look()
    for generation in range(1, 4):
        pod.write(f"rank-0.5.{generation}.log", b"line\n")
        shipper.look()
    assert {path.name for path in pod.logs.glob("*.log")} == {
        "trainer-0.3.log", "trainer-0.4.log", "trainer-0.5.log",
        "rank-0.3.0.log", "rank-0.4.0.log", "rank-0.5.2.log", "rank-0.5.3.log",
    }  # fmt: skip
    if is_store_there:
        assert {f"rank-0.5.{generation}.log" for generation in range(4)} <= set(stored(s3, pod.uri))


def test_the_first_pod_of_an_attempt_deletes_those_long_past(pod: Pod, s3: Store) -> None:
    pod.limits = replace(SMALL, attempts=3)
    for attempt in range(1, 6):
        other = replace(pod, logs=pod.logs.with_name(f"logs-{attempt}"), written={})
        other.write(f"trainer-1.{attempt}.log", b"line\n")
        other.shipper(f"{JOB}-1-1").look()
    assert {block.place.attempt for block in blocks(s3, pod.uri)} == {1, 2, 3, 4, 5}
    pod.write("trainer-0.6.log", b"line\n")
    pod.shipper().look()
    assert {block.place.attempt for block in blocks(s3, pod.uri)} == {4, 5, 6}


def test_a_pod_made_anew_under_its_name_leaves_the_log_of_the_one_before(
    pod: Pod, s3: Store
) -> None:
    pod.write("trainer-0.1.log", b"of the first")
    (pod.logs / BEGUN_FILE).touch()
    os.utime(pod.logs / BEGUN_FILE, (1, 1))
    pod.shipper().look()
    anew = replace(pod, logs=pod.logs.with_name("anew"), written={})
    anew.write("trainer-0.1.log", b"of the second, which says more")
    anew.shipper().look()
    found = sorted((block.place.folder, data) for block, data in blocks(s3, pod.uri).items())
    assert [data for _, data in found] == [*pod.written.values(), *anew.written.values()]


def test_the_rest_is_shipped_at_the_end(pod: Pod, s3: Store) -> None:
    shipper = pod.shipper()
    shipper.start()
    pod.write("trainer-0.1.log", b"first\n")
    shipper.hurry()
    pod.write("trainer-0.1.log", b"last\n")
    shipper.close(10)
    assert stored(s3, pod.uri) == pod.written
