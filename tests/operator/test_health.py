"""What the probes are told: about the loop, the watches and the listings."""

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from omni_operator.kinds import JOB, NODE, POD, Kind
from omni_operator.process.health import Answer, Pulse, serve
from omni_operator.watch.watches import LONGEST_SILENCE_S, Watches
from tests.fakes.watch_server import WatchServer
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


Listing = tuple[Kind, list[str], frozenset[str] | None, str]


Story = Callable[[Watches, Clock, aiohttp.ClientSession, WatchServer], Awaitable[None]]


def with_watches(story: Story, *, kinds: tuple[Kind, ...] = (POD,)) -> list[Listing]:
    """Run a story with a session whose requests are listened to; returns what was listed."""
    listed: list[Listing] = []

    def note(kind: Kind, items: Any, uids: frozenset[str] | None, version: str) -> None:
        listed.append((kind, [item["metadata"]["name"] for item in items], uids, version))

    async def run() -> None:
        clock = Clock()
        watches = Watches(kinds, note, clock=clock)
        session = aiohttp.ClientSession(middlewares=(watches.listen,))
        async with WatchServer({"pods": [pod("a"), pod("b")]}) as server, session:
            await server.list_all(session, "pods")
            await story(watches, clock, session, server)

    asyncio.run(run())
    return listed


def test_a_listing_is_told_page_by_page_and_whole_at_its_end() -> None:
    async def story(watches: Watches, *_: object) -> None:
        assert watches.all_listed.is_set()

    assert with_watches(story) == [
        (POD, ["a"], None, "77"),
        (POD, ["b"], frozenset({"uid-a", "uid-b"}), "77"),
    ]


def test_nothing_is_known_before_all_kinds_were_listed() -> None:
    async def story(watches: Watches, *_: object) -> None:
        assert not watches.all_listed.is_set()
        assert not watches.are_current()

    with_watches(story, kinds=(POD, NODE, JOB))


WATCH = {"watch": "true"}


def test_a_watch_is_current_while_it_is_open_and_says_something() -> None:
    async def story(
        watches: Watches, clock: Clock, session: aiohttp.ClientSession, server: WatchServer
    ) -> None:
        async with session.get(server.url("pods"), params=WATCH) as response:
            assert watches.are_current()
            clock.now_s += 60
            server.say(b"bookmark\n")
            assert await response.content.readline() == b"bookmark\n"
            watches.look()
            assert watches.ages() == {"pods": 0}
            clock.now_s += LONGEST_SILENCE_S - 1
            watches.look()
            assert watches.are_current()
            clock.now_s += 1
            watches.look()
            assert not watches.are_current(), "it hangs"
            assert watches.idle_s() == LONGEST_SILENCE_S
            server.say(None)

    with_watches(story)


def test_a_broken_watch_is_not_current_until_it_is_open_again() -> None:
    async def story(
        watches: Watches, clock: Clock, session: aiohttp.ClientSession, server: WatchServer
    ) -> None:
        async with session.get(server.url("pods"), params=WATCH) as response:
            server.say(None)
            assert await response.content.read() == b""
        watches.look()
        assert watches.are_current(), "the server ends each watch now and then"
        clock.now_s += 10
        watches.look()
        assert not watches.are_current()
        async with session.get(server.url("pods"), params=WATCH):
            watches.look()
            assert watches.are_current()
            server.say(None)

    with_watches(story)


def test_asking_in_vain_is_not_idle_but_not_current_either() -> None:
    """While the API server is away, a restart of the operator would not help."""

    async def story(
        watches: Watches, clock: Clock, session: aiohttp.ClientSession, server: WatchServer
    ) -> None:
        clock.now_s += 500
        assert watches.idle_s() == 500
        await server.stop()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(server.url("pods"))
        assert watches.idle_s() == 0
        assert not watches.are_current()
        await server.start()

    with_watches(story)
