"""Which jobs have to be looked at next: each once, not too often, and one at a time."""

import asyncio
import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from omni_operator.state import JobKey

FIRST_BACKOFF_S: Final = 0.2
LONGEST_BACKOFF_S: Final = 60.0


class Queue:
    """Keys to reconcile. A key that a worker holds is not given to another one; added meanwhile,
    it comes again after `done` or `fail`. For one event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: deque[JobKey] = deque()
        self._queued: set[JobKey] = set()
        self._held: set[JobKey] = set()
        self._again: set[JobKey] = set()
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, int, JobKey]] = []
        self._order = itertools.count()
        self._failures: dict[JobKey, int] = {}
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def depth(self) -> int:
        """Keys that wait for a worker now."""
        return len(self._ready)

    def add(self, key: JobKey) -> None:
        """Have a key looked at as soon as possible."""
        if key in self._held:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._news.set()

    def add_after(self, key: JobKey, seconds: float) -> None:
        """Have a key looked at in a while; of several times the earliest counts, and a look before
        that makes it void."""
        due = self._clock() + seconds
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            heapq.heappush(self._heap, (due, next(self._order), key))
            self._news.set()

    def done(self, key: JobKey) -> None:
        """Hand back a key that was looked at."""
        self._failures.pop(key, None)
        self._hand_back(key)

    def fail(self, key: JobKey) -> float:
        """Hand back a key that could not be looked at. It comes again after a time, returned, that
        doubles with each failure in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        seconds = min(FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 30), LONGEST_BACKOFF_S)
        self._hand_back(key)
        self.add_after(key, seconds)
        return seconds

    def take(self) -> JobKey | None:
        """The next key, if one is due now."""
        self._move_due()
        if not self._ready or self._is_closed:
            return None
        key = self._ready.popleft()
        self._queued.discard(key)
        self._due.pop(key, None)
        self._held.add(key)
        return key

    async def get(self) -> JobKey | None:
        """The next key, once one is due; None after `close`."""
        while not self._is_closed:
            self._news.clear()
            if (key := self.take()) is not None:
                return key
            wait_s = self._heap[0][0] - self._clock() if self._heap else None
            try:
                await asyncio.wait_for(self._news.wait(), wait_s)
            except TimeoutError:
                continue
        return None

    def close(self) -> None:
        """Give out no more keys."""
        self._is_closed = True
        self._news.set()

    def _hand_back(self, key: JobKey) -> None:
        self._held.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _move_due(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:  # else an earlier time, or a look, made it void
                del self._due[key]
                self.add(key)
