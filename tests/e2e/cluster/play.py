"""The job on the stage while it is broken: waits, and what has been done and seen so far."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from omni_contract.names import PROGRESS_FILE
from omni_contract.records import Progress
from tests.e2e.cluster.observer import Observer
from tests.e2e.cluster.record import Check, CheckResult, Fault, Injection, Pod
from tests.e2e.cluster.run_folders import Pair
from tests.e2e.cluster.stage import Stage

NUM_SETTLING_STEPS: Final = 4
"""That are trained after a recovery before the next fault."""

_POLL_S: Final = 0.2
_TELL_S: Final = 20.0
_RECOVERY_S: Final = 300.0
_OVER: Final = ("Completed", "Failed")

T = TypeVar("T")
Say = Callable[[str], None]


class Play:
    """One job that is being broken."""

    def __init__(self, stage: Stage, observer: Observer, job: str, say: Say) -> None:
        self.stage = stage
        """All around the job."""
        self.observer = observer
        """What is known of the job."""
        self.job = job
        """Its name."""
        self.say = say
        """Shows a line of progress."""
        self.injections: list[Injection] = []
        """Faults so far; the last one may be under way."""
        self.checks: list[CheckResult] = []
        """Checks so far."""

    def begin(self, fault: Fault, detail: str) -> Injection:
        """Note a fault; what is told in `detail` is done right after."""
        (attempt, generation), step = self.observer.newest_step()
        injection = Injection(
            name=fault,
            began_s=time.time(),
            attempt=attempt,
            generation=generation,
            step=step,
            detail=detail,
        )
        self.injections.append(injection)
        self.say(f"{fault}: {detail}, at step {step} of attempt {attempt}.{generation}")
        return injection

    def check(self, name: Check, holds: bool, detail: str) -> None:
        """Note what a look at something has shown."""
        self.checks.append(CheckResult(name=name, holds=holds, detail=detail))
        self.say(f"{'ok' if holds else 'WRONG'}: {name}: {detail.splitlines()[0][:160]}")

    def wait(
        self, predicate: Callable[[], T | None], what: str, timeout_s: float = _RECOVERY_S
    ) -> T:
        """The first true answer; RuntimeError where it takes too long or the job is over before."""
        began_s = told_s = time.monotonic()
        while not (answer := predicate()):
            status = self.observer.status
            if status.phase in _OVER:
                raise RuntimeError(f"the job is {status.phase} before {what}")
            now_s = time.monotonic()
            if now_s - began_s > timeout_s:
                raise RuntimeError(
                    f"not within {timeout_s:.0f} s: {what}; the job is {status.phase}, "
                    f"{status.reason}, at step {self.observer.newest_step()[1]}"
                )
            if now_s - told_s > _TELL_S:
                told_s = now_s
                pair, step = self.observer.newest_step()
                self.say(
                    f"  {now_s - began_s:.0f} s for {what}: {status.phase} {status.reason or ''}, "
                    f"attempt {status.attempt}, step {step} of {pair[0]}.{pair[1]}"
                )
            time.sleep(_POLL_S)
        return answer

    def wait_for_phase(self, phase: str, timeout_s: float) -> None:
        """Wait for the end of the job; RuntimeError where it is another one."""
        self.wait(lambda: self.observer.status.phase == phase, phase, timeout_s)

    def wait_for_restart(self) -> None:
        """Wait until the job trains beyond the step of the last fault, as another pair."""
        fault = self.injections[-1]
        old = (fault.attempt, fault.generation)
        self._wait_for_step(lambda pair, step, _: pair > old and step > fault.step)

    def wait_for_steps_after(self, since_s: float) -> None:
        """Wait until the job has trained a step after this Unix time, by itself."""
        self._wait_for_step(lambda _pair, _step, end_s: end_s > since_s)

    def settle(self) -> None:
        """Wait until a few more steps are done and the operator has seen the recovery's end."""
        last = self.observer.newest_step()[1] + NUM_SETTLING_STEPS

        def is_told() -> bool:
            status = self.observer.status
            is_over = not status.incidents or "firstStep" in status.incidents[-1].seconds
            has_trained = self.observer.newest_step()[1] >= last
            return status.phase == "Running" and is_over and has_trained

        self.wait(is_told, f"step {last} in phase Running")

    def progress_file(self, pod: Pod, rank: int) -> Path:
        """Where a rank says how far it is."""
        return self.stage.run_folder(pod) / PROGRESS_FILE.format(rank=rank)

    def progress(self, pod: Pod, rank: int) -> Progress:
        """How far a rank says it is."""
        return Progress.model_validate_json(self.progress_file(pod, rank).read_bytes())

    def _wait_for_step(self, counts: Callable[[Pair, int, float], bool]) -> None:
        def first_s() -> float | None:
            ends = [
                end for pair, step, end in self.observer.step_times() if counts(pair, step, end)
            ]
            return min(ends, default=None)

        fault = self.injections[-1]
        end_s = self.wait(first_s, f"a step after {fault.name}")
        self.injections[-1] = fault.model_copy(update={"recovered_s": end_s})
        self.say(f"  trains again {end_s - fault.began_s:.1f} s after {fault.name}")
