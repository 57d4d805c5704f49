"""Runs the operator: `python -m omni_operator.main`. The only door to kopf, which watches the
cluster and calls nothing but the view."""

import argparse
import asyncio
import itertools
import logging
import signal
import socket
import sys
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import kopf

from omni_operator.api import ApiError
from omni_operator.cluster import Access, Cluster
from omni_operator.health import Answer, Pulse, serve
from omni_operator.kinds import Kind
from omni_operator.leader import WATCHED, Leader
from omni_operator.lease import Elector, LeaseLost
from omni_operator.queue import Queue
from omni_operator.reconcile import Reconciler
from omni_operator.settings import Settings
from omni_operator.telemetry import Telemetry
from omni_operator.view import View

_LOG: Final = logging.getLogger("omni_operator")
_DEFAULTS: Final = Settings(image="")
_IDLE_S: Final = 180.0
_LAG_S: Final = 10.0
_ENDING_S: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    settings: Settings
    lease_namespace: str
    lease_name: str
    port: int
    log_level: str


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Ends the process where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_operator.main",
        description="Runs MultimodalTrainingJobs: places their pods, starts them all at once and "
        "replaces what fails. Several may run: the one that holds the Lease works, others wait.",
        epilog="The API server is found by KUBECONFIG, else by the pod's service account, else by "
        "~/.kube/config. On one's own machine: KUBECONFIG=cluster.yaml python -m "
        "omni_operator.main --image=trainer:dev --lease=default/omni --port=8080",
    )
    add = parser.add_argument
    add("--image", required=True, help="image of trainer and data service where a job names none")
    add(
        "--image-pull-policy",
        default=_DEFAULTS.image_pull_policy,
        choices=("Always", "IfNotPresent", "Never"),
        help="when nodes pull it (default: %(default)s)",
    )
    add("--priority-class", metavar="NAME", help="of pods whose job names none (default: none)")
    add("--watched-namespace", metavar="NAME", help="take jobs of this one only (default: of all)")
    add(
        "--cluster-domain",
        default=_DEFAULTS.cluster_domain,
        metavar="DOMAIN",
        help="in which pods find each other by name (default: %(default)s)",
    )
    add(
        "--with-kueue",
        action="store_true",
        help="jobs with a queueName wait until Kueue admits them",
    )
    add(
        "--lease",
        required=True,
        type=_lease,
        metavar="NAMESPACE/NAME",
        help="Lease whose holder works; the same for all that run on one cluster",
    )
    add(
        "--port",
        type=int,
        default=8080,
        help="serves /healthz, /readyz and /metrics; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--max-concurrent-writes",
        type=_positive,
        default=_DEFAULTS.max_concurrent_writes,
        metavar="N",
        help="requests to the API server at once (default: %(default)s)",
    )
    add(
        "--resync-seconds",
        type=_positive,
        default=_DEFAULTS.resync_s,
        metavar="S",
        help="how often everything is listed and looked at again (default: %(default)s)",
    )
    add(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="least important lines that are logged (default: %(default)s)",
    )
    read = parser.parse_args(arguments)
    namespace, name = read.lease
    return Options(
        settings=Settings(
            image=read.image,
            image_pull_policy=read.image_pull_policy,
            priority_class=read.priority_class,
            watched_namespace=read.watched_namespace,
            cluster_domain=read.cluster_domain,
            with_kueue=read.with_kueue,
            max_concurrent_writes=read.max_concurrent_writes,
            resync_s=read.resync_seconds,
        ),
        lease_namespace=namespace,
        lease_name=name,
        port=read.port,
        log_level=read.log_level,
    )


