"""What `kubectl mmtj logs` runs in the cluster: stored logs come back, or it says which do."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract import names
from omni_contract.errors import UnavailableError
from omni_contract.log_store import NOTICE, LogBlock, LogPlace
from omni_contract.packed import pack
from omni_contract.plan import JobPlan
from omni_dataloader.read_logs import LogReader, Printer, Wanted, main
from omni_dataloader.store import Store
from tests.fakes.forwarder import forwarding
from tests.fakes.refusing_s3 import RefusingS3
from tests.fakes.sidecar_client import fake_plan
from tests.trainer.test_rendezvous import free_address

JOB = "stamps-5d1ce"
Capture = pytest.CaptureFixture[bytes]


class Logs:
    """Stored logs of a job, and its plan as a pod mounts it."""

    def __init__(self, folder: Path, store: Store, uri: str) -> None:
        self.store, self.uri = store, uri
        self.plan_dir = folder / "plan"
        self.plan_dir.mkdir()
        raw = fake_plan("s3://serve").model_dump(mode="json", by_alias=True)
        raw["spec"]["checkpoint"]["uri"] = uri
        plan = JobPlan.model_validate(raw)
        for name, piece in pack(names.PLAN_FILE, plan.to_json()).items():
            (self.plan_dir / name).write_bytes(piece)

    def add(
        self,
        stream: str,
        *parts: tuple[int, bytes],
        attempt: int = 1,
        node: int | None = 0,
        at: str | None = None,
    ) -> None:
        pod = f"{JOB}-{attempt}-{8 if node is None else node}"
        place = LogPlace(job=JOB, attempt=attempt, node=node, pod=pod, begun=at)
        for offset, data in parts:
            block = LogBlock(place=place, stream=stream, offset=offset)
            self.store.write(f"{self.uri}/{block.key}", data)

    def arguments(self, *more: str) -> list[str]:
        return [f"--plan-dir={self.plan_dir}", f"--job={JOB}", *more]


@pytest.fixture
def logs(tmp_path: Path, s3: Store, bucket: str) -> Logs:
    stored = Logs(tmp_path, s3, bucket)
    stored.add("trainer", (0, b"one\ntwo\n"), (8, b"three\nfo"), (16, b"ur\n"))
    stored.add("rank-0.0", (0, b"first life\n"))
    stored.add("rank-0.1", (0, b"second life\n"))
    stored.add("rank-2.0", (0, b"I am 2\n"), node=1)
    stored.add("data", (0, b"served\n"), node=1)
    stored.add("trainer", (0, b"anew\n"), attempt=3)
    stored.add("trainer", (0, b"waits\n"), attempt=3, node=None)
    return stored


def printed(logs: Logs, capsysbinary: Capture, *arguments: str) -> str:
    assert main(logs.arguments(*arguments)) == 0
    said = capsysbinary.readouterr()
    assert said.err == b""
    return said.out.decode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "anew\n"),
        (["--attempt=1"], "one\ntwo\nthree\nfour\n"),
        (["--attempt=1", "--tail=2"], "three\nfour\n"),
        (["--attempt=1", "--tail=3"], "two\nthree\nfour\n"),
        (["--attempt=1", "--tail=9"], "one\ntwo\nthree\nfour\n"),
        (["--attempt=1", "--tail=0"], ""),
        (["--attempt=1", "--tail=-1"], "one\ntwo\nthree\nfour\n"),
        (["--attempt=1", "--node=1", "--container=data"], "served\n"),
        (["--attempt=1", "--rank=2"], "I am 2\n"),
        (
            ["--attempt=1", "--rank=0"],
            "==> rank-0.0, attempt 1, pod stamps-5d1ce-1-0 <==\nfirst life\n"
            "==> rank-0.1, attempt 1, pod stamps-5d1ce-1-0 <==\nsecond life\n",
        ),
        (
            ["--attempt=1", "--rank=0", "--tail=1"],
            "==> rank-0.1, attempt 1, pod stamps-5d1ce-1-0 <==\nsecond life\n",
        ),
    ],
)
def test_the_log_asked_for_is_printed(
    arguments: list[str], says: str, logs: Logs, capsysbinary: Capture
) -> None:
    assert printed(logs, capsysbinary, *arguments) == says


@pytest.mark.parametrize("stream", ["trainer", "rank-0.0"])
def test_pods_that_had_one_name_follow_each_other(
    stream: str, logs: Logs, capsysbinary: Capture
) -> None:
    begun = ("20261130T150900Z", "20261130T151000Z")
    for at in reversed(begun):
        logs.add(stream, (0, f"{at}\n".encode()), attempt=4, at=at)
        logs.add("rank-0.1", (0, f"again after {at}\n".encode()), attempt=4, at=at)
    name = ["--rank=0"] if stream != "trainer" else []
    said = printed(logs, capsysbinary, "--attempt=4", *name).splitlines()
    title = "==> {}, attempt 4, pod stamps-5d1ce-4-0 begun {} <=="
    expected = []
    for at in begun:
        expected += [title.format(stream, at), at]
        if name:
            expected += [title.format("rank-0.1", at), f"again after {at}"]
    assert said == expected


def test_a_line_that_is_being_written_is_one_of_the_last(logs: Logs, capsysbinary: Capture) -> None:
    logs.add("trainer", (0, b"one\ntwo\nthr"), attempt=4)
    assert printed(logs, capsysbinary, "--tail=2") == "two\nthr"
    assert printed(logs, capsysbinary, "--tail=1") == "thr"
    assert printed(logs, capsysbinary, "--tail=0") == ""


def test_what_was_dropped_is_told(logs: Logs, capsysbinary: Capture) -> None:
    logs.add("trainer", (0, b"begin\n"), (3 << 20, b"end\n"), attempt=4)
    said = printed(logs, capsysbinary, "--attempt=4")
    assert said.splitlines() == ["begin", "", "[... 3.0 MiB were dropped here ...]", "end"]
    assert printed(logs, capsysbinary, "--attempt=4", "--tail=1") == "end\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--attempt=2"], "no logs of attempt 2 are stored; there are those of attempts 1, 3"),
        (["--node=5"], "no log of container trainer of node 5 is stored for attempt 3; there are "
         "those of nodes 0 (and of attempts 1, 3)"),
        (["--rank=7", "--attempt=1"], "no log of rank 7 is stored for attempt 1; there are those "
         "of ranks 0, 2"),
        (["--job=other-00000"], "no logs are stored under {uri}/logs/other-00000 yet"),
        (["--plan-dir=/nowhere"], "/nowhere: no plan.json is packed there"),
    ],
)  # fmt: skip
def test_what_there_is_is_told_where_a_log_is_not(
    arguments: list[str], says: str, logs: Logs, capsysbinary: Capture
) -> None:
    assert main(logs.arguments(*arguments)) == 2
    said = capsysbinary.readouterr()
    assert said.out == b""
    assert said.err.decode().startswith(says.format(uri=logs.uri))


def test_a_block_that_goes_while_it_is_read_is_nothing(logs: Logs) -> None:
    reader = LogReader(logs.store, logs.uri, JOB)
    (stream,) = reader.find(Wanted(attempt=1))
    gone = stream.parts[1].block
    logs.store.delete(f"{logs.uri}/{gone.key}")
    assert reader.read(gone) == b""
    assert reader.read(stream.parts[0].block) == b"one\ntwo\n"


def test_a_reader_that_follows_ends_with_whoever_asked(
    logs: Logs, s3_env: Mapping[str, str]
) -> None:
    command = [sys.executable, "-m", "omni_dataloader.read_logs"]
    process = subprocess.Popen(
        [*command, *logs.arguments("--follow", "--rank=2", "--attempt=1")],
        env={**os.environ, **s3_env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"I am 2\n"
        logs.add("rank-2.0", (0, b"I am 2\nand on\n"), node=1)  # the newest block has grown
        assert process.stdout.readline() == b"and on\n"
        logs.add("rank-2.1", (0, b"again\n"), node=1)
        assert process.stdout.readline().startswith(b"==> rank-2.1")
        assert process.stdout.readline() == b"again\n"
        process.stdin.close()
        begin_s = time.monotonic()
        assert process.wait(10) == 0
        assert time.monotonic() - begin_s < 5


@pytest.mark.parametrize(
    ("status", "says"),
    [(None, "cannot be reached"), (503, "answers 503 however often")],
    ids=["away", "in-trouble"],
)
def test_a_log_is_followed_through_an_outage_of_the_store(
    status: int | None,
    says: str,
    logs: Logs,
    s3_env: Mapping[str, str],
    s3_server: LocalS3,
) -> None:
    port, server = free_address().port, int(s3_server.endpoint.rpartition(":")[2])
    endpoint = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "omni_dataloader.read_logs", *logs.arguments("--follow")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env={**os.environ, **s3_env, **endpoint}, stdin=pipe, stdout=pipe, stderr=pipe
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        with forwarding(port, to=server):
            assert process.stdout.readline() == b"anew\n"
        with trouble(port, status):
            said = process.stderr.readline().decode()
            assert said.startswith(NOTICE)
            assert says in said and said.endswith("Still trying.\n")
        logs.add("trainer", (0, b"anew\nand on\n"), attempt=3)
        with forwarding(port, to=server):
            assert process.stdout.readline() == b"and on\n"
            process.stdin.close()
            assert process.wait(30) == 0
        assert process.stderr.read().decode() == f"{NOTICE}the object store answers again\n"


@contextmanager
def trouble(port: int, status: int | None) -> Iterator[None]:
    """The store answers with this status, or not at all."""
    if status is None:
        yield
        return
    refusing = RefusingS3(status=status, code=str(status))
    with refusing, forwarding(port, to=int(refusing.endpoint.rpartition(":")[2])):
        yield


def test_what_was_printed_before_an_outage_is_not_printed_again(logs: Logs) -> None:
    class Away(LogReader):
        """A store that answers twice, and then not once."""

        num_reads = 0

        def read(self, block: LogBlock) -> bytes:
            self.num_reads += 1
            if self.num_reads == 3:
                raise UnavailableError("away")
            return super().read(block)

    reader, out = Away(logs.store, logs.uri, JOB), io.BytesIO()
    printer, streams = Printer(reader, out), reader.find(Wanted(attempt=1))
    with pytest.raises(UnavailableError):
        printer.print_new(streams)
    printer.print_new(streams)
    assert out.getvalue() == b"one\ntwo\nthree\nfour\n"
