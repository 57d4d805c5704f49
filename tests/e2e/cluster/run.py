"""One run of `make e2e`, from an empty machine to an empty machine, and the record of it."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from omni_contract.names import PLURAL
from tests.cluster.api import wait_for
from tests.cluster.real.requirements import require
from tests.cluster.real.traces import traces
from tests.e2e.cluster.checks import check_pod_security
from tests.e2e.cluster.faults import FAULTS
from tests.e2e.cluster.job import NUM_STEPS, demo_job
from tests.e2e.cluster.observer import Observer
from tests.e2e.cluster.play import Play, Say
from tests.e2e.cluster.record import Check, CheckResult, Fault, Record, Steps
from tests.e2e.cluster.stage import BUCKET, NAMESPACE, SYSTEM, TRAINING, Stage

JOB: Final = "stamps"
UNDISTURBED: Final = "stamps-undisturbed"

_TRAINING_S: Final = 900.0
_PODS_END_S: Final = 90.0
_MACHINE_END_S: Final = 30.0


@dataclass(slots=True, kw_only=True)
class _Notes:
    """What will be in the record, however the run ends."""

    began_s: float = field(default_factory=time.time)
    ended_s: float | None = None
    error: str | None = None
    undisturbed: list[Steps] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    leftover_pods: list[str] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    play: Play | None = None

    def record(self) -> Record:
        """All of it."""
        play = self.play
        return Record(
            job=JOB,
            began_s=self.began_s,
            ended_s=self.ended_s or time.time(),
            error=self.error,
            num_steps=NUM_STEPS,
            injections=play.injections if play else [],
            seen=play.observer.seen if play else [],
            events=self.events,
            steps=play.observer.steps() if play else [],
            undisturbed=self.undisturbed,
            leftover_pods=self.leftover_pods,
            checks=[*(play.checks if play else []), *self.checks],
            facts=self.facts,
        )


def run(
    archives: Sequence[Path], faults: Sequence[Fault], *, state: Path, logs: Path, say: Say
) -> Record:
    """Do these faults, of which all are judged together. Where some are left out, to try others, so
    are the undisturbed job and the end of the other one. `state`: an empty folder, where temporary
    files go, too.

    Raises MissingRequirement where this machine cannot have such a cluster.
    """
    require(state, user_id=os.geteuid())
    notes = _Notes()
    before = traces(state)
    try:
        with Stage(archives) as stage:
            notes.facts["stage_s"] = time.time() - notes.began_s
            say(f"The stage is set: {', '.join(stage.real.nodes)}")
            with _logs_kept(stage, logs):
                _act(stage, notes, faults, say)
    except (Exception, KeyboardInterrupt) as exc:
        notes.error = f"{type(exc).__name__}: {exc}"
        say(f"Broken off. {notes.error}")
    _check_machine(state, before, notes)
    return notes.record()


def _act(stage: Stage, notes: _Notes, faults: Sequence[Fault], say: Say) -> None:
    began_s = time.time()
    stage.fill_store()
    notes.facts["data_s"] = time.time() - began_s
    say(f"The store has the data after {notes.facts['data_s']:.0f} s")
    is_whole = list(faults) == list(FAULTS)
    if is_whole:
        began_s = time.time()
        notes.undisturbed = _train_undisturbed(stage, say)
        notes.facts["undisturbed_s"] = time.time() - began_s
    notes.began_s = time.time()
    with _applied(stage, JOB, say, spares=1) as play:
        notes.play = play
        try:
            check_pod_security(play)
            play.settle()
            for fault in faults:
                FAULTS[fault](play)
                play.settle()
            if is_whole:
                _wait_for_end(play)
                notes.leftover_pods = _leftover_pods(play)
        finally:
            notes.ended_s = time.time()
            notes.facts["job_s"] = notes.ended_s - notes.began_s
            with contextlib.suppress(Exception):  # what broke the run off matters more
                notes.events = _events(stage)


def _train_undisturbed(stage: Stage, say: Say) -> list[Steps]:
    """The same job, left alone, gone afterwards."""
    with _applied(stage, UNDISTURBED, say, spares=0) as play:
        _wait_for_end(play)
        stage.kubectl("delete", PLURAL, UNDISTURBED, f"--namespace={NAMESPACE}", "--wait=false")
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        api = stage.real.control_plane.api
        wait_for(lambda: not api.list(path), "an empty namespace", _PODS_END_S)
        return play.observer.steps()


@contextmanager
def _applied(stage: Stage, name: str, say: Say, *, spares: int) -> Iterator[Play]:
    """Apply the job and watch it."""
    job = demo_job(
        name,
        bucket=BUCKET,
        endpoint=stage.s3.endpoint,
        secret=stage.s3.secret,
        nodes=TRAINING,
        spares=spares,
    )
    api = stage.real.control_plane.api
    stage.kubectl("apply", f"--namespace={NAMESPACE}", "-f", "-", stdin=yaml.safe_dump(job))
    say(f"kubectl apply of job {name}, {NUM_STEPS} steps")
    with Observer(api, NAMESPACE, name, stage.run_folder) as observer:
        yield Play(stage, observer, name, say)


def _wait_for_end(play: Play) -> None:
    """Wait until the job is over; RuntimeError where it is not Completed."""
    play.wait_for_phase("Completed", _TRAINING_S)
    play.say(f"Job {play.job} is Completed")


def _leftover_pods(play: Play) -> list[str]:
    """Pods that still run some time after the job's end."""

    def running() -> list[str]:
        pods = play.observer.pods
        return [name for name, pod in pods.items() if pod.phase not in ("Succeeded", "Failed")]

    with contextlib.suppress(AssertionError):  # the record says which are left
        wait_for(lambda: not running(), "the end of all pods", _PODS_END_S)
    return running()


def _events(stage: Stage) -> list[dict[str, Any]]:
    path = f"/api/v1/namespaces/{NAMESPACE}/events"
    return stage.real.control_plane.api.list(path, fieldSelector=f"involvedObject.name={JOB}")


@contextmanager
def _logs_kept(stage: Stage, logs: Path) -> Iterator[None]:
    """Keep what processes and the operator said, for whoever looks for a cause."""
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the run's own end is what matters
            stage.real.save_logs(logs)
            for pod in stage.real.control_plane.api.list(f"/api/v1/namespaces/{SYSTEM}/pods"):
                name = pod["metadata"]["name"]
                for which in ("", "--previous"):
                    with contextlib.suppress(RuntimeError):  # there may be none before
                        said = stage.kubectl("logs", name, f"--namespace={SYSTEM}", *which.split())
                        (logs / f"{name}{which}.log").write_text(said)


def _check_machine(state: Path, before: set[str], notes: _Notes) -> None:
    with contextlib.suppress(AssertionError):  # the check says what is left
        wait_for(lambda: not traces(state) - before, "no trace", _MACHINE_END_S)
    left = sorted(traces(state) - before)
    detail = ", ".join(left) or "nothing is left on this machine"
    notes.checks.append(CheckResult(name=Check.MACHINE_CLEAN, holds=not left, detail=detail))
