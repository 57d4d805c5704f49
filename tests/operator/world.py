"""An operator without a cluster: the reconciler on an API server in memory, with a clock that tests
move, watches that may lag and processes that may be killed."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, Self, TypeVar

from omni_contract.names import ANNOTATION_INDEX, ANNOTATION_PROGRESS
from omni_contract.records import JobHeartbeat
from omni_contract.status import JobStatus, write_time
from omni_operator.api import Raw
from omni_operator.kinds import JOB, LEASE, NODE, POD, WORKLOAD, Kind
from omni_operator.reconcile.reconciler import Reconciler
from omni_operator.reconcile.writing import Told
from omni_operator.settings import Settings
from omni_operator.state import JobKey
from omni_operator.watch.observe import key_of
from omni_operator.watch.view import View
from tests.contract.jobs import changed
from tests.fakes.fake_cluster import FakeCluster

SETTINGS = Settings(image="trainer:test")
T = TypeVar("T")
GPU = "nvidia.com/gpu"
_WATCHED = (JOB, POD, NODE, WORKLOAD)
_MOST_ROUNDS = 2000


def job(name: str = "stamps", *, nodes: int = 4, **spec: Any) -> dict[str, Any]:
    """A job of pods with 2 GPUs each; `spec` replaces whole blocks of it."""
    body = changed("metadata.name", name)
    body["metadata"]["namespace"] = "default"
    resources = {"nodes": nodes, "ranksPerNode": 2, "device": "cuda"}
    body["spec"] |= {"resources": resources | spec.pop("resources", {}), **spec}
    return body


def node(name: str, *, gpus: int = 2, rack: str = "r1") -> dict[str, Any]:
    """A node that is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": "z1",
                "megascale-omni.dev/rack": rack,
            },
        },
        "spec": {},
        "status": {"allocatable": {GPU: str(gpus), "cpu": "64"}, "conditions": []},
    }


