"""Whether the watches live, and what their listings held, seen from the HTTP responses they read.

The framework that reads them tells neither: not when its first listing was complete, not what a
later one no longer holds, and not when a watch was last heard of.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import aiohttp

from omni_operator.api import Raw
from omni_operator.kinds import Kind

LONGEST_SILENCE_S: Final = 80.0
"""A live watch says something at least every minute, if only a bookmark."""
_GAP_S: Final = 3.0
"""A watch may be closed this long: the API server ends each now and then, to be asked anew."""

Listed = Callable[[Kind, Sequence[Raw], frozenset[str] | None, str], None]
"""Called with the kind, objects and resource version of each page of a listing and, with the last
page, the uids of all objects."""


@dataclass(slots=True)
class _Watch:
    heard_s: float
    """When it was last seen to have said something."""
    tried_s: float
    open_s: float
    """When it was last seen to be open."""
    response: aiohttp.ClientResponse | None = None
    num_bytes: int = 0
    is_listed: bool = False
    uids: set[str] = field(default_factory=set)
    """Of the listing that is under way."""


class Watches:
    """Listens to the requests of an `aiohttp.ClientSession` for certain kinds of object."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        listed: Listed,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        now_s = clock()
        self._kinds = {kind.plural: kind for kind in kinds}
        self._watches = {
            kind.plural: _Watch(heard_s=now_s, tried_s=now_s, open_s=now_s) for kind in kinds
        }
        self._tell = listed
        self._clock = clock
        self.all_listed = asyncio.Event()
        """Set once each kind was listed completely."""

    def look(self) -> None:
        """See what has come since the last look. To be called every second or so."""
        now_s = self._clock()
        for watch in self._watches.values():
            if watch.response is None or not _is_open(watch.response):
                watch.response = None
                continue
            watch.open_s = now_s
            if watch.num_bytes != (num_bytes := watch.response.content.total_bytes):
                watch.num_bytes, watch.heard_s = num_bytes, now_s

    def ages(self) -> dict[str, float]:
        """Seconds since the watch of each kind said something."""
        now_s = self._clock()
        return {plural: now_s - watch.heard_s for plural, watch in self._watches.items()}

    def are_current(self) -> bool:
        """Whether what they said can be taken as now."""
        now_s = self._clock()
        return all(
            watch.is_listed
            and now_s - watch.heard_s < LONGEST_SILENCE_S
            and now_s - watch.open_s < _GAP_S
            for watch in self._watches.values()
        )

    def idle_s(self) -> float:
        """Seconds since a watch said something or was at least asked for, of the one that is
        longest idle. Long means that it was given up, not that the API server is away."""
        now_s = self._clock()
        return max(now_s - max(w.heard_s, w.tried_s) for w in self._watches.values())

    async def listen(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """A client middleware."""
        plural = request.url.name
        watch = self._watches.get(plural)
        if watch is None:
            return await handler(request)
        watch.tried_s = self._clock()
        response = await handler(request)
        if response.status != 200:
            return response
        watch.heard_s = watch.open_s = self._clock()
        if "watch" in request.url.query:
            watch.response, watch.num_bytes = response, response.content.total_bytes
        else:
            page = await response.json()
            is_first = "continue" not in request.url.query
            self._note_page(self._kinds[plural], watch, page, is_first=is_first)
        return response

    def _note_page(self, kind: Kind, watch: _Watch, page: Raw, *, is_first: bool) -> None:
        if is_first:
            watch.uids = set()
        items, meta = page["items"], page["metadata"]
        watch.uids |= {item["metadata"]["uid"] for item in items}
        is_last = not meta.get("continue")
        uids = frozenset(watch.uids) if is_last else None
        self._tell(kind, items, uids, meta["resourceVersion"])
        if is_last:
            watch.uids = set()
            watch.is_listed = True
            if all(other.is_listed for other in self._watches.values()):
                self.all_listed.set()


def _is_open(response: aiohttp.ClientResponse) -> bool:
    content = response.content
    return not response.closed and not content.is_eof() and content.exception() is None
