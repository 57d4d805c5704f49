"""An HTTP server that answers lists and watches as an API server does, for as long as it is up."""

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp import web


class WatchServer:
    """Lists the objects of each plural in pages of one; watches say what a test sends."""

    def __init__(self, objects: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self._objects = objects
        self._said: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._port = 0
        self.asked: list[Mapping[str, str]] = []
        """Query of each request."""
        self.refusal: int | None = None
        """HTTP status of the next answer to a watch, which is no watch then."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def url(self, plural: str) -> str:
        return f"{self.address}/api/v1/{plural}"

    def say(self, line: bytes | None) -> None:
        """Send a line to a watch, or end it."""
        self._said.put_nowait(line)

    async def start(self) -> None:
        """Serve, on the same port as before."""
        app = web.Application()
        app.router.add_get("/api/v1/{plural}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Be away: all connections break."""
        await self._runner.cleanup()

    async def list_all(self, session: aiohttp.ClientSession, plural: str) -> int:
        """List as a client does, and return the number of pages."""
        pages, more = 0, ""
        while pages == 0 or more:
            query = {"limit": "1"} | ({"continue": more} if more else {})
            async with session.get(self.url(plural), params=query) as response:
                said = await response.json()
            pages, more = pages + 1, said["metadata"]["continue"]
        return pages

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        if "watch" not in request.query:
            objects = self._objects[request.match_info["plural"]]
            at = int(request.query.get("continue", "0"))
            more = str(at + 1) if at + 1 < len(objects) else ""
            meta = {"resourceVersion": "77", "continue": more}
            return web.json_response({"items": objects[at : at + 1], "metadata": meta})
        if self.refusal is not None:
            status, self.refusal = self.refusal, None
            return web.Response(status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self._said.get()) is not None:
            await response.write(line)
        return response