class World:
    """Cluster, watches and one operator process."""

    def __init__(
        self,
        *,
        nodes: int = 6,
        settings: Settings = SETTINGS,
        told: Told = lambda job, status: None,
    ) -> None:
        self.cluster = FakeCluster()
        self.settings = settings
        self._told = told
        self.lags: Callable[[Kind], bool] = lambda kind: False
        """Whether the next event of a kind is held back at a delivery."""
        self._runner = asyncio.Runner()
        self._events: dict[Kind, deque[tuple[Any, Raw]]] = {kind: deque() for kind in _WATCHED}
        self.cluster.watch(self._note)
        for i in range(nodes):
            self.cluster.put(node(f"n{i}", rack=f"r{i // 4}"))
            self.ready(f"n{i}")
        self.restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    # The operator.

    def restart(self, *, unlisted: Collection[str] = ()) -> None:
        """A new process: it knows what it lists. `unlisted` are objects that its lists lack."""
        self.cluster.revive()
        self.view = View()
        self._keys: set[JobKey] = set()
        self._timers: list[tuple[float, JobKey]] = []
        for events in self._events.values():
            events.clear()
        self.reconciler = Reconciler(
            view=self.view,
            cluster=self.cluster,
            settings=self.settings,
            clock=lambda: self.cluster.now_s,
            wake=self._keys.add,
            told=self._told,
            timer=lambda: 0.0,  # decisions take no time
        )
        for kind in _WATCHED:
            for raw in self.cluster.objects(kind):
                if raw["metadata"]["name"] not in unlisted:
                    self.view.see(kind, None, raw)
        self._runner.run(self.reconciler.recall())
        self._keys |= set(self.view.keys())

    def settle(self) -> None:
        """Let everything happen that needs no time."""
        for _ in range(_MOST_ROUNDS):
            self.deliver()
            if not self.look() and not any(self._events.values()):
                return
        raise AssertionError("the operator does not come to rest")

    def deliver(self) -> None:
        """Let the watches tell what does not lag."""
        for kind, events in self._events.items():
            while events and not self.lags(kind):
                event, raw = events.popleft()
                self.wake(self.view.see(kind, event, raw))

    def look(self) -> bool:
        """Look once at every job that has to be looked at. Returns whether there was one."""
        while self._timers and self._timers[0][0] <= self.cluster.now_s:
            self._keys.add(heapq.heappop(self._timers)[1])
        keys = sorted(self._keys)
        for key in keys:
            self._keys.discard(key)
            self.reconcile(key)
        return bool(keys)

    def wake(self, keys: Iterable[JobKey]) -> None:
        """Have jobs looked at."""
        self._keys.update(keys)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something that waits."""
        return self._runner.run(work)

    def reconcile(self, key: JobKey) -> float | None:
        """One look at one job."""
        after_s = self._runner.run(self.reconciler.reconcile(key))
        if after_s is not None:
            heapq.heappush(self._timers, (self.cluster.now_s + after_s, key))
        return after_s

    def pass_s(self, seconds: float, *, step_s: float = 1.0) -> None:
        """Let time pass for operator, scheduler and kubelets."""
        end_s = self.cluster.now_s + seconds
        while True:
            self.settle()
            while self.cluster.play():
                self.settle()
            if self.cluster.now_s >= end_s:
                return
            self.cluster.now_s = min(end_s, self.cluster.now_s + step_s)

    # People and machines.

    def apply(self, body: Raw) -> JobKey:
        """Create a job."""
        return key_of(self.cluster.put(body))

    def edit(self, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        """Change a job's spec or metadata."""
        self.cluster.change(JOB, name, change)

    def beat(self, name: str = "stamps", **fields: Any) -> None:
        """Rank 0's supervisor renews the Lease."""
        status = self.status(name)
        beat = {"attempt": status.attempt, "generation": 0, "phase": "training", "step": 1}
        text = JobHeartbeat.model_validate(beat | fields).model_dump_json()
        (lease,) = [n for n in self.cluster.names(LEASE) if n.startswith(f"{name}-")]

        def renew(raw: dict[str, Any]) -> None:
            raw["metadata"].setdefault("annotations", {})[ANNOTATION_PROGRESS] = text
            raw["spec"]["renewTime"] = f"{self.cluster.now_s:.6f}"

        self.cluster.change(LEASE, lease, renew)

    def ready(self, name: str, status: str = "True") -> None:
        """A node is ready or not, from now on."""

        def turn(raw: dict[str, Any]) -> None:
            at = write_time(self.cluster.now_s)
            raw["status"]["conditions"] = [
                {"type": "Ready", "status": status, "lastTransitionTime": at}
            ]

        self.cluster.change(NODE, name, turn)

    def kill_node(self, name: str) -> None:
        """A node falls silent and the control plane notices."""
        self.cluster.dead_nodes.add(name)
        self.ready(name, "Unknown")

    def revive_node(self, name: str) -> None:
        """It is back."""
        self.cluster.dead_nodes.discard(name)
        self.ready(name)

    # What there is.

    def status(self, name: str = "stamps") -> JobStatus:
        """A job's status in the API."""
        return JobStatus.model_validate(self.cluster.find(JOB, name).get("status") or {})

    def condition(self, type_: str, name: str = "stamps") -> tuple[str, str]:
        """Status and reason of a condition."""
        found = self.status(name).condition(type_)
        return ("", "") if found is None else (found.status, found.reason)

    def message(self, type_: str, name: str = "stamps") -> str:
        """Message of a condition."""
        found = self.status(name).condition(type_)
        return "" if found is None else found.message

    def pods(self, name: str = "stamps") -> list[Raw]:
        """Pods of a job."""
        owner = self.cluster.find(JOB, name)["metadata"]["uid"]
        return [
            pod
            for pod in self.cluster.objects(POD)
            if any(ref["uid"] == owner for ref in pod["metadata"].get("ownerReferences", ()))
        ]

    def pods_of_all(self) -> list[Raw]:
        """Pods of all jobs."""
        return [pod for pod in self.cluster.objects(POD) if "ownerReferences" in pod["metadata"]]

    def pod(self, index: int, name: str = "stamps") -> Raw:
        """The newest pod that has an index."""
        found = [
            pod
            for pod in self.pods(name)
            if pod["metadata"]["annotations"][ANNOTATION_INDEX] == str(index)
        ]
        return max(found, key=lambda pod: int(pod["metadata"]["uid"].split("-")[0], 16))

    def pod_name(self, index: int, name: str = "stamps") -> str:
        """Name of the newest pod that has an index."""
        return str(self.pod(index, name)["metadata"]["name"])

    def nodes_of(self, name: str = "stamps") -> dict[str, str | None]:
        """Node by pod."""
        return {p["metadata"]["name"]: p["spec"].get("nodeName") for p in self.pods(name)}

    def complete(self, name: str = "stamps") -> None:
        """All ranked pods end well."""
        for pod in self.pods(name):
            if pod["metadata"]["annotations"][ANNOTATION_INDEX]:
                self.cluster.end_container(pod["metadata"]["name"], exit_code=0)

    # Inside.

    def _note(self, event: Any, kind: Kind, raw: Raw) -> None:
        if kind in self._events:
            self._events[kind].append((event, raw))
