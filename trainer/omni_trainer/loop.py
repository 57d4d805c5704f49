"""The steps of one rank: data in, engine step, records out, a save every so often.

Every rank runs the same loop; what one of them is told (to end) all of them learn before a step.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from omni_contract.plan import JobPlan
from omni_trainer.batch import StepResult
from omni_trainer.data import DataClient, EndOfData, StepData
from omni_trainer.environment import RankEnvironment
from omni_trainer.metrics import RunFolder, consumed_record, step_record
from omni_trainer.progress import ProgressFile
from omni_trainer.saver import Saver
from omni_trainer.train import Engine


@dataclass(slots=True, kw_only=True)
class Ending:
    """Whether this process was told to end, as its signal handler notes it."""

    is_asked: bool = False
    is_deferred: bool = False
    """True while steps run: then the end waits for the next step boundary and a save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLoop:
    """The loop and all that it acts on."""

    env: RankEnvironment
    plan: JobPlan
    engine: Engine
    data: DataClient
    saver: Saver
    records: RunFolder
    progress: ProgressFile
    ending: Ending
    agree: Callable[[int], int]
    """The greatest of all ranks' numbers; collective over the world."""

    def run(self, resumed_step: int) -> bool:
        """Train from the step after `resumed_step` to the end. True: told to end before it."""
        done = saved = resumed_step
        self.ending.is_deferred = True
        interrupted = False
        self.progress.update("training", done)
        while done < self.plan.num_steps:
            if self.agree(int(self.ending.is_asked)):
                interrupted = True
                print(f"told to end, after step {done}", file=sys.stderr)
                break
            try:
                self._step(done + 1)
            except EndOfData as exc:
                print(f"the data ends after step {done}: {exc}", file=sys.stderr)
                break
            done += 1
            self.progress.update("training", done)
            if done % self.plan.spec.checkpoint.every == 0 and done < self.plan.num_steps:
                self._save(done, last=False)
                saved = done
        if done == saved:  # there is nothing new, but the save under way must end well
            self.saver.settle(must_succeed=True)
        else:
            self._save(done, last=True)
        self.progress.update("done", done)
        return interrupted

    def _step(self, step: int) -> None:
        begin_s = time.monotonic()
        data = self.data.next(step)
        is_traced = step in self.env.trace_steps
        engine_s = time.time()
        result = self.engine.step(data.inputs, trace=is_traced)
        self.data.release(step)
        self._record(data, result, step_s=time.monotonic() - begin_s, end_s=time.time())
        if is_traced:
            coords = self.plan.layout.coords(self.env.rank)
            self.records.write_trace(step, coords, engine_s, result)

    def _record(self, data: StepData, result: StepResult, *, step_s: float, end_s: float) -> None:
        if self.plan.layout.is_last_stage(self.env.rank):
            self.records.write_consumed(
                consumed_record(
                    pair=self.env.pair,
                    rank=self.env.rank,
                    inputs=data.inputs,
                    sources=sorted(self.plan.spec.data.sources),
                )
            )
        if self.env.rank == 0:
            self.records.write_step(
                step_record(
                    pair=self.env.pair, data=data, result=result, step_s=step_s, time_s=end_s
                )
            )

    def _save(self, step: int, *, last: bool) -> None:
        self.progress.update("saving", step)
        state = self.data.snapshot(step) if self.env.rank == 0 else None
        self.saver.save(step, self.engine.state(), state, last=last)
        self.progress.update("training", step)