def _lease(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/NAME")
    return namespace, name


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


class Operator:
    """One process of the operator."""

    def __init__(self, options: Options, access: Access) -> None:
        settings = options.settings
        self._options = options
        self._access = access
        self._telemetry = Telemetry()
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
            # A process that takes the place of one with its host's name is not the one before.
            identity=f"{socket.gethostname()}_{uuid.uuid4()}",
        )
        view = View()
        self._leader = Leader(
            view=view,
            queue=Queue(),
            reconciler=Reconciler(
                view=view, cluster=self._cluster, settings=settings, clock=time.time
            ),
            pages=self._cluster.pages,
            meters=self._telemetry,
            watched_namespace=settings.watched_namespace,
            resync_s=settings.resync_s,
        )
        self._pulse = Pulse()
        self._leads = False
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Stand by, lead, and end on SIGTERM or SIGINT. Returns the exit code."""
        self._catch_signals()
        pulse = asyncio.create_task(self._pulse.beat())
        pages = {"/healthz": self._health, "/readyz": self._readiness, "/metrics": self._metrics}
        try:
            async with serve(self._options.port, pages) as port:
                _LOG.info("Standing by. port=%d", port)
                standing_by = asyncio.create_task(self._elector.acquire())
                await self._until_stopped(standing_by)
                return await self._lead() if not self._stop.is_set() else 0
        finally:
            pulse.cancel()
            await self._cluster.close()
            await self._elections.close()

    async def _lead(self) -> int:
        self._leads = True
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._cluster.ssl_context),
            middlewares=(self._authorize, self._leader.watches.listen),
        )
        # Not by kopf.run_tasks, which in the end cancels all tasks of the loop, ours too.
        tasks = [
            *await self._watch(session),
            asyncio.create_task(self._leader.lead()),
            asyncio.create_task(self._elector.hold()),
        ]
        self._catch_signals()  # kopf has just taken them for itself
        try:
            await self._until_stopped(*tasks)
            if not self._stop.is_set():
                raise RuntimeError("a part of the operator that runs for ever has ended")
            await self._leader.drain()
            await self._elector.release()
            return 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_ENDING_S)
            await session.close()

    async def _until_stopped(self, *tasks: asyncio.Task[Any]) -> None:
        """Wait for SIGTERM or SIGINT, or the end of a task. Raises what ended it."""
        stop = asyncio.create_task(self._stop.wait())
        try:
            done, _ = await asyncio.wait((stop, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                await task
        finally:
            stop.cancel()

    async def _watch(self, session: aiohttp.ClientSession) -> Collection[asyncio.Task[Any]]:
        """Start to feed the view. Nothing is written to the objects and no finalizer is set."""
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def log_in(**_: Any) -> kopf.AiohttpSession:
            return kopf.AiohttpSession(server=self._access.server, aiohttp_session=session)

        def feed(kind: Kind) -> None:
            @kopf.on.event(
                group=kind.group, version=kind.version, plural=kind.plural, registry=registry
            )
            async def see(event: Any, **_: Any) -> None:
                if event["type"] is not None:  # listings are seen whole, by the session
                    self._leader.see(kind, event["type"], event["object"])

        for kind in WATCHED:
            feed(kind)
        return await kopf.spawn_tasks(
            registry=registry, settings=_kopf_settings(), standalone=True, clusterwide=True
        )

    async def _authorize(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        request.headers.update(await self._access.headers())
        return await handler(request)

    def _catch_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    def _health(self) -> Answer:
        lag_s, idle_s = self._pulse.lag_s, self._leader.watches.idle_s() if self._leads else 0.0
        return Answer(
            text=f"event loop late by {lag_s:.1f} s, watches idle for {idle_s:.0f} s\n",
            is_good=lag_s < _LAG_S and idle_s < _IDLE_S,
        )

    def _readiness(self) -> Answer:
        if not self._leads:
            return Answer(text="standing by\n")
        is_ready = self._leader.is_ready
        return Answer(text="leading\n" if is_ready else "listing\n", is_good=is_ready)

    def _metrics(self) -> Answer:
        return Answer(
            text=self._telemetry.exposition(),
            content_type="text/plain; version=0.0.4; charset=utf-8",
        )


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
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
    # It tells of each event that a handler saw.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        return asyncio.run(_run(options))
    except (ApiError, LeaseLost, LookupError) as exc:
        _LOG.error("The operator ends. error=%s", exc)
        return 1


if __name__ == "__main__":
    sys.exit(main())
