"""The door to S3: ranges come back as asked, failures as one sentence with a way out."""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omni_cli.local_s3 import is_port_free
from omni_contract.errors import StorageError, UnavailableError
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store, coalesce, split_uri
from tests.fakes.refusing_s3 import RefusingS3

DATA = bytes(range(256)) * 4096


def test_near_ranges_become_one() -> None:
    assert coalesce([(100, 10), (0, 10), (10, 5)], gap_bytes=0) == [(0, 15), (100, 10)]
    assert coalesce([(100, 10), (0, 10)], gap_bytes=90) == [(0, 110)]
    assert coalesce([(0, 100), (10, 5)], gap_bytes=0) == [(0, 100)]
    assert coalesce([]) == []


def test_ranges_come_back_in_the_order_asked(s3: Store, bucket: str) -> None:
    s3.write(f"{bucket}/x", DATA)
    ranges = [(900_000, 7), (5, 3), (0, 0), (6, 1), (500_000, 100_000), (5, 3), (1_048_570, 6)]
    got = s3.read_ranges(f"{bucket}/x", ranges)
    assert [bytes(part) for part in got] == [DATA[o : o + n] for o, n in ranges]


def test_waste_is_metered(s3: Store, bucket: str) -> None:
    s3.write(f"{bucket}/x", DATA)
    before = s3.needed_bytes, s3.fetched_bytes
    s3.read_ranges(f"{bucket}/x", [(0, 10), (1000, 10)])
    assert s3.needed_bytes - before[0] == 20
    assert s3.fetched_bytes - before[1] == 1010


def test_folders_are_listed_and_deleted(s3: Store, bucket: str) -> None:
    for key in ("a/x", "a/deep/y", "b/z", "file"):
        s3.write(f"{bucket}/{key}", b"1")
    assert s3.list_folders(bucket) == ["a", "b"]
    assert s3.list_folders(f"{bucket}/a") == ["deep"]
    s3.delete_folder(f"{bucket}/a")
    s3.delete_folder(f"{bucket}/a")
    assert [info.uri for info in s3.list(bucket)] == [f"{bucket}/b/z", f"{bucket}/file"]


def test_a_range_past_the_end_is_short(s3: Store, bucket: str) -> None:
    """A shard cut short must reach the check that names it, not die as a strange HTTP error."""
    s3.write(f"{bucket}/x", b"0123456789")
    got = s3.read_ranges(f"{bucket}/x", [(0, 2), (8, 10), (20, 5)])
    assert [bytes(part) for part in got] == [b"01", b"89", b""]
    assert [bytes(part) for part in s3.read_ranges(f"{bucket}/x", [(2**20, 5)])] == [b""]


def test_objects_are_written_listed_and_deleted(s3: Store, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(DATA * 20)
    s3.write_file(f"{bucket}/d/big", tmp_path / "big")
    s3.write(f"{bucket}/d/small", b"1")
    s3.write(f"{bucket}/dd", b"no part of the folder d")
    assert [(i.uri, i.size_bytes) for i in s3.list(f"{bucket}/d")] == [
        (f"{bucket}/d/big", len(DATA) * 20),
        (f"{bucket}/d/small", 1),
    ]
    s3.read_file(f"{bucket}/d/big", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == DATA * 20
    assert s3.size(f"{bucket}/d/small") == 1 and s3.exists(f"{bucket}/d/small")
    s3.delete(f"{bucket}/d/small")
    s3.delete(f"{bucket}/d/small")
    assert not s3.exists(f"{bucket}/d/small")


def test_a_missing_bucket_is_named(s3: Store, tmp_path: Path) -> None:
    uri = "s3://no-such-bucket/a"
    (tmp_path / "f").write_bytes(b"1")
    for use in (
        lambda: s3.read(uri),
        lambda: s3.read_ranges(uri, [(0, 1)]),
        lambda: s3.size(uri),
        lambda: s3.exists(uri),
        lambda: s3.list(uri),
        lambda: s3.write(uri, b"1"),
        lambda: s3.write_file(uri, tmp_path / "f"),
        lambda: s3.read_file(uri, tmp_path / "g"),
    ):
        with pytest.raises(StorageError, match="s3://no-such-bucket: there is no such bucket at"):
            use()


def test_a_missing_object_is_named(s3: Store, bucket: str, tmp_path: Path) -> None:
    for use in (
        lambda: s3.read(f"{bucket}/a"),
        lambda: s3.read_ranges(f"{bucket}/a", [(0, 1)]),
        lambda: s3.size(f"{bucket}/a"),
        lambda: s3.read_file(f"{bucket}/a", tmp_path / "g"),
    ):
        with pytest.raises(StorageError, match=f"{bucket}/a: there is no such object"):
            use()


def test_wrong_keys_are_refused(s3: Store, bucket: str) -> None:
    s3.write(f"{bucket}/a", b"1")
    other = Store.open(StorageSpec(endpoint=s3.endpoint), keys=("somebody", "else"))
    for use in (
        lambda: other.read(f"{bucket}/a"),
        lambda: other.read_ranges(f"{bucket}/a", [(0, 1)]),
        lambda: other.exists(f"{bucket}/a"),
    ):
        with pytest.raises(StorageError, match="refuses these credentials.*AWS_ACCESS_KEY_ID"):
            use()


@pytest.fixture
def empty_chain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """The standard AWS chain finds nothing but what a test sets."""
    for name in (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return monkeypatch


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"AWS_PROFILE": "nobody"}, r"^S3: .*profile \(nobody\).*; mend AWS_PROFILE"),
        ({"AWS_ACCESS_KEY_ID": "a"}, r"^S3: .*missing: AWS_SECRET_ACCESS_KEY; mend AWS_PROFILE"),
    ],
    ids=["profile", "half a key"],
)
def test_credentials_that_cannot_be(
    env: Mapping[str, str], words: str, empty_chain: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        empty_chain.setenv(name, value)
    with pytest.raises(StorageError, match=words):
        Store.open(StorageSpec(endpoint="http://127.0.0.1:9"))


@pytest.mark.usefixtures("empty_chain")
@pytest.mark.parametrize("endpoint", ["http://my_store:9000", "http://store name:9000"])
def test_an_endpoint_that_cannot_be(endpoint: str) -> None:
    words = f"^storage.endpoint: {endpoint}: this is no address of .*; write it as http://HOST:PORT"
    with pytest.raises(StorageError, match=words):
        Store.open(StorageSpec(endpoint=endpoint), keys=("a", "b"))


def test_an_endpoint_of_the_chain_that_cannot_be(empty_chain: pytest.MonkeyPatch) -> None:
    empty_chain.setenv("AWS_ENDPOINT_URL", "store:9000")
    with pytest.raises(StorageError, match="^AWS_ENDPOINT_URL: this is no address .*store:9000"):
        Store.open(StorageSpec(), keys=("a", "b"))


def test_a_region_that_cannot_be() -> None:
    spec = StorageSpec(endpoint="http://127.0.0.1:9", region="the moon")
    with pytest.raises(StorageError, match="^S3: .*'the moon'.*storage.region"):
        Store.open(spec, keys=("a", "b"))


@pytest.mark.usefixtures("empty_chain")
def test_no_credentials_at_all() -> None:
    with pytest.raises(StorageError, match="no credentials found; set AWS_ACCESS_KEY_ID"):
        Store.open(StorageSpec(endpoint="http://127.0.0.1:9"))


def test_a_server_that_is_not_there() -> None:
    port = next(port for port in range(2000, 3000) if is_port_free(port))
    endpoint = StorageSpec(endpoint=f"http://127.0.0.1:{port}")
    store = Store.open(endpoint, keys=("a", "b"), outage_s=0.5)
    for use in (lambda: store.read("s3://b/a"), lambda: store.read_ranges("s3://b/a", [(0, 1)])):
        with pytest.raises(StorageError, match=f"127.0.0.1:{port} cannot be reached"):
            use()


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "ServiceUnavailable")])
def test_a_server_in_trouble_is_an_outage_that_may_pass(status: int, code: str) -> None:
    """One that starts says so for a while; whose fault it is decides about restarts."""
    with RefusingS3(status=status, code=code) as server:
        spec = StorageSpec(endpoint=server.endpoint)
        store = Store.open(spec, keys=("a", "b"), outage_s=0.5)
        with pytest.raises(UnavailableError, match=f"answers {code} however often"):
            store.read("s3://b/a")
        with pytest.raises(UnavailableError, match=f"answers {status} however often"):
            store.read_ranges("s3://b/a", [(0, 1)])


