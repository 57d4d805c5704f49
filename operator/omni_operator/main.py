"""Runs the operator: `python -m omni_operator.main`. The only door to kopf, which watches jobs and
calls nothing but the view."""

import asyncio
import contextlib
import functools
import gc
import itertools
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import aiohttp
import kopf

from omni_operator.api import ApiError, ApiUnavailable
from omni_operator.cluster import Access, Cluster
from omni_operator.kinds import JOB, NODE, POD, WORKLOAD, Kind
from omni_operator.options import Options, parse
from omni_operator.process.health import Answer, Pulse, serve
from omni_operator.process.leader import WATCHED, Leader
from omni_operator.process.lease import Elector, LeaseLost
from omni_operator.process.queue import Queue
from omni_operator.reconcile.reconciler import Reconciler
from omni_operator.settings import SetupError
from omni_operator.telemetry import Telemetry, load_metric_exporter, load_span_exporter
from omni_operator.watch.follow import Follower
from omni_operator.watch.view import View

_LOG: Final = logging.getLogger("omni_operator")
_IDLE_S: Final = 180.0
_LAG_S: Final = 10.0
_ENDING_S: Final = 3.0
_RETRY_S: Final = 2.0
_MANY: Final = (POD, NODE)
"""Kinds that change too often for kopf."""
_SERVED_BY: Final = {
    JOB: "apply the CRD",
    WORKLOAD: "install Kueue 0.15 or newer, or start without --with-kueue (chart value "
    "kueue.enabled)",
}


