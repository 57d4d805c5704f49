"""One operator leads, another one follows within 20 s, and never two by mistake of a clock."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any

import pytest

from omni_operator.api import ApiError, ApiUnavailable, Refused
from omni_operator.kinds import LEASE, Kind
from omni_operator.process.lease import Elector, LeaseLost, Terms
from tests.fakes.fake_cluster import FakeCluster


class Time:
    """A clock that jumps to the next sleeper once everybody sleeps."""

    def __init__(self) -> None:
        self.now_s = 5000.0
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []
        self._order = itertools.count()

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.Event()
        heapq.heappush(self._sleepers, (self.now_s + seconds, next(self._order), awake))
        await awake.wait()

    async def pass_until(self, end_s: float) -> None:
        while True:
            for _ in range(50):  # let everybody come to rest
                await asyncio.sleep(0)
            if not self._sleepers or self._sleepers[0][0] > end_s:
                self.now_s = end_s
                return
            self.now_s, _, awake = heapq.heappop(self._sleepers)
            awake.set()


class World:
    """A Lease, its candidates and time."""

    def __init__(self) -> None:
        self.time = Time()
        self.cluster = FakeCluster()
        self.leader_since: dict[str, float] = {}

    def elector(self, identity: str, *, clock_offset_s: float = 0.0) -> Elector:
        return Elector(
            self.cluster,
            namespace="system",
            name="omni",
            identity=identity,
            clock=lambda: self.time.clock() + clock_offset_s,
            sleep=self.time.sleep,
        )

    def start(self, identity: str, elector: Elector) -> asyncio.Task[None]:
        async def run() -> None:
            await elector.acquire()
            self.leader_since[identity] = self.time.now_s
            await elector.hold()

        return asyncio.create_task(run())

    def holder(self) -> str:
        return str(self.cluster.find(LEASE, "omni")["spec"]["holderIdentity"])


def run(story: Coroutine[Any, Any, None]) -> None:
    async def told() -> None:
        async with asyncio.timeout(20):
            await story

    asyncio.run(told())


def test_one_of_two_leads_as_long_as_it_renews() -> None:
    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        second = world.start("b", world.elector("b"))
        await world.time.pass_until(6000.0)
        assert list(world.leader_since) == ["a"]
        assert not first.done() and not second.done()
        assert world.holder() == "a"
        first.cancel()
        second.cancel()

    run(story())


def test_a_killed_leader_is_followed_within_20_s() -> None:
    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        second = world.start("b", world.elector("b"))
        await world.time.pass_until(5101.0)
        first.cancel()
        await world.time.pass_until(5200.0)
        assert 5101.0 + 10 < world.leader_since["b"] < 5101.0 + 20
        assert world.cluster.find(LEASE, "omni")["spec"]["leaseTransitions"] == 1
        second.cancel()

    run(story())


def test_a_leader_that_ends_lets_the_next_one_lead_at_once() -> None:
    async def story() -> None:
        world = World()
        elector = world.elector("a")
        first = world.start("a", elector)
        second = world.start("b", world.elector("b"))
        await world.time.pass_until(5101.0)
        first.cancel()
        await elector.release()
        await world.time.pass_until(5104.0)
        assert 5101.0 <= world.leader_since["b"] <= 5103.0
        second.cancel()

    run(story())


def test_a_lease_is_left_alone_that_another_one_has_taken_meanwhile() -> None:
    async def story() -> None:
        world = World()
        elector = world.elector("a")
        first = world.start("a", elector)
        await world.time.pass_until(5003.0)

        def steal(lease: dict[str, Any]) -> None:
            lease["spec"]["holderIdentity"] = "thief"

        world.cluster.change(LEASE, "omni", steal)
        await world.time.pass_until(5010.0)
        with pytest.raises(LeaseLost, match="system/omni is held by 'thief'"):
            await first
        await elector.release()
        assert world.holder() == "thief"

    run(story())


def test_a_leader_that_cannot_renew_has_stopped_before_another_one_begins() -> None:
    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        await world.time.pass_until(5020.0)
        second = world.start("b", world.elector("b"))
        is_cut_off = False

        def refuses(verb: str, kind: Kind, name: str) -> ApiError | None:
            return ApiUnavailable(reason="NoAnswer", message="down") if is_cut_off else None

        await world.time.pass_until(5031.0)
        is_cut_off = True
        world.cluster.refuses = refuses
        while not first.done():
            await world.time.pass_until(world.time.now_s + 0.5)
        stopped_s = world.time.now_s
        with pytest.raises(LeaseLost, match="could not be renewed for 1[0-2] s"):
            await first
        is_cut_off = False
        await world.time.pass_until(5100.0)
        assert stopped_s < world.leader_since["b"]
        second.cancel()

    run(story())


def test_a_short_outage_is_survived() -> None:
    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        await world.time.pass_until(5021.0)
        world.cluster.refuses = lambda *_: ApiUnavailable(reason="NoAnswer", message="down")
        await world.time.pass_until(5028.0)
        world.cluster.refuses = lambda *_: None
        await world.time.pass_until(5100.0)
        assert not first.done()
        first.cancel()

    run(story())


def test_an_answer_that_got_lost_is_no_loss_of_the_lease() -> None:
    """The renewal was done, but this operator holds the version before it."""

    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        await world.time.pass_until(5003.0)
        world.cluster.change(LEASE, "omni", lambda lease: lease["spec"].update(renewTime="x"))
        await world.time.pass_until(5100.0)
        assert not first.done()
        first.cancel()

    run(story())


@pytest.mark.parametrize("offset_s", [-3600.0, 3600.0])
def test_clocks_of_two_machines_are_never_compared(offset_s: float) -> None:
    async def story() -> None:
        world = World()
        first = world.start("a", world.elector("a"))
        second = world.start("b", world.elector("b", clock_offset_s=offset_s))
        await world.time.pass_until(5300.0)
        assert list(world.leader_since) == ["a"]
        first.cancel()
        second.cancel()

    run(story())


def test_a_lease_of_a_longer_term_is_respected() -> None:
    async def story() -> None:
        world = World()
        spec = {"holderIdentity": "old", "leaseDurationSeconds": 60}
        meta = {"namespace": "system", "name": "omni"}
        world.cluster.put(
            {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": meta, "spec": spec}
        )
        second = world.start("b", world.elector("b"))
        await world.time.pass_until(5200.0)
        assert 5060.0 <= world.leader_since["b"] < 5063.0
        second.cancel()

    run(story())


def test_missing_rights_are_told_and_not_waited_for() -> None:
    async def story() -> None:
        world = World()
        world.cluster.refuses = lambda *_: Refused(reason="Forbidden", message="may not get")
        with pytest.raises(Refused, match="may not get"):
            await world.elector("a").acquire()

    run(story())


def test_a_holder_gives_up_earlier_than_others_take_over() -> None:
    terms = Terms()
    assert terms.renew_s + terms.retry_s < terms.lease_s
    assert terms.lease_s + 2 * terms.retry_s < 20
