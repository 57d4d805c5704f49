"""Pods as processes on this machine, and the annotations that a kubelet would keep for them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omni_contract import names
from omni_contract.packed import pack
from omni_contract.plan import JobPlan
from omni_contract.pod_info import ANNOTATIONS_FILE
from omni_contract.records import History, PodEnd
from tests.trainer.test_rendezvous import free_address

END_S = 60


class PodFolder:
    """What the containers of one pod see: mounted plan, annotations, volumes."""

    def __init__(self, folder: Path, plan: JobPlan, *, run_dir: Path | None = None) -> None:
        self.folder = folder
        self.info = folder / "info"
        self.shared = folder / "shared"
        self.run_dir = run_dir or folder / "run"
        self.socket = self.shared / "data.sock"
        self.data_address = str(free_address())
        for path in (folder, self.info, self.shared, folder / "plan", self.run_dir):
            path.mkdir(exist_ok=True)
        for name, piece in pack(names.PLAN_FILE, plan.to_json()).items():
            (folder / "plan" / name).write_bytes(piece)
        self._versions = 0

    def assign(
        self, attempt: int, index: int | None, rendezvous: str, history: History | None = None
    ) -> None:
        """Replace the annotations file as a kubelet does: by swapping a link to its folder."""
        annotations = {
            "example.com/note": 'a "quoted" word\n',
            names.ANNOTATION_ATTEMPT: str(attempt),
            names.ANNOTATION_HISTORY: (history or History()).model_dump_json(),
            names.ANNOTATION_INDEX: "" if index is None else str(index),
            names.ANNOTATION_RENDEZVOUS: rendezvous,
        }
        self._versions += 1
        fresh = self.info / f"..version-{self._versions}"
        fresh.mkdir()
        lines = [f"{key}={json.dumps(value)}" for key, value in sorted(annotations.items())]
        (fresh / ANNOTATIONS_FILE).write_text("\n".join(lines))
        link = self.info / "..data_tmp"
        link.symlink_to(fresh.name)
        link.replace(self.info / "..data")
        with contextlib.suppress(FileExistsError):
            (self.info / ANNOTATIONS_FILE).symlink_to(f"..data/{ANNOTATIONS_FILE}")
        older = self.info / f"..version-{self._versions - 1}"
        shutil.rmtree(older, ignore_errors=True)

    @property
    def arguments(self) -> list[str]:
        """What trainer and data container both take."""
        return [
            f"--plan-dir={self.folder / 'plan'}",
            f"--pod-info={self.info}",
            f"--shared-dir={self.shared}",
            f"--socket={self.socket}",
            f"--run-dir={self.run_dir}",
        ]


class TrainerContainer:
    """The trainer container of a pod."""

    def __init__(
        self, pod: PodFolder, *arguments: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.pod = pod
        self._log = pod.folder / "trainer.log"
        self._end = pod.folder / "termination-log"
        command = [
            sys.executable, "-m", "omni_trainer.pod", *pod.arguments,
            f"--data-listen={pod.data_address}", f"--termination-log={self._end}", *arguments,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **(env or {})}, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait(self, timeout_s: float = END_S) -> PodEnd:
        """Its termination message, once it has ended."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the pod still runs\n{self.log}") from None
        end = PodEnd.model_validate_json(self._end.read_bytes())
        assert end.exit_code == code, self.log
        return end

    def wait_to_say(self, words: str) -> None:
        until(lambda: words in self.log, words, lambda: self.log)

    def kill(self) -> None:
        """As the kubelet does at the end of the grace period, or a node that loses power."""
        self.process.kill()
        self.process.wait()


class DataContainer:
    """The data container of a pod."""

    def __init__(self, pod: PodFolder, env: Mapping[str, str], *arguments: str) -> None:
        self.pod = pod
        self._log = pod.folder / "data.log"
        command = [
            sys.executable, "-m", "omni_dataloader.pod", *pod.arguments,
            f"--listen={pod.data_address}", f"--pod-name={pod.folder.name}", *arguments,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **env}, stdout=log, stderr=log
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(END_S)


def until(
    reached: Callable[[], object], what: str, logs: Callable[[], str], timeout_s: float = END_S
) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"no {what!r} within {timeout_s} s\n{logs()}"
        time.sleep(0.02)


def end_all(containers: Sequence[TrainerContainer | DataContainer]) -> None:
    """End what a test has left."""
    for container in containers:
        if container.process.poll() is None:
            container.process.kill()
            container.process.wait()
