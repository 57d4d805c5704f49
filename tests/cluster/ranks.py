"""Supervisors of simulated pods: they make steps while all pods of an attempt run, tell so by the
progress Lease, go on from the last checkpoint in the next attempt, and end when all is done."""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from urllib3.exceptions import HTTPError

from omni_contract.names import ANNOTATION_HISTORY, ANNOTATION_PROGRESS, TRAINER_CONTAINER
from omni_contract.quantity import parse_count
from omni_contract.records import History, JobHeartbeat
from tests.cluster.api import Api, ApiError, Object
from tests.cluster.history import History as Recorded
from tests.cluster.jobs import attempt_of, index_of, is_gated, is_living, name_of, uid_of
from tests.cluster.nodes import now
from tests.cluster.pods import Pods

STEP_S: Final = 1.0
CHECKPOINT_STEPS: Final = 10

_TICK_S: Final = 0.5
_BEAT_S: Final = 2.0


@dataclass(slots=True, kw_only=True)
class _Run:
    """What the ranks of one job hold, and what they saved."""

    attempt: int = 0
    step: float = 0.0
    saved: int = 0
    """Steps that a restart goes on from."""
    told_s: float = 0.0
    """When the Lease was last renewed."""
    is_done_told: bool = False
    highest: int = 0
    """Most steps ever made."""


class Ranks:
    """Context manager: the ranks of all jobs. Those on nodes in `dark` stand still."""

    def __init__(self, api: Api, recorded: Recorded, dark: Collection[str] = ()) -> None:
        self._api = api
        self._recorded = recorded
        self._dark = dark
        self._runs: dict[str, _Run] = defaultdict(_Run)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)
        self._failures: list[Exception] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended the simulation, if anything did."""
        if self._failures:
            raise self._failures[0]

    def step(self, uid: str) -> int:
        """Steps that a job has made, those done again not counted."""
        return self._runs[uid].highest

    def _go(self) -> None:
        before_s = time.monotonic()
        while not self._stop.wait(_TICK_S):
            now_s = time.monotonic()
            pods = defaultdict(list)
            for pod in self._recorded.now("pod"):
                owners = pod["metadata"].get("ownerReferences") or []
                if owners:
                    pods[owners[0]["uid"]].append(pod)
            for job in self._recorded.now("job"):
                try:
                    self._train(job, pods.get(uid_of(job), []), now_s, now_s - before_s)
                except (ApiError, HTTPError):
                    pass  # A real one would try again, too.
                except Exception as exc:
                    self._failures.append(exc)
                    raise
            before_s = now_s

    def _train(self, job: Object, pods: Sequence[Object], now_s: float, passed_s: float) -> None:
        ranked = [pod for pod in pods if not is_gated(pod) and index_of(pod) is not None]
        if not ranked:
            return
        run = self._runs[uid_of(job)]
        attempt = max(map(attempt_of, ranked))
        if attempt > run.attempt:
            run.attempt, run.step, run.told_s, run.is_done_told = attempt, run.saved, 0.0, False
        mine = {index_of(pod): pod for pod in ranked if attempt_of(pod) == attempt}
        step_tokens = _step_tokens(job)
        total = -(-parse_count(job["spec"]["train"]["tokens"]) // step_tokens)
        if run.is_done_told:
            self._end(mine.values())
            return
        running = {index: pod for index, pod in mine.items() if self._is_running(pod)}
        num_nodes = (job.get("status") or {}).get("numNodes")
        if num_nodes is None or set(running) != set(range(num_nodes)):
            return  # Where the watch of jobs is behind that of pods, the job has no status yet.
        if run.told_s:
            run.step = min(total, run.step + passed_s / STEP_S)
        made = math.floor(run.step)
        run.highest = max(run.highest, made)
        run.saved = max(run.saved, made // CHECKPOINT_STEPS * CHECKPOINT_STEPS)
        if made == total:
            run.saved = total
        elif now_s - run.told_s < _BEAT_S:
            return
        self._beat(job, running[0], run, tokens=made * step_tokens, is_done=made == total)
        run.told_s = now_s
        run.is_done_told = made == total

    def _is_running(self, pod: Object) -> bool:
        if not is_living(pod) or pod["spec"].get("nodeName") in self._dark:
            return False
        states = pod["status"].get("containerStatuses") or []
        return any(one["name"] == TRAINER_CONTAINER and "running" in one["state"] for one in states)

    def _beat(self, job: Object, pod: Object, run: _Run, *, tokens: int, is_done: bool) -> None:
        spent = History.model_validate_json(pod["metadata"]["annotations"][ANNOTATION_HISTORY])
        made = math.floor(run.step)
        beat = JobHeartbeat(
            attempt=run.attempt,
            generation=0,
            phase="done" if is_done else "training",
            step=made,
            step_s=STEP_S,
            tokens=tokens,
            checkpoint_step=run.saved,
            history=spent,
        )
        lease = f"{name_of(job)}-{uid_of(job)[:5]}-progress"
        namespace = job["metadata"]["namespace"]
        path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}"
        body: Mapping[str, Any] = {
            "metadata": {"annotations": {ANNOTATION_PROGRESS: beat.model_dump_json()}},
            "spec": {"renewTime": now()},
        }
        self._api.patch(path, body)

    def _end(self, pods: Collection[Object]) -> None:
        for pod in pods:
            if self._is_running(pod):
                there = Pods(self._api, pod["metadata"]["namespace"])
                there.end_container(name_of(pod), exit_code=0, container=TRAINER_CONTAINER)


def _step_tokens(job: Object) -> int:
    batch = job["spec"]["batch"]
    return int(batch["globalSequences"]) * int(batch["sequenceTokens"])
