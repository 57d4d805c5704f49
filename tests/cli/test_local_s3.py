"""The S3 server of laptops and tests: it starts, keeps what it holds, and leaves nothing behind."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from omni_cli import local_s3
from omni_cli.local_s3 import LocalS3, choose_ports, is_port_free
from omni_contract.errors import StorageError
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store

_CHILD = """
import sys, time
from pathlib import Path
from omni_cli.local_s3 import LocalS3
with LocalS3(Path(sys.argv[1])) as server:
    print(server.endpoint, flush=True)
    time.sleep(120)
"""


def servers_of(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder / "data") in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def sockets_of(server: LocalS3) -> list[Path]:
    assert server._ports is not None
    names = [f"seaweedfs-*-{port}.sock" for port in server._ports.all()]
    return [path for name in names for path in Path("/tmp").glob(name)]


def test_what_was_written_is_there_after_a_restart_on_other_ports(tmp_path: Path) -> None:
    with LocalS3(tmp_path / "s3") as server:
        store = server.open()
        store.create_bucket("kept")
        store.write("s3://kept/a", b"1" * 10**6)
        first, keys = server.endpoint, dict(server.env)
        mine = sockets_of(server)
        assert mine
    assert not any(path.exists() for path in mine)
    assert is_port_free(int(first.rpartition(":")[2])) and not servers_of(tmp_path)
    with LocalS3(tmp_path / "s3") as server:
        assert server.open().read("s3://kept/a") == b"1" * 10**6
        assert server.env["AWS_SECRET_ACCESS_KEY"] == keys["AWS_SECRET_ACCESS_KEY"]


def test_a_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LocalS3(Path("cache/s3")) as server:
        server.open().create_bucket("here")
    assert (tmp_path / "cache/s3/data").is_dir()


def test_a_write_to_a_misspelt_bucket_is_an_error(s3_server: LocalS3) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        s3_server.open().write("s3://omnni/a", b"1")


def test_a_shell_set_up_for_aws_does_not_get_in_the_way(
    s3_server: LocalS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporary credentials and an endpoint of S3 alone stand beside what the server hands out."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another account")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    store = Store.open(StorageSpec())
    store.create_bucket("mine")
    store.write("s3://mine/a", b"12345")
    [part] = store.read_ranges("s3://mine/a", [(1, 2)])
    assert bytes(part) == b"23"


def test_it_listens_on_loopback_only(s3_server: LocalS3) -> None:
    [process] = [p for p in psutil.Process().children(recursive=True) if p.name() == "weed"]
    listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(listening) >= 5
    assert {c.laddr.ip for c in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("offset", [0, local_s3.GRPC_OFFSET], ids=["http", "grpc"])
def test_a_fixed_port_in_use_is_named(tmp_path: Path, offset: int) -> None:
    with socket.socket() as other:
        wanted = choose_ports(None).s3
        other.bind(("127.0.0.1", wanted + offset))
        other.listen()
        with (
            pytest.raises(StorageError, match=f"port {wanted + offset}: in use"),
            LocalS3(tmp_path, port=wanted),
        ):
            pass
    assert not servers_of(tmp_path)


@pytest.mark.parametrize("port", [80, 60_000])
def test_a_port_that_cannot_be(port: int) -> None:
    with pytest.raises(StorageError, match=f"port {port}: .*choose one from 1024 to 55535"):
        choose_ports(port)


def test_two_do_not_serve_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_s3, "LOCK_S", 0.2)
    with (
        LocalS3(tmp_path) as server,
        pytest.raises(StorageError, match="another local S3 server holds this folder"),
        LocalS3(tmp_path),
    ):
        pass
    assert not servers_of(tmp_path)
    server.stop()  # a second time changes nothing


def test_it_dies_with_its_parent_and_the_folder_can_be_served_again(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline().startswith("http://")
        assert len(servers_of(tmp_path)) == 1
    finally:
        parent.kill()
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    with LocalS3(tmp_path) as server:  # waits for the orphan's end
        assert len(servers_of(tmp_path)) == 1
        server.open().create_bucket("again")
    deadline = time.monotonic() + 5
    while servers_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not servers_of(tmp_path)


def test_a_full_disk_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_s3, "MIN_FREE_BYTES", 10**18)
    with (
        pytest.raises(StorageError, match=r"MB left, the local S3 server needs"),
        LocalS3(tmp_path),
    ):
        pass


def test_a_start_that_fails_says_why_and_frees_the_folder(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the server wants a folder")
    with pytest.raises(StorageError, match=f"{tmp_path}: cannot hold"), LocalS3(tmp_path):
        pass
    (tmp_path / "data").unlink()
    with LocalS3(tmp_path):
        pass
