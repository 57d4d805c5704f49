"""Each job is looked at once, by one worker, and not too often after a failure."""

import asyncio

import pytest

from omni_operator.process.queue import FIRST_BACKOFF_S, LONGEST_BACKOFF_S, Queue
from omni_operator.state import JobKey

A, B = JobKey(namespace="n", name="a"), JobKey(namespace="n", name="b")


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> Queue:
    return Queue(clock=clock)


def test_a_key_added_twice_comes_once(queue: Queue) -> None:
    queue.add(A)
    queue.add(B)
    queue.add(A)
    assert (queue.depth, queue.take(), queue.take(), queue.take()) == (2, A, B, None)


def test_a_key_in_work_comes_again_after_it_and_not_beside_it(queue: Queue) -> None:
    queue.add(A)
    queue.take()
    queue.add(A)
    queue.add(A)
    assert queue.take() is None
    queue.done(A)
    assert queue.take() == A
    queue.done(A)
    assert queue.take() is None


def test_a_delayed_key_comes_when_it_is_due(queue: Queue, clock: Clock) -> None:
    queue.add_after(A, 5.0)
    clock.now_s += 4.9
    assert queue.take() is None
    clock.now_s += 0.2
    assert queue.take() == A


def test_of_several_delays_the_earliest_counts(queue: Queue, clock: Clock) -> None:
    queue.add_after(A, 5.0)
    queue.add_after(A, 2.0)
    queue.add_after(A, 9.0)
    clock.now_s += 2.0
    assert queue.take() == A
    queue.done(A)
    clock.now_s += 100.0
    assert queue.take() is None


def test_a_look_makes_a_delay_void(queue: Queue, clock: Clock) -> None:
    queue.add_after(A, 5.0)
    queue.add(A)
    assert queue.take() == A
    queue.done(A)
    clock.now_s += 5.0
    assert queue.take() is None


def test_a_delay_asked_for_in_work_counts(queue: Queue, clock: Clock) -> None:
    queue.add(A)
    queue.take()
    queue.done(A)
    queue.add_after(A, 1.0)
    clock.now_s += 1.0
    assert queue.take() == A


def test_failures_wait_twice_as_long_each_time_up_to_a_minute(queue: Queue, clock: Clock) -> None:
    waits = []
    for _ in range(20):
        queue.add(A)
        assert queue.take() == A
        waits.append(queue.fail(A))
    assert waits[:4] == [FIRST_BACKOFF_S * n for n in (1, 2, 4, 8)]
    assert waits[-1] == LONGEST_BACKOFF_S == 60.0
    assert queue.take() is None
    clock.now_s += LONGEST_BACKOFF_S
    assert queue.take() == A
    queue.done(A)
    queue.add(A)
    queue.take()
    assert queue.fail(A) == FIRST_BACKOFF_S, "a success starts anew"


def test_a_key_that_fails_does_not_hold_up_others(queue: Queue) -> None:
    queue.add(A)
    queue.take()
    queue.fail(A)
    queue.add(B)
    assert queue.take() == B


def test_several_workers_never_hold_one_key_at_once() -> None:
    async def run() -> tuple[list[JobKey], list[JobKey]]:
        queue, seen, may_go = Queue(), list[JobKey](), asyncio.Event()

        async def work() -> None:
            while (key := await queue.get()) is not None:
                seen.append(key)
                await may_go.wait()
                queue.done(key)

        workers = [asyncio.create_task(work()) for _ in range(4)]
        for key in (A, A, B):
            queue.add(key)
            await asyncio.sleep(0.01)
        before = seen.copy()
        may_go.set()
        while len(seen) < 3:
            await asyncio.sleep(0.01)
        queue.close()
        await asyncio.wait_for(asyncio.gather(*workers), 5)
        return before, seen

    before, seen = asyncio.run(run())
    assert before == [A, B]
    assert seen == [A, B, A]


def test_a_sooner_delay_wakes_a_waiting_worker() -> None:
    async def run() -> JobKey | None:
        queue = Queue()
        queue.add_after(A, 60.0)
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add_after(B, 0.01)
        return await asyncio.wait_for(waiting, 5)

    assert asyncio.run(run()) == B


def test_a_closed_queue_gives_out_nothing(queue: Queue) -> None:
    queue.add(A)
    queue.close()
    assert queue.take() is None
    assert asyncio.run(queue.get()) is None
