"""A made-up record of `make e2e` in which all comes as it must: each fault at its step, each
recovery with its seconds. Tests break it in one place each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_contract.spec_run import RestartAction
from omni_contract.status import Incident, JobProgress, JobStatus, RestartBudget, write_time
from tests.e2e.cluster.expected import Expectation, expectation_of
from tests.e2e.cluster.record import (
    Check,
    CheckResult,
    Fault,
    Injection,
    Pod,
    Record,
    Seen,
    Steps,
)

BEGAN_S: Final = 1_800_000_000.0
NUM_STEPS: Final = 120
SAVE_EVERY: Final = 10
STEP_S: Final = 2.0
NODES: Final = ("node-a", "node-b", "node-c")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strike:
    """When a fault strikes and how long it takes."""

    fault: Fault
    after_step: int
    detect_s: float
    """Until the incident."""
    resume_s: float
    """Until the first step."""
    index: int = 1
    """Of the pod that falls, where one does."""


STRIKES: Final = (
    _Strike(fault=Fault.RANK_KILLED, after_step=13, detect_s=5, resume_s=14),
    _Strike(fault=Fault.POD_DELETED, after_step=26, detect_s=1, resume_s=32),
    _Strike(fault=Fault.SIDECAR_KILLED, after_step=39, detect_s=0, resume_s=4),
    _Strike(fault=Fault.NODE_CUT_OFF, after_step=52, detect_s=41, resume_s=66, index=0),
    _Strike(fault=Fault.API_CUT_OFF, after_step=65, detect_s=44, resume_s=75, index=0),
    _Strike(fault=Fault.LEADER_KILLED, after_step=78, detect_s=1, resume_s=48),
    _Strike(fault=Fault.STORE_RESTARTED, after_step=91, detect_s=0, resume_s=7),
    _Strike(fault=Fault.CHART_UPGRADED, after_step=104, detect_s=0, resume_s=2),
)
"""What befalls the job, in the order of the table."""


def loss_of(step: int) -> float:
    """The loss that every doing of a step must come to."""
    return 0.9 + 2.3 * math.exp(-step / 35) + 0.05 * math.sin(2.7 * step)


def samples_of(step: int) -> list[str]:
    """The samples of a step in order."""
    return [f"books/0/{4 * step + place}/0" for place in range(4)]


def made_record() -> Record:
    """The record."""
    return _Story().tell()


def with_status(seen: Seen, **changes: Any) -> Seen:
    """A look with other fields in its status."""
    return seen.model_copy(update={"status": {**seen.status, **changes}})


class _Story:
    """Plays the job through its faults and writes down what an onlooker sees."""

    def __init__(self) -> None:
        self._now_s = BEGAN_S
        self._step = 0
        self._status = JobStatus()
        self._seen: list[Seen] = []
        self._injections: list[Injection] = []
        self._steps: list[Steps] = []
        self._pods: dict[str, Pod] = {}
        self._born = 0

    def tell(self) -> Record:
        self._look()
        for index, node in enumerate(NODES):
            self._bear(node, index if index < 2 else None, attempt=1)
        self._open(attempt=1)
        self._wait(12)
        self._run_pods()
        self._wait(9)
        for strike in STRIKES:
            self._train(strike.after_step)
            self._strike(strike)
        self._train(NUM_STEPS)
        ended_s = self._now_s + 2
        self._wait(2)
        self._pods = {}
        self._look(phase="Completed", reason="AllStepsDone", completion_time=write_time(ended_s))
        return Record(
            job="stamps",
            began_s=BEGAN_S,
            ended_s=ended_s,
            num_steps=NUM_STEPS,
            injections=self._injections,
            seen=self._seen,
            events=[],
            steps=self._steps,
            undisturbed=[_undisturbed()],
            leftover_pods=[],
            checks=[
                CheckResult(name=check, holds=True, detail="as it must be")
                for check in (*Check, Check.NODE_CLEAN)  # once for each node that was cut off
            ],
            facts={"images_imported_s": 41.0},
        )

    def _strike(self, strike: _Strike) -> None:
        expected, began_s = expectation_of(strike.fault), self._now_s + 0.5
        attempt, generation = self._status.attempt, self._status.generation
        highest = self._step
        self._now_s = began_s
        if expected.fault is None:
            self._wait(strike.resume_s - STEP_S)
        else:
            self._restart(strike, expected)
        self._train(highest + 1)
        self._injections.append(
            Injection(
                name=strike.fault,
                began_s=began_s,
                attempt=attempt,
                generation=generation,
                step=highest,
                detail=expected.done,
                recovered_s=self._now_s,
            )
        )

    def _restart(self, strike: _Strike, expected: Expectation) -> None:
        assert expected.fault is not None and expected.action is not None
        began_s, status = self._now_s, self._status
        name = next(n for n, pod in self._pods.items() if pod.index == strike.index)
        node = self._pods[name].node
        in_place = expected.action is RestartAction.RESTART_IN_PLACE
        told = Incident(
            time=write_time(began_s + strike.detect_s),
            fault=expected.fault,
            action=expected.action,
            attempt=status.attempt,
            generation=status.generation,
            message=expected.done,
            seconds={} if in_place else {"detect": strike.detect_s, "decide": 0.1},
            pod=None if in_place else name,
            kubernetes_node=None if in_place else node,
        )
        self._wait(strike.detect_s)
        budget = RestartBudget(infrastructure=status.budget.infrastructure + 1)
        more: dict[str, Any] = {"incidents": [*status.incidents, told], "budget": budget}
        more["restarts"] = budget.infrastructure
        if in_place:
            self._look(phase="Restarting", generation=status.generation + 1, **more)
        else:
            self._mark(name, is_leaving=True)
            self._open(attempt=status.attempt + 1, **more)
            self._replace(strike, name)
        rest_s = strike.resume_s - strike.detect_s
        self._wait(began_s + strike.resume_s - self._now_s)
        self._step -= self._step % SAVE_EVERY
        self._steps.append(self._new_pair())
        stages = {"firstStep": rest_s}
        if not in_place:
            parts = {"terminate": 0.1, "schedule": 0.1, "start": 0.4, "firstStep": 0.4}
            stages = {stage: (rest_s - 0.1) * share for stage, share in parts.items()}
        self._do_step()
        over = told.model_copy(update={"seconds": {**told.seconds, **stages}})
        self._look(phase="Running", incidents=[*status.incidents, over])
        if expected.partitions:
            self._pods.pop(name)
            self._look()

    def _replace(self, strike: _Strike, name: str) -> None:
        """Another pod in the place of one: the spare, or a new one on the free node."""
        attempt = self._status.attempt
        spare = next((n for n, pod in self._pods.items() if pod.index is None), None)
        is_lost = expectation_of(strike.fault).partitions
        if not is_lost:
            node = self._pods.pop(name).node
            self._bear(node, strike.index, attempt=attempt)
        elif spare is not None:
            self._mark(spare, index=strike.index)
        else:
            taken = {pod.node for pod in self._pods.values()}
            self._bear(next(n for n in NODES if n not in taken), strike.index, attempt=attempt)
        for other, pod in self._pods.items():
            if not pod.is_leaving:
                self._mark(other, attempt=attempt)
        self._look()
        self._wait(6)
        self._run_pods()

    def _bear(self, node: str, index: int | None, *, attempt: int) -> None:
        self._born += 1
        self._pods[f"stamps-{self._born}"] = Pod(
            uid=f"uid-{self._born}", node=node, phase="Pending", attempt=attempt, index=index,
            is_leaving=False,
        )  # fmt: skip

    def _run_pods(self) -> None:
        for name, pod in self._pods.items():
            if not pod.is_leaving:
                self._mark(name, phase="Running")
        self._look(phase="Running" if self._status.attempt == 1 else self._status.phase)

    def _mark(self, name: str, **changes: Any) -> None:
        self._pods[name] = self._pods[name].model_copy(update=changes)

    def _open(self, *, attempt: int, **changes: Any) -> None:
        phase = "Starting" if attempt == 1 else "Restarting"
        self._look(phase=phase, attempt=attempt, generation=0, **changes)

    def _train(self, last: int) -> None:
        if not self._steps:
            self._steps.append(self._new_pair())
        while self._step < last:
            self._wait(STEP_S)
            self._do_step()

    def _do_step(self) -> None:
        self._step += 1
        pair = self._steps[-1]
        if self._step not in pair.losses:
            pair.losses[self._step] = loss_of(self._step)
            pair.times_s[self._step] = self._now_s
            pair.samples[self._step] = samples_of(self._step)
        if self._step % SAVE_EVERY == 0:
            progress = JobProgress(step=self._step, num_steps=NUM_STEPS, loss=loss_of(self._step))
            self._look(progress=progress, goodput=0.61)

    def _new_pair(self) -> Steps:
        return Steps(
            attempt=self._status.attempt, generation=self._status.generation, losses={},
            times_s={}, samples={},
        )  # fmt: skip

    def _wait(self, seconds: float) -> None:
        self._now_s += seconds

    def _look(self, **changes: Any) -> None:
        self._status = self._status.model_copy(update=changes)
        status: Mapping[str, Any] = self._status.model_dump(mode="json", by_alias=True)
        self._seen.append(Seen(at_s=self._now_s, status=dict(status), pods=dict(self._pods)))


def _undisturbed() -> Steps:
    steps = range(1, NUM_STEPS + 1)
    return Steps(
        attempt=1,
        generation=0,
        losses={step: loss_of(step) for step in steps},
        times_s={step: BEGAN_S - 900 + STEP_S * step for step in steps},
        samples={step: samples_of(step) for step in steps},
    )
