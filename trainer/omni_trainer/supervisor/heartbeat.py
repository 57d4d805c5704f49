"""How far a run is, from its folder: what rank 0's pod tells the operator. Reads files, no more."""

import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from omni_contract.names import EVENTS_FILE, METRICS_FILE, PROGRESS_FILE
from omni_contract.records import History, JobHeartbeat, Progress, RunEvent, StepRecord
from omni_contract.spec_run import FaultClass, RestartAction
from omni_trainer.supervisor.tail import Tail
from omni_trainer.supervisor.verdict import history_of

_MINUTE_S = 60.0
_PHASES: dict[str, Literal["starting", "training", "saving", "done"]] = {
    "starting": "starting",
    "restoring": "starting",
    "training": "training",
    "saving": "saving",
    "done": "done",
}


class RunReader:
    """Follows the records of a run in the folder of the pod that holds rank 0."""

    def __init__(self, run_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._progress = run_dir / PROGRESS_FILE.format(rank=0)
        self._steps = Tail(run_dir / METRICS_FILE, StepRecord)
        self._news = Tail(run_dir / EVENTS_FILE, RunEvent)
        self._clock = clock
        self._events: list[RunEvent] = []
        self._recent: deque[StepRecord] = deque()
        self._checkpoint_step: int | None = None
        self.tokens = TokenCount()

    def read(self, attempt: int, initial: History) -> JobHeartbeat:
        """The state of an attempt. `initial`: the restarts before it."""
        progress = self._read_progress()  # before the events, of which it is a consequence
        self._follow(attempt)
        in_place = [e for e in self._events if e.action is RestartAction.RESTART_IN_PLACE]
        restarts = [e for e in in_place if e.kind == "restart"]
        faults = [e for e in in_place if e.kind == "fault"]
        last = faults[-1] if restarts and faults else None
        generation = max((e.generation + 1 for e in restarts), default=0)
        phase: Literal["starting", "training", "saving", "done"] = "starting"
        step = self._checkpoint_step or 0
        if progress is not None and (progress.attempt, progress.generation) >= (
            attempt,
            generation,
        ):
            generation, phase = progress.generation, _PHASES[progress.phase]
            step = step if phase == "starting" else progress.step
        seconds = sum(record.step_s for record in self._recent)
        return JobHeartbeat(
            attempt=attempt,
            generation=generation,
            phase=phase,
            step=step,
            step_s=seconds / len(self._recent) if self._recent else None,
            tokens=self.tokens.total,
            tokens_per_second=sum(r.tokens for r in self._recent) / max(seconds, 1e-9)
            if self._recent
            else None,
            loss=self._recent[-1].loss if self._recent else None,
            checkpoint_step=self._checkpoint_step,
            resumed_step=None if phase == "starting" else self._resumed_step(generation),
            history=history_of(in_place, initial),
            last_fault=None if last is None else last.fault or FaultClass.UNKNOWN,
            last_message="" if last is None else last.message,
        )

    def _follow(self, attempt: int) -> None:
        for event in self._news.read():
            self._events.append(event)
            if event.kind in ("checkpoint", "resumed"):
                self._checkpoint_step = event.step
        self._events = [event for event in self._events if event.attempt == attempt]
        for record in self._steps.read():
            self.tokens.add(record.step, record.tokens)
            self._recent.append(record)
        oldest_s = self._clock() - _MINUTE_S
        while len(self._recent) > 1 and self._recent[0].time_s < oldest_s:
            self._recent.popleft()

    def _resumed_step(self, generation: int) -> int:
        """What a generation that trains went on from."""
        of_it = (e for e in self._events if e.kind == "resumed" and e.generation == generation)
        return max((event.step or 0 for event in of_it), default=0)

    def _read_progress(self) -> Progress | None:
        try:
            return Progress.model_validate_json(self._progress.read_bytes())
        except (OSError, ValidationError):
            return None


class TokenCount:
    """Tokens consumed since step 1, where steps may be done again after a restart.

    What came before the first step seen here is taken from an earlier count, in proportion where
    that count is of another step.
    """

    def __init__(self) -> None:
        self._before_step = 0
        self._before_tokens = 0
        self._sums = array("q")
        """Tokens of the steps seen here, summed up: item i is of `_before_step` + 1 + i."""

    @property
    def total(self) -> int:
        """Tokens up to the newest step."""
        return self._before_tokens + (self._sums[-1] if self._sums else 0)

    def begin(self, *, step: int, tokens: int) -> None:
        """Take over the count of another pod."""
        if not self._sums:
            self._before_step, self._before_tokens = step, tokens
        elif not self._before_tokens and step:  # it is told late
            self._before_tokens = round(tokens * self._before_step / step)

    def add(self, step: int, tokens: int) -> None:
        """Count a step; the steps from it on that were counted before are taken back."""
        if not self._sums or step <= self._before_step:
            share = (step - 1) / max(self._before_step, 1)
            self._before_tokens = round(self._before_tokens * share)
            self._before_step = step - 1
            self._sums = array("q")
        place = step - 1 - self._before_step
        del self._sums[place:]
        last = self._sums[-1] if self._sums else 0
        self._sums.extend([last] * (place - len(self._sums)))  # a line that was lost
        self._sums.append(last + tokens)
