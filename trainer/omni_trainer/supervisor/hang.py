"""Tells a slow rank from a hung one by its progress file, on the supervisor's own clock."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from omni_contract.names import PROGRESS_FILE
from omni_contract.records import Progress

SILENT_AFTER_S = 3.0
"""A rank touches its file every second; a file this old has no one to touch it."""
_OWN_STALL_S = 2.0
"""A gap between two looks above this was ours, not the ranks'."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    progress: Progress | None = None
    changed_at: float
    """When phase or step last changed."""
    touched_at: float
    mtime_ns: int = 0
    first_step: int | None = None
    """Steps finished when training was first seen."""


class HangWatch:
    """Watches the ranks of one node for one generation."""

    def __init__(
        self,
        *,
        run_dir: Path,
        ranks: Sequence[int],
        attempt: int,
        generation: int,
        hang_after_s: float,
        start_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = {rank: run_dir / PROGRESS_FILE.format(rank=rank) for rank in ranks}
        self._pair = (attempt, generation)
        self._hang_after_s = hang_after_s
        self._start_after_s = start_after_s
        self._clock = clock
        now = clock()
        self._looked_at = now
        self._seen = {rank: _Seen(changed_at=now, touched_at=now) for rank in ranks}

    @property
    def highest_step(self) -> int:
        """Most steps finished by one of the ranks in this generation."""
        return max((s.progress.step for s in self._seen.values() if s.progress), default=0)

    def look(self) -> dict[int, Literal["stalled", "silent"]]:
        """Read the files; the ranks that stand still for too long."""
        now = self._clock()
        gap = now - self._looked_at
        self._looked_at = now
        for rank, seen in self._seen.items():
            if gap > _OWN_STALL_S:  # the machine stood still, or we did
                seen.changed_at += gap
                seen.touched_at += gap
            self._read(rank, seen, now)
        return {
            rank: "silent" if now - seen.touched_at > SILENT_AFTER_S else "stalled"
            for rank, seen in self._seen.items()
            if now - seen.changed_at > self._limit_s(seen, now)
        }

    def silent(self) -> list[int]:
        """Ranks whose heartbeat has stopped, whatever their time limit."""
        self.look()
        return [
            rank
            for rank, seen in self._seen.items()
            if seen.progress is not None and self._looked_at - seen.touched_at > SILENT_AFTER_S
        ]

    def _limit_s(self, seen: _Seen, now: float) -> float:
        """The first step of a generation, and a save, have the longer limit."""
        is_alive = now - seen.touched_at <= SILENT_AFTER_S
        if seen.progress is not None and seen.progress.phase == "saving" and is_alive:
            return self._start_after_s  # it waits for the store, which says itself when it fails
        if seen.progress is None or seen.progress.phase in ("starting", "restoring", "done"):
            return self._start_after_s
        if seen.first_step is None or seen.progress.step <= seen.first_step:
            return self._start_after_s
        return self._hang_after_s

    def _read(self, rank: int, seen: _Seen, now: float) -> None:
        try:
            mtime_ns = self._paths[rank].stat().st_mtime_ns
            if mtime_ns == seen.mtime_ns:
                return
            progress = Progress.model_validate_json(self._paths[rank].read_bytes())
        except (OSError, ValidationError):
            return  # not there yet, or caught in the middle of a write
        if (progress.attempt, progress.generation) != self._pair:
            return
        seen.mtime_ns = mtime_ns
        seen.touched_at = now
        if progress.phase == "training" and seen.first_step is None:
            seen.first_step = progress.step
        before = seen.progress
        if before is None or (before.phase, before.step) != (progress.phase, progress.step):
            seen.changed_at = now
        seen.progress = progress
