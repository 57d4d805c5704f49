"""What the probes are told: about the loop, the watches and the listings."""

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from omni_operator.health import Answer, Pulse, serve
from omni_operator.kinds import JOB, NODE, POD, Kind
from omni_operator.watches import LONGEST_SILENCE_S, Watches
from tests.operator.raw import pod


def get(port: int, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode(), exc.headers["Content-Type"]


def test_pages_answer_by_what_they_find() -> None:
    async def ask() -> list[tuple[int, str, str]]:
        pages = {
            "/good": lambda: Answer(text="alive\n"),
            "/bad": lambda: Answer(text="stuck\n", is_good=False),
            "/metrics": lambda: Answer(text="x 1\n", content_type="text/plain; version=0.0.4"),
        }
        async with serve(0, pages) as port:
            return [
                await asyncio.to_thread(get, port, path)
                for path in ("/good", "/bad", "/metrics", "/other")
            ]

    good, bad, metrics, other = asyncio.run(ask())
    assert good == (200, "alive\n", "text/plain; charset=utf-8")
    assert bad[:2] == (503, "stuck\n")
    assert metrics == (200, "x 1\n", "text/plain; version=0.0.4")
    assert other[0] == 404


def test_a_blocked_event_loop_is_noticed() -> None:
    async def measure() -> tuple[float, float]:
        pulse = Pulse()
        beating = asyncio.create_task(pulse.beat())
        await asyncio.sleep(1.2)
        before = pulse.lag_s
        time.sleep(2.0)  # what a computation in the loop does
        await asyncio.sleep(0.1)
        beating.cancel()
        return before, pulse.lag_s

    before, after = asyncio.run(measure())
    assert after > before + 0.5


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ApiServer:
    """Lists pods in pages of one, and watches that say what a test sends."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = pods
        self.said: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            at = int(request.query.get("continue", "0"))
            more = str(at + 1) if at + 1 < len(self.pods) else ""
            meta = {"resourceVersion": "77", "continue": more}
            return web.json_response({"items": self.pods[at : at + 1], "metadata": meta})
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self.said.get()) is not None:
            await response.write(line)
        return response


Listing = tuple[Kind, list[str], frozenset[str] | None, str]


def with_watches(
    server: ApiServer, kinds: tuple[Kind, ...], story: Callable[..., Awaitable[None]]
) -> list[Listing]:
    """Run a story with a session whose requests are listened to; returns what was listed."""
    listed: list[Listing] = []

    def note(kind: Kind, items: Any, uids: frozenset[str] | None, version: str) -> None:
        listed.append((kind, [item["metadata"]["name"] for item in items], uids, version))

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{tail:.*}", server.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        clock = Clock()
        watches = Watches(kinds, note, clock=clock)
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1/pods"
        async with aiohttp.ClientSession(middlewares=(watches.listen,)) as session:
            await story(watches, clock, session, url)
        await runner.cleanup()

    asyncio.run(run())
    return listed


async def list_pods(session: aiohttp.ClientSession, url: str) -> int:
    pages, more = 0, ""
    while pages == 0 or more:
        query = {"limit": "1"} | ({"continue": more} if more else {})
        async with session.get(url, params=query) as response:
            said = await response.json()
        pages, more = pages + 1, said["metadata"]["continue"]
    return pages


def test_a_listing_is_told_page_by_page_and_whole_at_its_end() -> None:
    async def story(watches: Watches, _: Clock, session: Any, url: str) -> None:
        assert await list_pods(session, url) == 2
        assert watches.all_listed.is_set()

    listed = with_watches(ApiServer(pod("a"), pod("b")), (POD,), story)
    assert listed == [
        (POD, ["a"], None, "77"),
        (POD, ["b"], frozenset({"uid-a", "uid-b"}), "77"),
    ]


def test_nothing_is_known_before_all_kinds_were_listed() -> None:
    async def story(watches: Watches, _: Clock, session: Any, url: str) -> None:
        await list_pods(session, url)
        assert not watches.all_listed.is_set()
        assert not watches.are_current()

    with_watches(ApiServer(pod("a")), (POD, NODE, JOB), story)


def test_a_watch_is_current_while_it_is_open_and_says_something() -> None:
    server = ApiServer(pod("a"))

    async def story(watches: Watches, clock: Clock, session: Any, url: str) -> None:
        await list_pods(session, url)
        async with session.get(url, params={"watch": "true"}) as response:
            assert watches.are_current()
            clock.now_s += 60
            server.said.put_nowait(b'{"type": "BOOKMARK"}\n')
            assert await response.content.readline() == b'{"type": "BOOKMARK"}\n'
            watches.look()
            assert watches.ages() == {"pods": 0}
            clock.now_s += LONGEST_SILENCE_S - 1
            watches.look()
            assert watches.are_current()
            clock.now_s += 1
            watches.look()
            assert not watches.are_current(), "it hangs"
            assert watches.idle_s() == LONGEST_SILENCE_S

    with_watches(server, (POD,), story)


def test_a_broken_watch_is_not_current_until_it_is_open_again() -> None:
    server = ApiServer(pod("a"))

    async def story(watches: Watches, clock: Clock, session: Any, url: str) -> None:
        await list_pods(session, url)
        async with session.get(url, params={"watch": "true"}) as response:
            server.said.put_nowait(None)
            assert await response.content.read() == b""
        watches.look()
        assert watches.are_current(), "the server ends each watch now and then"
        clock.now_s += 10
        watches.look()
        assert not watches.are_current()
        async with session.get(url, params={"watch": "true"}):
            watches.look()
            assert watches.are_current()

    with_watches(server, (POD,), story)


def test_asking_in_vain_is_not_idle_but_not_current_either() -> None:
    """While the API server is away, a restart of the operator would not help."""

    async def story(watches: Watches, clock: Clock, session: Any, url: str) -> None:
        await list_pods(session, url)
        clock.now_s += 500
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(url.replace("127.0.0.1", "127.0.0.2"))
        assert watches.idle_s() == 0
        assert not watches.are_current()

    with_watches(ApiServer(pod("a")), (POD,), story)
