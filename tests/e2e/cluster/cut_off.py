"""The node of the rendezvous host and of rank 0 is cut off: wholly, or from the API alone."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psutil
from pydantic import ValidationError

from omni_contract.names import EVENTS_FILE, LABEL_JOB
from omni_contract.records import RunEvent
from tests.e2e.cluster.checks import check_stored_logs
from tests.e2e.cluster.containers import TRAINER, first_process, processes_of, rank_process, send
from tests.e2e.cluster.job import SAVE_EVERY
from tests.e2e.cluster.play import Play
from tests.e2e.cluster.record import Check, Fault, Pod
from tests.e2e.cluster.stage import BUCKET, NAMESPACE

_NODE: Final = 0
"""Of the plan: its pod has the rendezvous and rank 0, which moves `latest`."""
_HEAL_S: Final = 150.0
_LOOK_S: Final = 0.002
"""Between two looks for a save, which takes some tenths of a second."""
_STEPS_BEFORE_SAVE: Final = (2, 4)
"""So many steps before a save the node is cut off: it must begin before the node counts as lost."""


def cut_off_wholly(play: Play) -> None:
    """The spare takes over. The node comes back and stays clean."""
    name, pod = play.observer.pod_of(_NODE)
    play.begin(Fault.NODE_CUT_OFF, f"the cable of node {pod.node} with pod {name} is pulled")
    play.stage.real.partition(pod.node)
    play.wait_for_restart()
    _heal(play, name, pod)
    check_stored_logs(play, pod.attempt, _NODE)


def cut_off_from_api(play: Play) -> None:
    """Nobody can tell the old trainer that its time is over, and it can still write to the store.

    It is stopped in the middle of a save, as a machine that swaps would be, and goes on once the
    next attempt has claimed the run: then it moves `latest`, unless it is refused.
    """
    name, pod = play.observer.pod_of(_NODE)
    trainer = _Trainer.find(play, name, pod)
    fewest, most = _STEPS_BEFORE_SAVE
    play.wait(
        lambda: fewest <= SAVE_EVERY - play.observer.newest_step()[1] % SAVE_EVERY <= most,
        "a save that is near",
    )
    play.begin(
        Fault.API_CUT_OFF,
        f"node {pod.node} with pod {name} is cut off from the API server; its trainer is stopped "
        "in the next save until the next attempt has claimed the run",
    )
    play.stage.real.partition(pod.node, api_only=True)
    step = _stop_in_save(play, trainer)
    with _stopped(trainer):
        before = _latest(play)
        play.say(f"  stopped in the save of step {step}; latest has attempt {before['attempt']}")
        play.wait(lambda: _latest(play)["attempt"] > pod.attempt, "the next attempt's claim")
        trainer.rank.send_signal(signal.SIGCONT)
        said = play.wait(lambda: _outcome(play, trainer, step), "the end of the late save", 60)
    after = _latest(play)
    play.check(
        Check.LATE_MOVE,
        said.kind == "checkpoint_failed"
        and "holds this run now" in said.message
        and after["attempt"] > pod.attempt
        and all(ref["step"] != step for ref in after["checkpoints"]),
        f"the late save of step {step} by attempt {pod.attempt} came to: {said.message}; latest "
        f"is held by attempt {after['attempt']}",
    )
    play.wait_for_restart()
    _heal(play, name, pod)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trainer:
    """The trainer container that rank 0 is in."""

    pod: Pod
    rank: psutil.Process
    """Rank 0."""
    first: psutil.Process
    """Of the container."""

    @classmethod
    def find(cls, play: Play, name: str, pod: Pod) -> "_Trainer":
        return cls(
            pod=pod,
            rank=rank_process(name, play.progress(pod, 0)),
            first=first_process(name, TRAINER),
        )

    def others(self) -> list[psutil.Process]:
        """All processes but rank 0, parents first."""
        rest = self.first.children(recursive=True)
        return [self.first, *(process for process in rest if process.pid != self.rank.pid)]


def _stop_in_save(play: Play, trainer: _Trainer) -> int:
    """Stop rank 0 in its next save, once all others have written their parts; the step saved."""
    until_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, ValidationError):  # in the middle of a write
            progress = play.progress(trainer.pod, 0)
            if progress.phase == "saving":
                trainer.rank.send_signal(signal.SIGSTOP)
                break
        if time.monotonic() > until_s:
            raise RuntimeError("rank 0 did not save within 60 s")
        time.sleep(_LOOK_S)
    step = progress.step
    folder = f"{BUCKET}/runs/{play.job}/step-{step:08d}/"

    def parts() -> list[str]:
        return [info.uri for info in play.stage.store.list(folder) if "/done-" in info.uri]

    play.wait(lambda: len(parts()) >= 3, "the parts of all ranks but rank 0", 20)
    return step


@contextmanager
def _stopped(trainer: _Trainer) -> Iterator[None]:
    """Rank 0 and all around it stand still; whatever of them is left goes on at the end."""
    others = trainer.others()
    send(others, signal.SIGSTOP)
    try:
        yield
    finally:
        send([trainer.rank, *others], signal.SIGCONT)


def _outcome(play: Play, trainer: _Trainer, step: int) -> RunEvent | None:
    """How the save of a step ended, as rank 0 has noted it in its run folder."""
    events = RunEvent.read_all(play.stage.run_folder(trainer.pod) / EVENTS_FILE)
    ends = ("checkpoint", "checkpoint_failed")
    return next((one for one in events if one.kind in ends and one.step == step), None)


def _latest(play: Play) -> dict[str, Any]:
    found = play.stage.store.read(f"{BUCKET}/runs/{play.job}/latest")
    latest: dict[str, Any] = json.loads(found)
    return latest


def _heal(play: Play, name: str, pod: Pod) -> None:
    """Bring the node back, and look that nothing of the pod that it had is left on it."""
    play.stage.real.heal(pod.node)
    play.stage.real.nodes[pod.node].wait_until_ready()
    api = play.stage.real.control_plane.api
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"

    def left() -> list[str]:
        listed = api.list(path, labelSelector=f"{LABEL_JOB}={play.job}")
        pods = [one["metadata"]["name"] for one in listed if one["metadata"]["name"] == name]
        return [*pods, *map(str, processes_of(name))]

    began_s = time.monotonic()
    while (found := left()) and time.monotonic() - began_s < _HEAL_S:
        time.sleep(1)
    play.check(
        Check.NODE_CLEAN,
        not found,
        f"{pod.node}, {time.monotonic() - began_s:.0f} s after it is Ready again, has of pod "
        f"{name}: {found or 'nothing'}",
    )
