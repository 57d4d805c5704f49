"""What a person sees while a job runs: a live line on a terminal, plain lines elsewhere."""

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.text import Text

from omni_contract.names import EVENTS_FILE, METRICS_FILE
from omni_contract.plan import JobPlan
from omni_contract.records import RunEvent, StepRecord
from omni_trainer.supervisor.tail import Tail

LINE_EVERY_S = 5.0
_RATE_STEPS = 20
_QUIET = ("checkpoint", "started")
_STYLES = {
    "fault": "bold red",
    "gave_up": "bold red",
    "checkpoint_failed": "red",
    "restart": "yellow",
    "sidecar_restarted": "yellow",
    "recovered": "green",
    "completed": "bold green",
}


class RunView:
    """Follows metrics and events of a run folder."""

    def __init__(
        self,
        plan: JobPlan,
        run_dir: Path,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows what is written from now on."""
        self._plan = plan
        self._console = console
        self._clock = clock
        self._steps = Tail(run_dir / METRICS_FILE, StepRecord, from_end=True)
        self._events = Tail(run_dir / EVENTS_FILE, RunEvent, from_end=True)
        self._recent: deque[StepRecord] = deque(maxlen=_RATE_STEPS)
        self._shown_at = clock()
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self.last: StepRecord | None = None
        """Newest step."""
        self.restarts = 0
        """Restarts so far."""
        self.num_steps_seen = 0
        """Steps done since the view began, replays included."""

    def __enter__(self) -> "RunView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """Read what is new and show it."""
        steps = self._steps.read()
        self.num_steps_seen += len(steps)
        for step in steps:
            if self._recent and step.step != self._recent[-1].step + 1:
                self._recent.clear()  # a replay: times across the break say nothing
            self._recent.append(step)
        if steps:
            self.last = steps[-1]
        for event in self._events.read():
            self.restarts += event.kind == "restart"
            if event.kind not in _QUIET or self._live is None:
                self.say(event_line(event), style=_STYLES.get(event.kind, ""))
        if self._live is not None:
            if steps:
                self._live.update(self._picture(), refresh=True)
        elif self.last is not None and steps and self._is_time():
            self.say(self.line())

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line above the live one."""
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The state in one line."""
        step = self.last
        if step is None:
            return "no step yet"
        shares = ", ".join(
            f"{name} {100 * share:.0f} %" for name, share in modality_shares(step).items()
        )
        restarts = f"{self.restarts} restart{'' if self.restarts == 1 else 's'}"
        return (
            f"step {step.step}/{self._plan.num_steps}  loss {step.loss:.4f}  "
            f"{self._tokens_per_s():,.0f} tokens/s  {shares}  "
            f"attempt {step.attempt}.{step.generation}  {restarts}  ETA {self._eta()}"
        )

    def _picture(self) -> RenderableType:
        done = self.last.step if self.last is not None else 0
        bar = ProgressBar(total=self._plan.num_steps, completed=done)
        # The bar comes last: it ends without a line break.
        return Group(Text(self.line(), no_wrap=True, overflow="ellipsis"), bar)

    def _is_time(self) -> bool:
        now = self._clock()
        is_last = self.last is not None and self.last.step == self._plan.num_steps
        is_first = self.num_steps_seen == 1
        if now - self._shown_at < LINE_EVERY_S and not is_last and not is_first:
            return False
        self._shown_at = now
        return True

    def _tokens_per_s(self) -> float:
        return sum(s.tokens for s in self._recent) / max(sum(s.step_s for s in self._recent), 1e-9)

    def _eta(self) -> str:
        assert self.last is not None
        per_step_s = sum(s.step_s for s in self._recent) / len(self._recent)
        left_s = round((self._plan.num_steps - self.last.step) * per_step_s)
        hours, minutes = divmod(left_s // 60, 60)
        return f"{hours}:{minutes:02d}:{left_s % 60:02d}"


def modality_shares(step: StepRecord) -> dict[str, float]:
    """Share of each modality of a step's tokens."""
    total = max(sum(step.tokens_by_modality.values()), 1)
    return {str(name): n / total for name, n in sorted(step.tokens_by_modality.items())}


def event_line(event: RunEvent) -> str:
    """An event as one line, with its pair."""
    kind = event.kind.replace("_", " ")
    return f"[{event.attempt}.{event.generation}] {kind}: {event.message}"