def test_disks_that_are_away_are_an_outage_also_where_sizes_are_known() -> None:
    with RefusingS3(status=503, code="ServiceUnavailable", size=100) as server:
        spec = StorageSpec(endpoint=server.endpoint)
        store = Store.open(spec, keys=("a", "b"), outage_s=0.5)
        assert store.size("s3://b/a") == 100
        with pytest.raises(UnavailableError, match="answers an error however often"):
            store.read_ranges("s3://b/a", [(0, 1)])


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [(501, "NotImplemented", "refused"), (507, "XMinioStorageFull", "has no space left")],
)
def test_what_a_server_cannot_do_and_a_full_one_are_no_outage(
    status: int, code: str, says: str
) -> None:
    with RefusingS3(status=status, code=code) as server:
        store = Store.open(StorageSpec(endpoint=server.endpoint), keys=("a", "b"))
        with pytest.raises(StorageError, match=says) as refused:
            store.write("s3://b/a", b"1")
    assert not isinstance(refused.value, UnavailableError)


def test_a_read_outlives_a_short_outage() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # connections are refused until it listens
        endpoint = StorageSpec(endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
        store = Store.open(endpoint, keys=("a", "b"))
        with ThreadPoolExecutor(1) as thread:
            reading = thread.submit(store.read_ranges, "s3://b/a", [(3, 4)])
            with pytest.raises(TimeoutError):  # five tries would have ended long before
                reading.result(3)
            listener.listen()
            listener.settimeout(10)
            connection, _ = listener.accept()
            with connection:
                assert b"bytes=3-6" in connection.recv(65536)
                connection.sendall(
                    b"HTTP/1.1 206 Partial Content\r\nContent-Length: 4\r\n"
                    b'Content-Range: bytes 3-6/9\r\nETag: "e"\r\n'
                    b"Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n\r\ndefg"
                )
                assert [bytes(part) for part in reading.result(10)] == [b"defg"]


def test_a_missing_local_file_is_not_taken_for_a_missing_object(
    s3: Store, bucket: str, tmp_path: Path
) -> None:
    with pytest.raises(StorageError, match=r"shard\.tar: is missing, so .*/a cannot be written"):
        s3.write_file(f"{bucket}/a", tmp_path / "shard.tar")


@pytest.mark.parametrize("uri", ["b/a", "http://b/a", "s3:///a", ""])
def test_what_is_no_s3_address(uri: str) -> None:
    with pytest.raises(StorageError, match="no S3 address"):
        split_uri(uri)


def test_creating_a_bucket_twice_changes_nothing(s3: Store, bucket: str) -> None:
    s3.write(f"{bucket}/a", b"1")
    s3.create_bucket(split_uri(bucket)[0])
    assert s3.read(f"{bucket}/a") == b"1"
