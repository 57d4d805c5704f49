"""The leader works through all jobs whatever one of them does, and trusts no event to arrive."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest

from omni_contract.records import JobHeartbeat
from omni_operator.api import ApiUnavailable, Raw
from omni_operator.cluster import Page
from omni_operator.kinds import JOB, NODE, POD, Kind
from omni_operator.process.leader import Leader
from omni_operator.process.queue import Queue
from omni_operator.state import JobKey
from omni_operator.watch.observe import StatusError
from omni_operator.watch.view import View
from tests.fakes.watch_server import WatchServer
from tests.operator.raw import job, node, pod

HEARTBEAT = JobHeartbeat(attempt=1, generation=0, phase="training", step=1)
A, B = JobKey(namespace="team", name="a"), JobKey(namespace="team", name="b")


class Reconciles:
    """Notes which jobs it was given."""

    def __init__(self) -> None:
        self.seen: list[JobKey] = []
        self.recalled = 0
        self.recall_errors: list[Exception] = []
        self.act: Callable[[JobKey], Awaitable[float | None]] | None = None

    async def recall(self) -> None:
        self.recalled += 1
        if self.recall_errors:
            raise self.recall_errors.pop()

    async def reconcile(self, key: JobKey) -> float | None:
        assert self.recalled, "no job may be placed before all reservations are known"
        self.seen.append(key)
        return await self.act(key) if self.act else None


class Meters:
    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self.ages: dict[str, float] = {}

    def reconciled(self, seconds: float, outcome: str) -> None:
        self.outcomes.append(outcome)

    def queue_depth(self, depth: int) -> None:
        """Not looked at."""

    def watch_age(self, resource: str, seconds: float) -> None:
        self.ages[resource] = seconds


class World:
    """A leader over objects that a test holds."""

    def __init__(self, *, watched_namespace: str | None = None, resync_s: float = 600.0) -> None:
        self.objects: dict[Kind, list[Raw]] = {JOB: [job("a", uid="1")], POD: [], NODE: []}
        self.version = 100
        self.reconciles, self.meters, self.view = Reconciles(), Meters(), View()
        self.leader = Leader(
            view=self.view,
            queue=Queue(),
            reconciler=self.reconciles,
            pages=self.pages,
            meters=self.meters,
            watched_namespace=watched_namespace,
            resync_s=resync_s,
        )

    async def pages(self, kind: Kind) -> AsyncIterator[Page]:
        yield Page(items=self.objects[kind], version=str(self.version))

    def list_all(self) -> None:
        """What the first requests of the watches bring."""
        for kind, items in self.objects.items():
            for raw in items:
                self.leader.see(kind, None, raw)
        self.leader.watches.all_listed.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                await asyncio.sleep(0.005)


def lead(world: World, story: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        leading = asyncio.create_task(world.leader.lead())
        try:
            await story()
            assert not leading.done()
        finally:
            leading.cancel()
            await asyncio.wait([leading])

    asyncio.run(run())


def test_nothing_is_done_before_all_was_listed_and_recalled() -> None:
    world = World()
    world.reconciles.recall_errors = [ApiUnavailable(reason="NoAnswer", message="down")]

    async def story() -> None:
        world.leader.see(JOB, None, job("a", uid="1"))
        await asyncio.sleep(0.05)
        assert (world.reconciles.recalled, world.leader.is_ready) == (0, False)
        world.list_all()
        await world.until(lambda: world.reconciles.seen)
        assert world.reconciles.recalled == 2
        assert world.leader.is_ready
        assert world.reconciles.seen == [A]

    lead(world, story)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ApiUnavailable(reason="NoAnswer", message="down"), "unavailable"),
        (StatusError(A, "attempt", "many"), "refused"),
        (ZeroDivisionError("a mistake of ours"), "error"),
    ],
    ids=["no answer", "unreadable", "bug"],
)
def test_a_job_that_fails_is_tried_again_and_stops_no_other(error: Exception, outcome: str) -> None:
    world = World()
    world.objects[JOB].append(job("b", uid="2"))

    async def act(key: JobKey) -> None:
        if key == A:
            raise error

    world.reconciles.act = act

    async def story() -> None:
        world.list_all()
        await world.until(lambda: world.reconciles.seen.count(A) >= 3)
        assert world.reconciles.seen.count(B) == 1
        assert set(world.meters.outcomes) == {outcome, "done"}

    lead(world, story)


def test_a_job_comes_again_when_it_asked_for_it() -> None:
    world = World()

    async def act(_: JobKey) -> float | None:
        return 0.01 if len(world.reconciles.seen) < 3 else None

    world.reconciles.act = act

    async def story() -> None:
        world.list_all()
        await world.until(lambda: len(world.reconciles.seen) == 3)
        await asyncio.sleep(0.1)
        assert len(world.reconciles.seen) == 3

    lead(world, story)


def test_jobs_of_other_namespaces_are_left_to_others() -> None:
    world = World(watched_namespace="team")
    world.objects[JOB].append(job("elsewhere", uid="3", namespace="other"))
    world.objects[POD] = [pod("far", namespace="other", job_uid=None)]

    async def story() -> None:
        world.list_all()
        await world.until(lambda: world.reconciles.seen)
        assert world.view.keys() == (A,)
        observed = world.view.observe(A, now_s=0.0)
        assert observed is not None and observed.used["n0"], "room is taken by pods of all"

    lead(world, story)


def test_a_lost_event_costs_at_most_one_resync() -> None:
    """A pod and a node that ended unseen, and a pod that changed unseen."""
    world = World(resync_s=0.3)
    gone, stays = pod("gone", job_uid="1"), pod("stays", job_uid="1")
    world.objects[POD] = [gone, stays]
    world.objects[NODE] = [node("n0"), node("n1")]

    def names() -> set[tuple[str, str]]:
        observed = world.view.observe(A, now_s=0.0)
        assert observed is not None
        return {(found.name, found.phase) for found in observed.pods}

    async def story() -> None:
        world.list_all()
        await world.until(lambda: world.reconciles.seen)
        world.objects[POD] = [pod("stays", job_uid="1", version=2, phase="Failed")]
        world.objects[NODE] = [node("n0")]
        assert len(names()) == 2
        await world.until(lambda: names() == {("stays", "Failed")})
        observed = world.view.observe(A, now_s=0.0)
        assert observed is not None
        await world.until(lambda: set(observed.nodes) == {"n0"})
        await world.until(lambda: len(world.reconciles.seen) > 1)

    lead(world, story)


def test_silent_watches_pause_judgement_until_they_are_back() -> None:
    world = World()
    plurals = [kind.plural for kind in world.objects]

    async def story() -> None:
        listen = world.leader.watches.listen
        session = aiohttp.ClientSession(middlewares=(listen,))

        async def watch_all() -> None:
            for plural in plurals:
                response = await session.get(server.url(plural), params={"watch": "true"})
                opened.append(response)

        opened: list[aiohttp.ClientResponse] = []
        objects = {kind.plural: items for kind, items in world.objects.items()}
        async with WatchServer(objects) as server, session:
            for plural in plurals:
                await server.list_all(session, plural)
            await watch_all()
            await world.until(lambda: set(world.meters.ages) == set(plurals))
            world.view.note_progress("1", HEARTBEAT, "t", 1000.0)
            await server.stop()
            await world.until(lambda: not world.view.watch_is_healthy)
            before = len(world.reconciles.seen)
            await server.start()
            await watch_all()
            await world.until(lambda: world.view.watch_is_healthy)
            await world.until(lambda: len(world.reconciles.seen) > before)
            observed = world.view.observe(A, now_s=0.0)
            assert observed is not None and observed.progress is not None
            assert 1001.0 <= observed.progress.step_since_s < 1010.0
            for response in opened:
                response.close()

    lead(world, story)


def test_the_end_waits_for_what_is_under_way_and_takes_up_nothing_new() -> None:
    world = World()
    world.objects[JOB].append(job("b", uid="2"))
    is_done = False

    async def act(_: JobKey) -> None:
        nonlocal is_done
        await asyncio.sleep(0.2)
        is_done = True

    async def story() -> None:
        world.list_all()
        await world.until(lambda: len(world.reconciles.seen) == 2)
        world.reconciles.act = act
        world.leader.see(JOB, "MODIFIED", job("a", uid="1", version=5))
        await world.until(lambda: len(world.reconciles.seen) == 3)
        world.leader.see(JOB, "MODIFIED", job("a", uid="1", version=6))
        await world.leader.drain()
        assert is_done
        await asyncio.sleep(0.05)
        assert len(world.reconciles.seen) == 3

    async def run() -> None:
        leading = asyncio.create_task(world.leader.lead())
        await story()
        leading.cancel()
        await asyncio.wait([leading])

    asyncio.run(run())
