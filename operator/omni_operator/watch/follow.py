"""Lists and watches a kind of which objects change by the thousand: pods and nodes.

The framework, which watches the other kinds, gives each object a queue and a task of its own and
takes for one event four times what reading and noting it costs. A start has five for each pod.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final, Literal, cast

import aiohttp

from omni_operator.api import Raw
from omni_operator.kinds import Kind
from omni_operator.watch.view import Event
from omni_operator.watch.watches import LONGEST_SILENCE_S

_LOG: Final = logging.getLogger(__name__)
_PAGE: Final = 500
_PAGE_S: Final = 60.0
_SERVER_S: Final = 300
"""After which the API server ends a watch."""
_CONNECT_S: Final = 30.0
_AGAIN_S: Final = 0.1
_PAUSE_S: Final = 1.0
"""Between requests that were not answered."""
_GONE: Final = 410
_EVENTS: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})


class _Expired(Exception):
    """Versions as old as the one asked for are forgotten: all has to be listed anew."""


class _Trouble(Exception):
    """The API server ends a watch because of a difficulty of its own."""


class Follower:
    """Follows all objects of a kind. What a listing holds is not told here, but by whoever listens
    to the session (`Watches.listen`)."""

    def __init__(
        self,
        kind: Kind,
        *,
        session: aiohttp.ClientSession,
        server: str,
        see: Callable[[Event, Raw], None],
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._kind = kind
        self._session = session
        self._url = server + kind.path()
        self._see = see
        self._pause_s = pause_s
        self._version: str | None = None
        """Newest one heard of; None before a listing."""

    async def follow(self) -> None:
        """List, then tell what is made, changed and deleted, for ever."""
        failure = ""
        while True:
            wait_s = _AGAIN_S
            try:
                if self._version is None:
                    self._version = await self._list()
                async for event, raw in self._watch():
                    failure = ""
                    if event in _EVENTS:
                        self._see(cast(Literal["ADDED", "MODIFIED", "DELETED"], event), raw)
            except _Expired:
                self._version = None
            except (aiohttp.ClientError, TimeoutError, OSError, _Trouble) as exc:
                wait_s, said = self._pause_s, f"{type(exc).__name__}: {exc}"
                if said != failure:
                    _LOG.warning("A watch has to wait. kind=%s error=%s", self._kind.plural, said)
                failure = said
            await asyncio.sleep(wait_s)

    async def _list(self) -> str:
        """Have all objects listed, and return the version at which they were."""
        query = {"limit": str(_PAGE)}
        timeout = aiohttp.ClientTimeout(total=_PAGE_S)
        while True:
            async with self._session.get(self._url, params=query, timeout=timeout) as response:
                _check(response)
                meta = (await response.json())["metadata"]
            if not (token := meta.get("continue")):
                return str(meta["resourceVersion"])
            query["continue"] = token

    async def _watch(self) -> AsyncIterator[tuple[str, Raw]]:
        """What is said from the newest version on, bookmarks too, until the API server ends it."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_SERVER_S),
            "resourceVersion": str(self._version),
        }
        # A connection that broke without a word is noticed by its silence.
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=LONGEST_SILENCE_S)
        async with self._session.get(self._url, params=query, timeout=timeout) as response:
            _check(response)
            async for said in _lines(response):
                raw, event = said["object"], said["type"]
                if event == "ERROR":
                    if raw.get("code") == _GONE:
                        raise _Expired
                    self._version = None  # what was missed, a listing brings
                    raise _Trouble(raw.get("message") or raw)
                self._version = raw["metadata"]["resourceVersion"]
                yield event, raw


def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == _GONE:
        raise _Expired
    response.raise_for_status()


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The JSON documents of a stream, each on a line of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield json.loads(line)
