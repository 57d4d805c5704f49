"""Answers those who ask over HTTP whether the operator is alive and ready, and what it counted."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

_PULSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a page says."""

    text: str
    is_good: bool = True
    """False answers 503."""
    content_type: str = "text/plain; charset=utf-8"


@contextlib.asynccontextmanager
async def serve(port: int, pages: Mapping[str, Callable[[], Answer]]) -> AsyncIterator[int]:
    """Serve pages by path on all addresses, and say on which port: 0 takes a free one."""
    app = web.Application()
    for path, page in pages.items():
        app.router.add_get(path, _handler(page))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        listening = _listen(port)
        await web.SockSite(runner, listening).start()
        yield listening.getsockname()[1]
    finally:
        await runner.cleanup()


class Pulse:
    """How far behind the event loop is, which shows what in it computes too long."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat_s = clock()
        self.lag_s = 0.0
        """By how much the last beat was late."""

    async def beat(self) -> None:
        """Measure for ever."""
        while True:
            self._beat_s = self._clock()
            await asyncio.sleep(_PULSE_S)
            self.lag_s = max(0.0, self._clock() - self._beat_s - _PULSE_S)


def _listen(port: int) -> socket.socket:
    """One socket for IPv4 and IPv6, whichever the cluster has."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _handler(page: Callable[[], Answer]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(_: web.Request) -> web.Response:
        answer = page()
        return web.Response(
            body=answer.text.encode(),
            status=200 if answer.is_good else 503,
            headers={"Content-Type": answer.content_type},
        )

    return handle
