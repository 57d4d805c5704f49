"""Tells a data service that is stopped or stuck from one at work by a file it keeps touching."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

BEAT_S = 1.0
SILENT_AFTER_S = 30.0
"""A loop that is only busy is never away for so long."""
_OWN_STALL_S = 5.0
"""A gap between two looks above this was ours, not the service's."""


def beat_path(socket: Path) -> Path:
    """The file of the service on this socket."""
    return socket.with_suffix(".beat")


async def keep_beating(path: Path) -> None:
    """Touch the file until cancelled; it goes with the service."""
    try:
        while True:
            path.touch()
            await asyncio.sleep(BEAT_S)
    finally:
        path.unlink(missing_ok=True)


class BeatWatch:
    """Watches the file of one life of a service. Before its first beat a service is starting."""

    def __init__(
        self,
        path: Path,
        *,
        silent_after_s: float = SILENT_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        path.unlink(missing_ok=True)  # of a service that was killed
        self._path = path
        self._silent_after_s = silent_after_s
        self._clock = clock
        self._beat_ns: int | None = None
        self._changed_s = self._looked_s = clock()

    def is_silent(self) -> bool:
        """Look: whether the file has not been touched for too long."""
        now = self._clock()
        gap, self._looked_s = now - self._looked_s, now
        if gap > _OWN_STALL_S:  # the machine stood still, or we did
            self._changed_s += gap
        beat_ns = None
        with contextlib.suppress(OSError):
            beat_ns = self._path.stat().st_mtime_ns
        if beat_ns is None or beat_ns != self._beat_ns:
            self._beat_ns, self._changed_s = beat_ns, now
        return now - self._changed_s > self._silent_after_s
