"""What happened to jobs, pods and nodes, recorded by watches of the test's own: the operator is
judged by what the API server told everybody, not by what it says of itself."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self

from urllib3.exceptions import HTTPError

from omni_contract.names import ANNOTATION_ATTEMPT, ANNOTATION_INDEX, GROUP, KIND, PLURAL, VERSION
from omni_contract.status import JobStatus
from tests.cluster.api import Api, ApiError, Object
from tests.cluster.nodes import GPU

OUT_OF_SERVICE: Final = "node.kubernetes.io/out-of-service"

_WATCH_S: Final = 5
_AGAIN_S: Final = 0.3

What = Literal["job", "pod", "node"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """An object as it was from one moment on."""

    version: int
    """Resource version. One sequence for objects of all kinds, so it orders them."""
    time_s: float
    """When it was seen."""
    name: str
    uid: str
    is_there: bool
    """False: it was deleted."""
    is_deleting: bool
    is_after_gap: bool = False
    """Found by a listing: what it was since the fact before, nobody was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFact(Fact):
    """A job."""

    status: JobStatus
    num_nodes: int
    is_suspended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFact(Fact):
    """A pod of any owner."""

    job_uid: str | None
    index: int | None
    attempt: int
    is_gated: bool
    phase: str
    reason: str
    node: str | None
    gpus: int

    @property
    def is_live(self) -> bool:
        """Whether it may run, or run soon."""
        return self.is_there and self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact(Fact):
    """A node."""

    is_ready: bool
    is_off: bool
    """Somebody marked it out of service."""
    gpus: int

    @property
    def is_lost(self) -> bool:
        """Whether nobody answers there."""
        return not self.is_there or not self.is_ready or self.is_off


def read_job(event: Mapping[str, Any]) -> JobFact:
    """A job."""
    raw = event["raw"]
    return JobFact(
        **_base(event),
        status=JobStatus.model_validate(raw.get("status") or {}),
        num_nodes=raw["spec"]["resources"]["nodes"],
        is_suspended=bool(raw["spec"].get("suspend")),
    )


def read_pod(event: Mapping[str, Any]) -> PodFact:
    """A pod."""
    raw = event["raw"]
    meta, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    annotations = meta.get("annotations") or {}
    owners = [owner for owner in meta.get("ownerReferences") or () if owner["kind"] == KIND]
    index = annotations.get(ANNOTATION_INDEX)
    requests = [c.get("resources", {}).get("requests", {}) for c in spec["containers"]]
    return PodFact(
        **_base(event),
        job_uid=owners[0]["uid"] if owners else None,
        index=int(index) if index else None,
        attempt=int(annotations.get(ANNOTATION_ATTEMPT, 0)),
        is_gated=bool(spec.get("schedulingGates")),
        phase=status.get("phase", "Pending"),
        reason=status.get("reason", ""),
        node=spec.get("nodeName"),
        gpus=sum(int(asked.get(GPU, 0)) for asked in requests),
    )


def read_node(event: Mapping[str, Any]) -> NodeFact:
    """A node."""
    raw = event["raw"]
    status = raw.get("status") or {}
    conditions = {one["type"]: one["status"] for one in status.get("conditions") or ()}
    taints = [taint["key"] for taint in raw["spec"].get("taints") or ()]
    return NodeFact(
        **_base(event),
        is_ready=conditions.get("Ready") == "True",
        is_off=OUT_OF_SERVICE in taints,
        gpus=int((status.get("allocatable") or {}).get(GPU, 0)),
    )


def _version(raw: Object) -> str:
    return str(raw["metadata"]["resourceVersion"])


def _base(event: Mapping[str, Any]) -> dict[str, Any]:
    meta = event["raw"]["metadata"]
    return {
        "version": event["version"],
        "time_s": event["time_s"],
        "name": meta["name"],
        "uid": meta["uid"],
        "is_there": event["is_there"],
        "is_deleting": "deletionTimestamp" in meta,
        "is_after_gap": event["is_after_gap"],
    }


_PATHS: Final[Mapping[What, str]] = {
    "job": f"/apis/{GROUP}/{VERSION}/{PLURAL}",
    "pod": "/api/v1/pods",
    "node": "/api/v1/nodes",
}
_READERS: Final[Mapping[What, Callable[[Mapping[str, Any]], JobFact | PodFact | NodeFact]]] = {
    "job": read_job,
    "pod": read_pod,
    "node": read_node,
}


class History:
    """Context manager that records all jobs, pods and nodes of a cluster.

    While the API server is away nothing happens to them; what it told nobody in its last moment is
    found by a listing, as deleted or as it is then.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lock = threading.Lock()
        self._facts: list[JobFact | PodFact | NodeFact] = []
        self._raw: dict[What, dict[str, Object]] = {"job": {}, "pod": {}, "node": {}}
        self._stop = threading.Event()
        self._failures: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._follow, args=(what,), daemon=True) for what in _PATHS
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def facts(self) -> list[JobFact | PodFact | NodeFact]:
        """All that was recorded, in the order in which it happened."""
        with self._lock:
            if self._failures:
                raise self._failures[0]
            return sorted(self._facts, key=lambda fact: fact.version)

    def now(self, what: What) -> list[Object]:
        """All objects of a kind as they are now."""
        with self._lock:
            return list(self._raw[what].values())

    def _follow(self, what: What) -> None:
        version = ""
        while not self._stop.is_set():
            try:
                version = version or self._list(what)
                for event in self._api.watch(_PATHS[what], version, within_s=_WATCH_S):
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        self._see(what, event["object"], is_there=event["type"] != "DELETED")
            except ApiError as exc:
                if exc.status == 410:
                    version = ""
                time.sleep(_AGAIN_S)
            except (HTTPError, OSError):
                time.sleep(_AGAIN_S)
            except Exception as exc:  # told by `facts`, as a thread's own end is seen by nobody
                self._failures.append(exc)
                raise

    def _list(self, what: What) -> str:
        listing = self._api.get(_PATHS[what])
        version = str(listing["metadata"]["resourceVersion"])
        found = {raw["metadata"]["uid"]: raw for raw in listing["items"]}
        with self._lock:
            known = dict(self._raw[what])
        for uid, raw in known.items():
            if uid not in found:
                self._see(what, raw, is_there=False, version=version, is_after_gap=True)
        for uid, raw in found.items():
            # What is told twice would count as new, at a wrong time.
            if uid not in known or _version(known[uid]) != _version(raw):
                self._see(what, raw, is_there=True, is_after_gap=True)
        return version

    def _see(
        self,
        what: What,
        raw: Object,
        *,
        is_there: bool,
        version: str | None = None,
        is_after_gap: bool = False,
    ) -> None:
        uid = raw["metadata"]["uid"]
        event = {
            "raw": raw,
            "is_there": is_there,
            "version": int(version or _version(raw)),
            "time_s": time.time(),
            "is_after_gap": is_after_gap,
        }
        with self._lock:
            if is_there:
                self._raw[what][uid] = raw
            else:
                self._raw[what].pop(uid, None)
            self._facts.append(_READERS[what](event))
