"""Watches one job all the time: its status, its pods, and what its ranks write on their nodes."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from omni_contract.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_INDEX,
    API_VERSION,
    LABEL_JOB_UID,
    PLURAL,
)
from omni_contract.status import JobStatus
from tests.cluster.api import Api, ApiError, Object
from tests.e2e.cluster.record import Pod, Seen, Steps
from tests.e2e.cluster.run_folders import Pair, RunFolders

_PERIOD_S: Final = 0.5
_END_S: Final = 30.0

RunFolderOf = Callable[[Pod], Path]
"""Where the host sees the run folder of a pod that has a node."""


class Observer:
    """Context manager around the thread that watches. `check` raises what stopped it."""

    def __init__(self, api: Api, namespace: str, name: str, run_folder_of: RunFolderOf) -> None:
        self._api = api
        self._job_path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._run_folder_of = run_folder_of
        self._folders = RunFolders()
        self._known: dict[str, Path] = {}
        self._lock = threading.Lock()
        self._seen: list[Seen] = []
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join(_END_S)
        self._folders.__exit__(kind, exc, trace)

    def check(self) -> None:
        """Raise what ended the watching."""
        if self._error is not None:
            raise RuntimeError(f"the job can no longer be watched: {self._error}") from self._error

    @property
    def seen(self) -> list[Seen]:
        """Everything so far."""
        with self._lock:
            return list(self._seen)

    @property
    def status(self) -> JobStatus:
        """The newest."""
        self.check()
        with self._lock:
            return JobStatus.model_validate(self._seen[-1].status if self._seen else {})

    @property
    def pods(self) -> dict[str, Pod]:
        """The newest, by name."""
        self.check()
        with self._lock:
            return dict(self._seen[-1].pods) if self._seen else {}

    def pod_of(self, index: int) -> tuple[str, Pod]:
        """Name and state of the newest pod that is this node of the plan."""
        found = [
            (pod.attempt, name, pod)
            for name, pod in self.pods.items()
            if pod.index == index and not pod.is_leaving
        ]
        if not found:
            raise RuntimeError(f"no pod is node {index} of the plan: {self.pods}")
        _, name, pod = max(found, key=lambda one: one[:2])
        return name, pod

    def newest_step(self) -> tuple[Pair, int]:
        """The highest pair that has done a step, and its last one."""
        self.check()
        with self._lock:
            return self._folders.newest()

    def step_times(self) -> list[tuple[Pair, int, float]]:
        """Pair, step and Unix time of every step done."""
        self.check()
        with self._lock:
            return self._folders.step_times()

    def steps(self) -> list[Steps]:
        """All that was trained."""
        with self._lock:
            return self._folders.steps()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._look()
            except Exception as exc:
                self._error = exc
                return
            self._ended.wait(_PERIOD_S)

    def _look(self) -> None:
        try:
            job = self._api.get(self._job_path)
        except ApiError as exc:
            if exc.status != 404:
                raise
            return  # not applied yet, or deleted already
        selector = f"{LABEL_JOB_UID}={job['metadata']['uid']}"
        listed = self._api.list(self._pods_path, labelSelector=selector)
        pods = {pod["metadata"]["name"]: _pod(pod) for pod in listed}
        now = Seen(at_s=time.time(), status=job.get("status", {}), pods=pods)
        self._known |= {pod.uid: self._run_folder_of(pod) for pod in pods.values() if pod.node}
        with self._lock:
            self._folders.read(self._known.values())
            last = self._seen[-1] if self._seen else None
            if last is None or (last.status, last.pods) != (now.status, now.pods):
                self._seen.append(now)


def _pod(body: Object) -> Pod:
    meta: dict[str, Any] = body["metadata"]
    index = meta["annotations"].get(ANNOTATION_INDEX, "")
    return Pod(
        uid=meta["uid"],
        node=body["spec"].get("nodeName", ""),
        phase=body["status"]["phase"],
        attempt=int(meta["annotations"][ANNOTATION_ATTEMPT]),
        index=int(index) if index else None,
        is_leaving="deletionTimestamp" in meta,
    )
