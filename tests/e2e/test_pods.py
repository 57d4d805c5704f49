"""Whole pods on one machine: real ranks over gloo, data services, S3; the kubelet is played."""

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract import names
from omni_contract.names import Exit
from omni_contract.records import RunEvent, StepRecord
from omni_contract.spec import Job
from omni_dataloader.read_logs import LogReader, Wanted
from omni_dataloader.store import Store
from omni_planner.compile import compile_plan
from omni_trainer.supervisor.rank_processes import rank_log
from tests.e2e.jobs import small_job
from tests.fakes.sources import make_sources
from tests.trainer.pods import DataContainer, PodFolder, TrainerContainer, end_all, until
from tests.trainer.test_rendezvous import free_address

pytestmark = pytest.mark.timeout(400)

NUM_STEPS = 40


class Pod:
    """Both containers of a pod."""

    def __init__(self, folder: PodFolder, env: dict[str, str]) -> None:
        self.folder = folder
        self.data = DataContainer(folder, env)
        self.trainer = TrainerContainer(folder, env=env)

    def steps(self) -> list[StepRecord]:
        return StepRecord.read_all(self.folder.run_dir / names.METRICS_FILE)

    def events(self, kind: str) -> list[RunEvent]:
        events = RunEvent.read_all(self.folder.run_dir / names.EVENTS_FILE)
        return [event for event in events if event.kind == kind]

    def logs(self) -> str:
        rank_logs = sorted((self.folder.run_dir / "logs").glob("*.log"))
        logs = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in rank_logs)
        return f"{self.trainer.log}\n{self.data.log}\n{logs}"

    def rank_log(self, rank: int) -> str:
        return (self.folder.run_dir / rank_log(rank=rank, attempt=1, generation=0)).read_text()

    def wait_for_step(self, step: int) -> None:
        until(lambda: any(s.step >= step for s in self.steps()), f"step {step}", self.logs, 120)


@pytest.fixture
def pods(s3_server: LocalS3, tmp_path: Path) -> Iterator["Pods"]:
    store = s3_server.open()
    store.create_bucket("pods")
    make_sources(tmp_path / "sources").upload(store, "s3://pods")
    started = Pods(tmp_path, dict(s3_server.env), store)
    yield started
    end_all([container for pod in started.all for container in (pod.trainer, pod.data)])


class Pods:
    """The pods of one job, and its operator."""

    def __init__(self, folder: Path, env: dict[str, str], store: Store) -> None:
        job = small_job("s3://pods", "told", steps=NUM_STEPS)
        job["spec"]["checkpoint"]["every"] = "100 steps"
        job["spec"]["resources"]["device"] = "cpu"
        self.plan = compile_plan(Job.read(job))
        self._folder = folder
        self._env = env
        self._rendezvous = str(free_address())
        self._reader = LogReader(store, self.plan.spec.checkpoint.uri, "pod")
        self.all: list[Pod] = []

    def start(self, attempt: int, index: int) -> Pod:
        folder = PodFolder(self._folder / f"pod-{len(self.all)}", self.plan)
        folder.assign(attempt, index, self._rendezvous)
        self.all.append(Pod(folder, self._env))
        return self.all[-1]

    def stored(self, wanted: Wanted) -> str:
        """A log as the store has it."""
        (stream,) = self._reader.find(wanted)
        return b"".join(self._reader.read(part.block) for part in stream.parts).decode()

    def move(self, pod: Pod, attempt: int, index: int) -> None:
        pod.folder.assign(attempt, index, self._rendezvous)


def test_a_pod_told_to_end_saves_with_all_others_and_no_step_is_lost_or_done_twice(
    pods: Pods,
) -> None:
    first, told = pods.start(1, 0), pods.start(1, 1)
    first.wait_for_step(3)
    told.trainer.process.send_signal(signal.SIGTERM)
    end = told.trainer.wait()
    assert (end.exit_code, end.fault) == (Exit.INTERRUPTED, None), told.logs()
    assert told.data.end() == Exit.INTERRUPTED
    first.trainer.wait_to_say("waiting for another attempt")
    done = max(step.step for step in first.steps())
    assert done < NUM_STEPS
    [saved] = first.events("checkpoint")
    assert saved.step == done == end.step, first.logs()

    new = pods.start(2, 1)
    pods.move(first, 2, 0)
    # The pod that was told to end is gone, its logs are not.
    trainer = pods.stored(Wanted(attempt=1, node=1))
    assert f"the pod was told to end, after step {done}" in trainer
    assert trainer == told.trainer.log
    assert pods.stored(Wanted(attempt=1, node=1, container="data")) in told.data.log
    assert pods.stored(Wanted(attempt=1, rank=2)) == told.rank_log(2)
    first.wait_for_step(done + 2)
    service = psutil.Process(new.data.process.pid).children()[0]
    service.kill()  # it is started again at once; nobody notices
    assert first.trainer.wait(120).exit_code == Exit.OK, first.logs()
    assert new.trainer.wait().exit_code == Exit.OK
    assert [event.step for event in first.events("resumed")] == [done]
    assert not first.events("fault")
    assert [(s.attempt, s.step) for s in first.steps()] == [
        (1 if step <= done else 2, step) for step in range(1, NUM_STEPS + 1)
    ]
    assert new.data.log.count("serving socket=") == 2
