"""What the operator that leads does all the time: keep the view true and reconcile jobs. Knows
neither who feeds the view nor what reconciling is."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

from omni_operator.api import ApiError, ApiUnavailable, Raw
from omni_operator.cluster import Page
from omni_operator.kinds import JOB, NODE, POD, Kind
from omni_operator.process.queue import Queue
from omni_operator.state import JobKey
from omni_operator.watch.observe import StatusError
from omni_operator.watch.view import Event, View
from omni_operator.watch.watches import Watches

WATCHED: Final = (JOB, POD, NODE)

_LOG: Final = logging.getLogger(__name__)
_NUM_WORKERS: Final = 8
"""Jobs looked at at once. They share one core: with more of them each takes longer, and the first
ones are placed later."""
_TICK_S: Final = 1.0
_DRAIN_S: Final = 10.0


class Meters(Protocol):
    """Where it is counted."""

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile took this long."""

    def queue_depth(self, depth: int) -> None:
        """So many jobs wait for a worker."""

    def watch_age(self, resource: str, seconds: float) -> None:
        """A watch was heard of so long ago."""


class Reconciles(Protocol):
    """The part that decides and writes."""

    async def recall(self) -> None:
        """Read what was decided before this process."""

    async def reconcile(self, key: JobKey) -> float | None:
        """Move one job. Returns the seconds until it should be looked at again, if nothing
        happens."""


class Leader:
    """Feeds a view and works through a queue."""

    def __init__(
        self,
        *,
        view: View,
        queue: Queue,
        reconciler: Reconciles,
        pages: Callable[[Kind], AsyncIterator[Page]],
        meters: Meters,
        watched_namespace: str | None,
        resync_s: float,
        watched: Sequence[Kind] = WATCHED,
    ) -> None:
        self._view = view
        self._queue = queue
        self._reconciler = reconciler
        self._pages = pages
        self._meters = meters
        self._namespace = watched_namespace
        self._resync_s = resync_s
        self._watched = watched
        self.watches = Watches(watched, self._see_page)
        self._workers: list[asyncio.Task[None]] = []
        self.is_ready = False
        """Whether jobs are being reconciled."""

    def see(self, kind: Kind, event: Event, raw: Raw) -> None:
        """Take what a watch says."""
        if kind is JOB and self._namespace not in (None, raw["metadata"]["namespace"]):
            return
        for key in self._view.see(kind, event, raw):
            self._queue.add(key)

    async def lead(self) -> None:
        """Reconcile jobs for ever, once all was listed."""
        await self.watches.all_listed.wait()
        await self._recall()
        self.is_ready = True
        _LOG.info("Leading. jobs=%d", len(self._view.keys()))
        self._add_all()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._resync())
            self._workers = [tasks.create_task(self._work()) for _ in range(_NUM_WORKERS)]

    async def drain(self) -> None:
        """Take up no more jobs, and wait for those under way, but not for ever."""
        self._queue.close()
        if self._workers:
            _, late = await asyncio.wait(self._workers, timeout=_DRAIN_S)
            if late:
                _LOG.warning("Jobs are left in the middle. number=%d", len(late))

    async def _recall(self) -> None:
        """Without the reservations of all jobs none may be placed."""
        while True:
            try:
                return await self._reconciler.recall()
            except ApiError as exc:
                _LOG.warning("Placements cannot be read yet. error=%s", exc)
                await asyncio.sleep(_TICK_S)

    async def _work(self) -> None:
        while (key := await self._queue.get()) is not None:
            began_s = time.monotonic()
            try:
                after_s = await self._reconciler.reconcile(key)
            except (ApiError, StatusError) as exc:
                outcome = "unavailable" if isinstance(exc, ApiUnavailable) else "refused"
                again_s = self._queue.fail(key)
                _LOG.warning("A job has to wait. job=%s again_s=%.1f error=%s", key, again_s, exc)
            except Exception:  # a mistake of ours about one job must not stop all others
                outcome, again_s = "error", self._queue.fail(key)
                _LOG.exception("A job could not be reconciled. job=%s again_s=%.1f", key, again_s)
            else:
                outcome = "done"
                self._queue.done(key)
                if after_s is not None:
                    self._queue.add_after(key, after_s)
            self._meters.reconciled(time.monotonic() - began_s, outcome)

    async def _tick(self) -> None:
        """Judge by the watches whether the view is true now."""
        was_current, blind_since_s = True, time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            self.watches.look()
            self._meters.queue_depth(self._queue.depth)
            for resource, seconds in self.watches.ages().items():
                self._meters.watch_age(resource, seconds)
            now_s, is_current = time.monotonic(), self.watches.are_current()
            if not is_current and self._view.watch_is_healthy:
                self._view.watch_is_healthy = False
                blind_since_s = now_s
                _LOG.warning("The watches are silent: nothing is declared lost or hung.")
            elif is_current and was_current and not self._view.watch_is_healthy:
                # Current at two ticks: what happened meanwhile was told by now.
                self._view.watch_is_healthy = True
                self._view.skip_blind_time(now_s - blind_since_s)
                _LOG.info("The watches are back. seconds=%.0f", now_s - blind_since_s)
                self._add_all()
            was_current = is_current

    async def _resync(self) -> None:
        """Look at everything now and then, so that no lost event costs more than that."""
        while True:
            await asyncio.sleep(self._resync_s)
            try:
                for kind in self._watched:
                    await self._compare(kind)
            except ApiError as exc:
                _LOG.warning("The resync has to wait. error=%s", exc)
            self._add_all()

    async def _compare(self, kind: Kind) -> None:
        uids = set[str]()
        async for page in self._pages(kind):
            uids |= {raw["metadata"]["uid"] for raw in page.items}
            self._see_page(kind, page.items, None, page.version)
        self._see_page(kind, (), frozenset(uids), page.version)

    def _see_page(
        self, kind: Kind, items: Sequence[Raw], uids: frozenset[str] | None, version: str
    ) -> None:
        for raw in items:
            self.see(kind, None, raw)
        if uids is not None:
            for key in self._view.see_listed(kind, uids, version):
                self._queue.add(key)

    def _add_all(self) -> None:
        jobs = self._view.keys()
        for key in jobs:
            self._queue.add(key)
