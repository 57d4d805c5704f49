"""Operators without watches on a real API server, each for one job, that die right after a write:
what a process that is killed knew is lost, what it wrote is there."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar

import pytest

from omni_operator.api import Api as OperatorApi
from omni_operator.api import Raw
from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import JOB, NODE, POD, Kind
from omni_operator.reconcile.reconciler import Reconciler
from omni_operator.settings import Settings
from omni_operator.state import JobKey
from omni_operator.watch.view import View
from tests.cluster.cluster import Cluster as TestCluster
from tests.cluster.stories import Seen

_SETTINGS: Final = Settings(image="trainer:test")
_NUM_REQUESTS: Final = 16
_MOST_LOOKS: Final = 50
"""At a job in one round; more means that it does not come to rest."""

T = TypeVar("T")


class Killed(BaseException):
    """Stands for the end of the operator's process: nothing in it may catch this."""


class _MortalApi(OperatorApi):
    """Passes requests on until its process is dead."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.writes: list[str] = []
        self.last_write: int | None = None
        self._is_dead = False

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Raw | None:
        return await self._read(self._cluster.get(kind, namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, label_selector: str | None = None
    ) -> Sequence[Raw]:
        return await self._read(self._cluster.list(kind, namespace, label_selector=label_selector))

    async def create(self, kind: Kind, body: Raw, *, dry_run: bool = False) -> Raw:
        if dry_run:
            return await self._read(self._cluster.create(kind, body, dry_run=True))
        return await self._write(f"create {kind.plural}", self._cluster.create(kind, body))

    async def apply(self, body: Raw) -> Raw:
        return await self._write(f"apply {body['kind']}", self._cluster.apply(body))

    async def json_patch(
        self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Raw]
    ) -> Raw:
        request = self._cluster.json_patch(kind, namespace, name, operations)
        return await self._write(f"patch {kind.plural}", request)

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        request = self._cluster.delete(
            kind, namespace, name, uid=uid, grace_s=grace_s, propagation=propagation
        )
        await self._write(f"delete {kind.plural}", request)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, status: Raw, *, resource_version: str
    ) -> Raw:
        request = self._cluster.patch_status(
            kind, namespace, name, status, resource_version=resource_version
        )
        return await self._write("patch_status", request)

    async def replace(self, kind: Kind, body: Raw) -> Raw:
        return await self._write(f"replace {kind.plural}", self._cluster.replace(kind, body))

    async def _read(self, request: Coroutine[Any, Any, T]) -> T:
        self._check(request)
        answer = await request
        self._check()
        return answer

    async def _write(self, what: str, request: Coroutine[Any, Any, T]) -> T:
        self._check(request)
        self.writes.append(what)
        is_last = len(self.writes) == self.last_write
        try:
            answer = await request
        finally:
            self._is_dead |= is_last
        self._check()
        return answer

    def _check(self, request: Coroutine[Any, Any, object] | None = None) -> None:
        if self._is_dead:
            if request is not None:
                request.close()
            raise Killed


class MortalOperator:
    """The operator of one job, over all its processes."""

    def __init__(self, cluster: Cluster, key: JobKey) -> None:
        self._cluster = cluster
        self._key = key
        self.ahead_s = 0.0
        """How far its clock is ahead: tests have no time to wait."""
        self.looks = 0
        """How often it came to rest."""
        self.deaths = 0
        """How often it died."""
        self._has_seen = self._due = False
        self._again_s = 0.0
        self._begin()

    def count_from_now(self, *, die_after: int | None) -> None:
        """Count writes anew; after the write of this number the process dies, once."""
        self._api.writes.clear()
        self._api.last_write = die_after

    @property
    def writes(self) -> list[str]:
        """What this process wrote since `count_from_now`."""
        return list(self._api.writes)

    async def look(self, listings: "Listings") -> None:
        """See the cluster as it is and do what is due; afterwards a new process takes over where
        this one died."""
        try:
            await self._look(listings)
        except Killed:
            self.deaths += 1
            self._begin()
        else:
            self.looks += 1

    async def _look(self, listings: "Listings") -> None:
        is_new = not self._has_seen
        self._has_seen = True
        for kind in (JOB, POD, NODE):
            objects = listings.of(kind, self._key)
            for raw in objects:
                self._due |= bool(self._view.see(kind, None, raw))
            uids = {raw["metadata"]["uid"] for raw in objects}
            self._due |= bool(self._view.see_listed(kind, uids, listings.versions[kind]))
        if is_new:
            await self._reconciler.recall()
            self._due = True
        for _ in range(_MOST_LOOKS):
            if not self._due and self._clock() < self._again_s:
                return
            self._due = False
            after_s = await self._reconciler.reconcile(self._key)
            self._again_s = float("inf") if after_s is None else self._clock() + after_s
        raise AssertionError(f"{self._key} does not come to rest: {self.writes[-_MOST_LOOKS:]}")

    def _clock(self) -> float:
        return time.time() + self.ahead_s

    def _begin(self) -> None:
        self._api = _MortalApi(self._cluster)
        self._view = View()
        self._has_seen = self._due = False
        self._again_s = 0.0
        self._reconciler = Reconciler(
            view=self._view,
            cluster=self._api,
            settings=_SETTINGS,
            clock=self._clock,
            wake=self._wake,
        )

    def _wake(self, key: JobKey) -> None:
        self._due |= key == self._key


class Listings:
    """Jobs and pods of one namespace and all nodes, listed for all operators at once."""

    def __init__(self, seen: Seen, nodes: Callable[[JobKey, Raw], bool]) -> None:
        self._seen = seen
        self._is_node_of = nodes
        self.versions: dict[Kind, str] = {}
        """Resource version of each listing."""
        self._nodes: Sequence[Raw] = ()

    async def read(self, cluster: Cluster) -> None:
        """Take what was just seen, and list the nodes."""
        self.versions = {JOB: self._seen.jobs_version, POD: self._seen.pods_version}
        pages = [page async for page in cluster.pages(NODE)]
        self._nodes = [raw for page in pages for raw in page.items]
        self.versions[NODE] = pages[-1].version

    def of(self, kind: Kind, key: JobKey) -> list[Raw]:
        """What the operator of a job is shown of a kind."""
        job, pods = self._seen(key.name)
        if kind is JOB:
            return [] if job is None else [job]
        if kind is POD:
            return list(pods)
        return [raw for raw in self._nodes if self._is_node_of(key, raw)]


class MortalOperators:
    """Context manager around the operators of many jobs and their connection."""

    def __init__(
        self, cluster: TestCluster, seen: Seen, *, nodes: Callable[[JobKey, Raw], bool]
    ) -> None:
        self._runner = asyncio.Runner()
        self._kubeconfig = str(cluster.admin_kubeconfig)
        self._listings = Listings(seen, nodes)
        self._operators: list[MortalOperator] = []

    def __enter__(self) -> Self:
        self._cluster = self._runner.run(self._connect())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.run(self._cluster.close())
        self._runner.close()

    def add(self, key: JobKey) -> MortalOperator:
        """An operator for one more job."""
        operator = MortalOperator(self._cluster, key)
        self._operators.append(operator)
        return operator

    def look(self) -> None:
        """Have all operators do what is due."""
        self._runner.run(self._look())

    async def _look(self) -> None:
        await self._listings.read(self._cluster)
        await _all(operator.look(self._listings) for operator in self._operators)

    async def _connect(self) -> Cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KUBECONFIG", self._kubeconfig)
            access = await Access.find()
        return Cluster(access, max_requests=_NUM_REQUESTS)


async def _all(work: Iterable[Awaitable[None]]) -> None:
    await asyncio.gather(*work)
