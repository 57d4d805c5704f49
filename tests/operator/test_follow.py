"""A follower hears of every object, lists only where it must, and comes back after every outage."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from omni_operator.api import Raw
from omni_operator.kinds import POD
from omni_operator.watch.follow import Follower
from omni_operator.watch.view import Event
from tests.fakes.watch_server import WatchServer
from tests.operator.raw import pod

LISTED_AT = "77"


@dataclass(frozen=True, slots=True)
class World:
    """A follower of the pods of a server."""

    server: WatchServer
    seen: list[tuple[Event, str]] = field(default_factory=list)

    def say(self, kind: str, raw: Mapping[str, Any]) -> None:
        self.server.say(json.dumps({"type": kind, "object": raw}).encode() + b"\n")

    @property
    def listings(self) -> int:
        return sum("watch" not in query and "continue" not in query for query in self.server.asked)

    @property
    def watched_from(self) -> list[str]:
        """Versions from which watches were asked for."""
        return [query["resourceVersion"] for query in self.server.asked if "watch" in query]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)


def follow(story: Callable[[World], Awaitable[None]]) -> None:
    async def run() -> None:
        async with WatchServer({"pods": [pod("a"), pod("b")]}) as server:
            world = World(server)

            def see(event: Event, raw: Raw) -> None:
                world.seen.append((event, raw["metadata"]["name"]))

            async with aiohttp.ClientSession() as session:
                follower = Follower(
                    POD, session=session, server=server.address, see=see, pause_s=0.01
                )
                following = asyncio.create_task(follower.follow())
                try:
                    await world.until(lambda: world.watched_from or following.done())
                    await story(world)
                    assert not following.done()
                finally:
                    following.cancel()
                    await asyncio.wait([following])

    asyncio.run(run())


def at(version: int, name: str = "a") -> dict[str, Any]:
    raw = pod(name)
    return {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(version)}}


def test_all_is_listed_then_watched_from_there() -> None:
    async def story(world: World) -> None:
        assert world.listings == 1
        assert world.watched_from == [LISTED_AT]
        assert world.seen == [], "what a listing holds is told by the session"
        for number, event in enumerate(("ADDED", "MODIFIED", "DELETED")):
            world.say(event, at(80 + number, name=event.lower()))
        await world.until(lambda: len(world.seen) == 3)
        assert world.seen == [
            ("ADDED", "added"),
            ("MODIFIED", "modified"),
            ("DELETED", "deleted"),
        ]

    follow(story)


def test_a_watch_that_ended_goes_on_from_the_newest_version_without_a_listing() -> None:
    async def story(world: World) -> None:
        world.say("MODIFIED", at(80))
        world.say("BOOKMARK", at(95))
        world.server.say(None)
        await world.until(lambda: len(world.watched_from) == 2)
        assert world.watched_from[1] == "95"
        assert world.listings == 1
        assert world.seen == [("MODIFIED", "a")], "a bookmark is no news of an object"

    follow(story)


def test_a_line_may_be_longer_than_any_buffer() -> None:
    async def story(world: World) -> None:
        raw = at(80)
        raw["metadata"]["annotations"] = {"long": "x" * 700_000}
        world.say("ADDED", raw)
        world.say("MODIFIED", at(81, name="b"))
        await world.until(lambda: len(world.seen) == 2)
        assert world.seen == [("ADDED", "a"), ("MODIFIED", "b")]

    follow(story)


@pytest.mark.parametrize("told", ["in the stream", "instead of it"])
def test_a_forgotten_version_is_listed_anew(told: str) -> None:
    async def story(world: World) -> None:
        if told == "in the stream":
            world.say("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
            world.server.say(None)
        else:
            world.server.refusal = 410
            world.server.say(None)
        await world.until(lambda: world.listings == 2)
        await world.until(lambda: world.watched_from[-1] == LISTED_AT)
        world.say("MODIFIED", at(99))
        await world.until(lambda: world.seen)
        assert world.seen == [("MODIFIED", "a")]

    follow(story)


def test_an_outage_is_told_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        world.say("MODIFIED", at(80))
        await world.until(lambda: world.seen)
        await world.server.stop()
        await asyncio.sleep(0.3)
        await world.server.start()
        num_watches = len(world.watched_from)
        await world.until(lambda: len(world.watched_from) > num_watches)
        assert world.watched_from[-1] == "80"
        assert world.listings == 1
        world.say("DELETED", at(99))
        await world.until(lambda: len(world.seen) == 2)

    with caplog.at_level(logging.WARNING):
        follow(story)
    told = [record.getMessage() for record in caplog.records]
    assert 1 <= len(told) <= 2, told
    assert all("A watch has to wait. kind=pods" in line for line in told)


def test_a_refusal_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        world.server.refusal = 403
        world.server.say(None)
        await world.until(lambda: len(world.watched_from) == 3)
        assert world.listings == 1

    with caplog.at_level(logging.WARNING):
        follow(story)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "403" in told


def test_trouble_of_the_api_server_is_told_and_listed_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        world.say("ERROR", {"kind": "Status", "code": 500, "message": "etcd has no leader"})
        world.server.say(None)
        await world.until(lambda: world.listings == 2)

    with caplog.at_level(logging.WARNING):
        follow(story)
    assert "etcd has no leader" in caplog.text
