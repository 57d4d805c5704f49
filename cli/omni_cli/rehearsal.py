"""Faults on order: people rehearse what a cluster will do to them, tests prove what we promise."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pydantic import ValidationError

from omni_cli.processes import Child
from omni_contract.errors import SpecError
from omni_contract.names import PROGRESS_FILE
from omni_contract.plan import JobPlan
from omni_contract.records import Progress
from omni_trainer.events import record_event
from omni_trainer.supervisor.reaper import is_descendant

Action = Literal["kill-rank", "stop-rank", "kill-sidecar", "kill-supervisor"]

HELP = """Break something on purpose; repeatable. WHAT:INDEX@WHEN with WHAT one of kill-rank,
stop-rank (it hangs), kill-sidecar, kill-supervisor (INDEX: rank, or node), and WHEN a step that
must be done, or a phase of that rank: starting, restoring, training, saving. Faults come in the
order given, each after the job has begun to recover from the one before. Examples:
kill-rank:2@60, stop-rank:1@5, kill-rank:0@saving, kill-supervisor:0@40."""

_SPEC = re.compile(
    r"(?P<action>kill-rank|stop-rank|kill-sidecar|kill-supervisor):(?P<index>\d+)"
    r"@(?:(?P<step>\d+)|(?P<phase>starting|restoring|training|saving))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault on order."""

    text: str
    action: Action
    index: int
    """Rank, or node for sidecars and supervisors."""
    step: int | None
    phase: str | None

    @classmethod
    def parse(cls, text: str, plan: JobPlan) -> "Fault":
        """Read WHAT:INDEX@WHEN. Raises SpecError where it is wrong or can never happen."""
        found = _SPEC.fullmatch(text.strip())
        if found is None:
            raise SpecError(
                "--fault",
                f"{text!r} is no fault; write WHAT:INDEX@WHEN, such as kill-rank:2@60, "
                "stop-rank:1@5, kill-sidecar:1@30, kill-supervisor:0@40 or kill-rank:0@saving",
            )
        fault = cls(
            text=text.strip(),
            action=cast(Action, found["action"]),
            index=int(found["index"]),
            step=int(found["step"]) if found["step"] else None,
            phase=found["phase"],
        )
        layout = plan.layout
        number, what = (
            (layout.world_size, "ranks") if fault.is_of_rank else (layout.num_nodes, "nodes")
        )
        if fault.index >= number:
            raise SpecError(
                "--fault", f"{text!r}: the job has {number} {what}, numbered 0 to {number - 1}"
            )
        if fault.step is not None and not 0 < fault.step < plan.num_steps:
            raise SpecError(
                "--fault",
                f"{text!r}: the job has {plan.num_steps} steps; use a step from 1 to "
                f"{plan.num_steps - 1}",
            )
        return fault

    @property
    def is_of_rank(self) -> bool:
        """Whether it hits a rank."""
        return self.action.endswith("rank")

    def is_due(self, progress: Progress, after: tuple[int, int]) -> bool:
        """Whether the time has come. `after`: the pair that the fault before has ended."""
        if (progress.attempt, progress.generation) <= after:
            return False
        if self.step is not None:
            return progress.step >= self.step and progress.phase in ("training", "saving")
        return progress.phase == self.phase


class Rehearsal:
    """The faults of one run, in order."""

    def __init__(
        self, faults: Sequence[Fault], *, plan: JobPlan, run_dir: Path, first: int
    ) -> None:
        """`first`: the attempt that the run begins with; older files mean nothing."""
        self._left = list(faults)
        self._layout = plan.layout
        self._run_dir = run_dir
        self._after = (first, -1)

    @property
    def left(self) -> Sequence[Fault]:
        """Faults that have not happened yet."""
        return tuple(self._left)

    @property
    def needs_haste(self) -> bool:
        """Whether the next fault waits for a phase, which may be short."""
        return bool(self._left) and self._left[0].phase is not None

    def strike(
        self, sidecars: Mapping[int, Child], supervisors: Mapping[int, Child]
    ) -> Fault | None:
        """Cause the next fault if its time has come; returns it."""
        if not self._left:
            return None
        fault = self._left[0]
        rank = fault.index if fault.is_of_rank else self._layout.ranks_of_node(fault.index)[0]
        progress = read_progress(self._run_dir, rank)
        if progress is None or not fault.is_due(progress, self._after):
            return None
        if fault.is_of_rank:
            if not is_descendant(progress.pid):
                return None
            self._record(fault, progress)
            stop = fault.action == "stop-rank"
            os.kill(progress.pid, signal.SIGSTOP if stop else signal.SIGKILL)
        else:
            children = sidecars if fault.action == "kill-sidecar" else supervisors
            if fault.index not in children or children[fault.index].exit_code is not None:
                return None
            self._record(fault, progress)
            children[fault.index].send(signal.SIGKILL)
        if fault.action != "kill-sidecar":  # a sidecar comes back within the generation
            self._after = (progress.attempt, progress.generation)
        self._left.pop(0)
        return fault

    def _record(self, fault: Fault, progress: Progress) -> None:
        """Write down when it strikes: how long recovery takes is counted from here."""
        record_event(
            self._run_dir,
            kind="rehearsed_fault",
            attempt=progress.attempt,
            generation=progress.generation,
            step=progress.step,
            message=fault.text,
        )


def read_progress(run_dir: Path, rank: int) -> Progress | None:
    """The newest state of a rank; None: there is none yet."""
    try:
        return Progress.model_validate_json(
            (run_dir / PROGRESS_FILE.format(rank=rank)).read_bytes()
        )
    except (OSError, ValidationError):
        return None