class Operator:
    """One process of the operator."""

    def __init__(self, options: Options, access: Access) -> None:
        settings = options.settings
        self._options = options
        self._access = access
        # A process that takes the place of one with its host's name is not the one before.
        identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        self._telemetry = Telemetry(
            instance=identity,
            span_exporter=load_span_exporter(os.environ),
            metric_exporter=load_metric_exporter(os.environ),
        )
        self._cluster = Cluster(
            access,
            max_requests=settings.max_concurrent_writes,
            count=self._telemetry.api_request,
        )
        # A client of its own: renewing must not wait behind a thousand pods.
        self._elections = Cluster(
            access, max_requests=2, timeout_s=3, patience_s=0, count=self._telemetry.api_request
        )
        self._elector = Elector(
            self._elections,
            namespace=options.lease_namespace,
            name=options.lease_name,
            identity=identity,
        )
        self._watched = (*WATCHED, WORKLOAD) if settings.with_kueue else WATCHED
        self._pulse = Pulse()
        self._leader: Leader | None = None
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Stand by, lead, and end on SIGTERM or SIGINT. Returns the exit code."""
        self._catch_signals()
        pulse = asyncio.create_task(self._pulse.beat())
        pages = {"/healthz": self._health, "/readyz": self._readiness, "/metrics": self._metrics}
        try:
            async with serve(self._options.port, pages) as port:
                _LOG.info("Standing by. port=%d", port)
                await self._until_stopped(asyncio.create_task(self._stand_by()))
                return await self._lead() if not self._stop.is_set() else 0
        finally:
            pulse.cancel()
            await self._cluster.close()
            await self._elections.close()
            self._telemetry.close()

    async def _stand_by(self) -> None:
        """Wait for the CRD and for the Lease."""
        for kind in self._watched:
            # kopf leaves out for ever what the API server does not know when it starts.
            while not await self._is_served(kind):
                await asyncio.sleep(_RETRY_S)
        await self._elector.acquire()

    async def _is_served(self, kind: Kind) -> bool:
        try:
            if await self._cluster.serves(kind):
                return True
            said = "The API server does not serve this kind yet: %s. kind=%s"
            _LOG.warning(said, _way_out(kind), f"{kind.kind}.{kind.api_version}")
        except ApiUnavailable as exc:
            _LOG.warning("The API server does not answer. error=%s", exc)
        return False

    async def _check_served(self) -> None:
        """Raises SetupError where somebody took away a kind that is watched, which ends kopf."""
        for kind in self._watched:
            if not await self._cluster.serves(kind):
                name = f"{kind.kind}.{kind.api_version}"
                raise SetupError(f"the API server does not serve {name} any more: {_way_out(kind)}")

    async def _lead(self) -> int:
        leader = self._leader = self._make_leader()
        sessions: list[aiohttp.ClientSession] = []

        def open_session() -> aiohttp.ClientSession:
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._cluster.ssl_context),
                middlewares=(self._authorize, leader.watches.listen),
            )
            sessions.append(session)
            return session

        # Not by kopf.run_tasks, which in the end cancels all tasks of the loop, ours too.
        tasks = [
            *await self._watch(open_session, leader),
            asyncio.create_task(leader.lead()),
            asyncio.create_task(self._elector.hold()),
        ]
        self._catch_signals()  # kopf has just taken them for itself
        try:
            await self._until_stopped(*tasks)
            if not self._stop.is_set():
                raise RuntimeError("a part of the operator that runs for ever has ended")
        except (ApiError, LeaseLost):
            raise
        except Exception:
            with contextlib.suppress(ApiError):  # else it would hide what ended us
                await self._check_served()
            raise
        else:
            await leader.drain()
            await self._elector.release()
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_ENDING_S)
            for session in sessions:
                await session.close()

    def _make_leader(self) -> Leader:
        settings = self._options.settings
        view, queue = View(), Queue()
        return Leader(
            view=view,
            queue=queue,
            reconciler=Reconciler(
                view=view,
                cluster=self._cluster,
                settings=settings,
                clock=time.time,
                wake=queue.add,
                told=self._telemetry.status_written,
            ),
            pages=self._cluster.pages,
            meters=self._telemetry,
            watched_namespace=settings.watched_namespace,
            resync_s=settings.resync_s,
            watched=self._watched,
        )

    async def _until_stopped(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for SIGTERM or SIGINT, or the end of a task. Raises what ended it."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait((stop, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                await task
        finally:
            stop.cancel()

    async def _watch(
        self, open_session: Callable[[], aiohttp.ClientSession], leader: Leader
    ) -> Collection[asyncio.Task[Any]]:
        """Start to feed the view. Nothing is written to the objects and no finalizer is set."""
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def log_in(**_: Any) -> kopf.AiohttpSession:
            # A new one each time: kopf logs in again after a 401, and closes the one before.
            return kopf.AiohttpSession(server=self._access.server, aiohttp_session=open_session())

        def feed_by_kopf(kind: Kind) -> None:
            @kopf.on.event(
                group=kind.group, version=kind.version, plural=kind.plural, registry=registry
            )
            async def see(event: Any, **_: Any) -> None:
                if event["type"] is not None:  # listings are seen whole, by the session
                    leader.see(kind, event["type"], event["object"])

        for kind in self._watched:
            if kind not in _MANY:
                feed_by_kopf(kind)
        tasks = await kopf.spawn_tasks(
            registry=registry, settings=_kopf_settings(), standalone=True, clusterwide=True
        )
        session = open_session()
        followers = [
            Follower(
                kind,
                session=session,
                server=self._access.server,
                see=functools.partial(leader.see, kind),
            )
            for kind in _MANY
        ]
        return [*tasks, *(asyncio.create_task(one.follow()) for one in followers)]

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers.update(await self._access.headers())
        return await handler(request)

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    def _health(self) -> Answer:
        lag_s = self._pulse.lag_s
        idle_s = self._leader.watches.idle_s() if self._leader else 0.0
        return Answer(
            text=f"event loop late by {lag_s:.1f} s, watches idle for {idle_s:.0f} s\n",
            is_good=lag_s < _LAG_S and idle_s < _IDLE_S,
        )

    def _readiness(self) -> Answer:
        if self._leader is None:
            return Answer(text="standing by\n")
        is_ready = self._leader.is_ready
        return Answer(text="leading\n" if is_ready else "listing\n", is_good=is_ready)

    def _metrics(self) -> Answer:
        return Answer(
            text=self._telemetry.exposition(),
            content_type="text/plain; version=0.0.4; charset=utf-8",
        )


def _way_out(kind: Kind) -> str:
    """What to do where the API server does not serve a kind."""
    return _SERVED_BY.get(kind, "it is no Kubernetes")


class _NoDiffs(kopf.DiffBaseStorage):
    """Compares nothing with what an object was like before; kopf's own way copies each object of
    each event several times."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""


class _NoProgress(kopf.ProgressStorage):
    """Keeps nothing about handlers, neither in objects nor elsewhere."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        """Keep nothing."""

    def purge(self, **_: Any) -> None:
        """Nothing is kept."""

    def touch(self, **_: Any) -> None:
        """Nothing is kept."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.persistence.progress_storage = _NoProgress()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # else it watches CRDs and namespaces, too
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 310
    settings.watching.connect_timeout = 30
    settings.watching.chunk_size = 500
    settings.networking.error_backoffs = itertools.repeat(2.0)  # never gives up
    settings.queueing.exit_timeout = 0.5
    return settings


async def _run(options: Options) -> int:
    return await Operator(options, await Access.find()).run()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 1 where something else ended it."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(
        level=options.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    # What the API server says comes by the thousand and has no cycles: looking for some as often as
    # is usual took a sixth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    # It tells of each event that a handler saw.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        return asyncio.run(_run(options))
    except (ApiError, LeaseLost, SetupError) as exc:
        _LOG.error("The operator ends. error=%s", exc)
        return 1


if __name__ == "__main__":
    sys.exit(main())
