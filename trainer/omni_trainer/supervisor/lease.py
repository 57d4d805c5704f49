"""Renews the progress Lease with what rank 0's pod knows. Never disturbs training.

The only place of the trainer that talks to Kubernetes: two plain requests with a token that may
read and change this one Lease.
"""

import json
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from omni_contract.names import ANNOTATION_PROGRESS
from omni_contract.records import History, JobHeartbeat
from omni_contract.spec_run import FaultClass
from omni_trainer.supervisor.heartbeat import RunReader

RENEW_S = 5.0
_LOOK_S = 0.25
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseApi:
    """One Lease at the API server."""

    url: str
    token_dir: Path
    """Files `token` and `ca.crt`, both replaced now and then."""

    @classmethod
    def of(cls, lease: str, *, host: str, port: str, token_dir: Path) -> Self:
        """`lease` is NAMESPACE/NAME."""
        namespace, _, name = lease.partition("/")
        where = f"[{host}]" if ":" in host else host
        path = f"apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
        return cls(url=f"https://{where}:{port}/{path}", token_dir=token_dir)

    def get(self) -> dict[str, Any]:
        """Read it. Raises OSError."""
        return self._ask("GET", None)

    def patch(self, change: dict[str, Any]) -> dict[str, Any]:
        """Merge a change into it; returns it whole. Raises OSError."""
        return self._ask("PATCH", change)

    def _ask(self, method: str, body: dict[str, Any] | None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {(self.token_dir / 'token').read_text().strip()}",
                "Content-Type": "application/merge-patch+json",
                "Accept": "application/json",
            },
        )
        trusted = ssl.create_default_context(cafile=str(self.token_dir / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # a proxy of the user's is for object stores
            urllib.request.HTTPSHandler(context=trusted),
        )
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


class LeaseKeeper:
    """A thread that renews the Lease: every RENEW_S, and at once when generation or phase change.

    A pod that was rank 0's in an older attempt leaves the Lease alone.
    """

    def __init__(self, api: LeaseApi, reader: RunReader, *, holder: str) -> None:
        """`holder`: name of this pod."""
        self._api = api
        self._reader = reader
        self._holder = holder
        self._part: tuple[int, History] | None = None
        self._over: tuple[int, str] | None = None
        self._version: str | None = None
        """resourceVersion as last seen; None: to be read first."""
        self._told: tuple[int, int, str, FaultClass | None] | None = None
        self._next_s = 0.0
        self._complaint = ""
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def follow(self, attempt: int, history: History) -> None:
        """This pod holds rank 0 in an attempt; `history`: the restarts before it."""
        with self._lock:
            self._part, self._over = (attempt, history), None

    def rest(self) -> None:
        """This pod holds rank 0 no longer."""
        with self._lock:
            self._part = None

    def tell_over(self, attempt: int, message: str) -> None:
        """The supervisors of an attempt lost each other; its pods wait for another one."""
        with self._lock:
            self._over = (attempt, message)

    def stop(self) -> None:
        """Renew a last time, if that takes no longer than a request may."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2 * _TIMEOUT_S)

    def _keep(self) -> None:
        while not self._stopped.wait(_LOOK_S):
            self._look()
        self._next_s = 0.0
        self._look()

    def _look(self) -> None:
        with self._lock:
            part, over = self._part, self._over
        if part is None:
            return
        heartbeat = self._read(part, over)
        key = (heartbeat.attempt, heartbeat.generation, heartbeat.phase, heartbeat.last_fault)
        is_due = time.monotonic() >= self._next_s
        if not is_due and (key == self._told or self._complaint):
            return
        self._next_s = time.monotonic() + RENEW_S
        try:
            self._renew(part, over)
        except (OSError, ValueError) as exc:  # refused, no connection, no token yet, no JSON
            self._version = None
            self._complain(f"{type(exc).__name__}: {exc}")
        else:
            self._told = key

    def _read(self, part: tuple[int, History], over: tuple[int, str] | None) -> JobHeartbeat:
        heartbeat = self._reader.read(*part)
        if over is None or over[0] != heartbeat.attempt:
            return heartbeat
        news = {"last_fault": FaultClass.RENDEZVOUS, "last_message": over[1]}
        return heartbeat.model_copy(update=news)

    def _renew(self, part: tuple[int, History], over: tuple[int, str] | None) -> None:
        if self._version is None:
            lease = self._api.get()
            before = _heartbeat_in(lease)
            if before is not None and before.attempt > part[0]:
                self._complain(f"attempt {before.attempt} holds it, this pod is of {part[0]}")
                return
            if before is not None:
                self._reader.tokens.begin(step=before.step, tokens=before.tokens)
            self._version = lease["metadata"]["resourceVersion"]
        annotations = {ANNOTATION_PROGRESS: self._read(part, over).model_dump_json()}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        change = {
            # Another writer since the last look: then it is read again before it is written.
            "metadata": {"resourceVersion": self._version, "annotations": annotations},
            "spec": {"holderIdentity": self._holder, "renewTime": now},
        }
        self._version = self._api.patch(change)["metadata"]["resourceVersion"]
        self._complaint = ""

    def _complain(self, message: str) -> None:
        """Once for each kind of failure in a row."""
        if message != self._complaint:
            print(f"the progress Lease is not renewed: {message}", file=sys.stderr)
        self._complaint = message


def _heartbeat_in(lease: dict[str, Any]) -> JobHeartbeat | None:
    raw = (lease["metadata"].get("annotations") or {}).get(ANNOTATION_PROGRESS)
    try:
        return None if raw is None else JobHeartbeat.model_validate_json(raw)
    except ValidationError:
        return None
