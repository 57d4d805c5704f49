"""Two pods and whoever writes their annotations: what a pod waits for, and when it ends."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from omni_contract import names
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import History, JobHeartbeat, Progress, RunEvent, StepRecord
from omni_contract.shared_files import END_FILE, PEERS_FILE, DataEnd, DataPeers
from omni_contract.spec_run import FaultClass
from omni_trainer.events import read_events
from omni_trainer.pod import own_host
from tests.fakes.lease_server import LeaseServer, make_certificate
from tests.trainer.pods import PodFolder, TrainerContainer, end_all, until
from tests.trainer.test_rendezvous import free_address
from tests.trainer.test_supervise import all_dead, fake_plan


class Job:
    """Pods with fake ranks, which meet in one run folder as they have no network."""

    def __init__(self, folder: Path, plan: JobPlan, script: dict[str, Any]) -> None:
        self.folder = folder
        self.plan = plan
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        (self.run_dir / "script.json").write_text(json.dumps(script))
        self.rendezvous = str(free_address())
        self.containers: list[TrainerContainer] = []

    def pod(
        self,
        name: str,
        attempt: int = 0,
        index: int | None = None,
        *arguments: str,
        env: Mapping[str, str] | None = None,
    ) -> TrainerContainer:
        """Start a pod that holds a node of the plan in an attempt, or none."""
        folder = PodFolder(self.folder / name, self.plan, run_dir=self.run_dir)
        folder.assign(attempt, index, self.rendezvous)
        ranks = "--rank-module=tests.fakes.rank_program"
        container = TrainerContainer(folder, ranks, *arguments, env=env)
        self.containers.append(container)
        return container

    def assign(self, container: TrainerContainer, attempt: int, index: int, **history: int) -> None:
        container.pod.assign(attempt, index, self.rendezvous, History(**history))

    def events(self, kind: str) -> list[RunEvent]:
        return [event for event in read_events(self.run_dir) if event.kind == kind]

    def steps(self) -> list[tuple[int, int]]:
        """(attempt, step) of all steps done."""
        records = StepRecord.read_all(self.run_dir / "metrics.jsonl")
        return [(record.attempt, record.step) for record in records]

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        until(lambda: (attempt, step) in self.steps(), f"step {step}", self.logs)

    def rank_pids(self) -> list[int]:
        paths = self.run_dir.glob("progress-?.json")
        return [Progress.model_validate_json(path.read_bytes()).pid for path in paths]

    def logs(self) -> str:
        return "\n".join(f"{c.pod.folder.name}: {c.log}" for c in self.containers)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    jobs: list[Job] = []

    def one(plan: JobPlan, script: dict[str, Any] | None = None) -> Job:
        jobs.append(Job(tmp_path, plan, script or {}))
        return jobs[-1]

    yield one
    for job in jobs:
        end_all(job.containers)


def test_a_killed_rank_is_mended_in_the_pods_and_all_end_with_the_run(
    start: Any, tmp_path: Path
) -> None:
    job = start(fake_plan(), {"1.0": {"rank": 2, "step": 3, "do": "kill"}})
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "token").write_text("first")
    with LeaseServer(make_certificate(tmp_path, secrets)).serving() as server:
        env = {
            names.ENV_LEASE: "team/tiny-progress", "HOSTNAME": "tiny-0",
            "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port),
        }  # fmt: skip
        first = job.pod("a", 1, 0, f"--lease-token-dir={secrets}", env=env)
        second = job.pod("b", 1, 1)
        ends = [first.wait(), second.wait()]
    beat = JobHeartbeat.model_validate_json(
        server.lease["metadata"]["annotations"][names.ANNOTATION_PROGRESS]
    )
    assert (beat.generation, beat.phase, beat.step) == (1, "done", 12)
    assert (beat.last_fault, beat.history) == (FaultClass.UNKNOWN, ends[0].history)
    assert [(end.exit_code, end.fault, end.step) for end in ends] == [(Exit.OK, None, 12)] * 2
    [restart] = job.events("restart")
    assert (restart.attempt, restart.fault) == (1, FaultClass.UNKNOWN)
    assert ends[1].history.infrastructure_restarts == 1
    assert ends[1].history.highest_step >= 3
    assert "[1.0] restart: all ranks restart in place after Unknown" in first.log
    peers = DataPeers.load(second.pod.shared / PEERS_FILE)
    assert peers is not None
    assert peers.attempt == 1
    assert list(peers.addresses) == [first.pod.data_address, second.pod.data_address]


def test_c33_a_pod_that_lost_a_peer_waits_until_an_attempt_names_it_again(start: Any) -> None:
    job = start(fake_plan(steps=40))
    first, lost = job.pod("a", 1, 0), job.pod("b", 1, 1)
    job.wait_for_step(3)
    pids = job.rank_pids()
    lost.kill()  # its ranks go with it
    first.wait_to_say("waiting for another attempt")
    assert all_dead(pids, within_s=5)
    done = len(job.steps())
    new = job.pod("c", 2, 1)
    new.wait_to_say("attempt 2: this pod is node 1")
    assert len(job.steps()) == done  # attempt 2 is there, but the first pod was not told of it
    job.assign(first, 2, 0, infrastructure_restarts=1)
    ends = [first.wait(), new.wait()]
    assert [(end.attempt, end.exit_code) for end in ends] == [(2, Exit.OK)] * 2
    assert [event.attempt for event in job.events("started")] == [1, 2]
    resumed = min(step for attempt, step in job.steps() if attempt == 2)
    assert resumed > 1  # it went on, it did not begin anew
    logs = [job.run_dir / "logs" / f"trainer-0.{attempt}.log" for attempt in (1, 2)]
    assert "".join(log.read_text() for log in logs) == first.log
    assert "waiting for another attempt" in logs[0].read_text()
    assert ends[0].history.infrastructure_restarts == 1


def test_c41_a_late_pod_of_an_older_attempt_and_a_spare_stay_outside(start: Any) -> None:
    job = start(fake_plan(steps=30))
    late, spare = job.pod("late", 1, 1), job.pod("spare")
    first, second = job.pod("a", 2, 0), job.pod("b", 2, 1)
    assert [first.wait().exit_code, second.wait().exit_code] == [Exit.OK, Exit.OK]
    assert [event.attempt for event in job.events("started")] == [2]
    assert not job.events("fault")
    for outside in (late, spare):
        assert outside.process.poll() is None
        outside.process.terminate()
        assert outside.wait().exit_code == Exit.INTERRUPTED


def test_a_spare_takes_the_place_of_a_lost_node(start: Any) -> None:
    job = start(fake_plan(steps=40))
    first, lost, spare = job.pod("a", 1, 0), job.pod("b", 1, 1), job.pod("spare", 1, None)
    job.wait_for_step(2)
    lost.kill()
    job.assign(first, 2, 0)
    job.assign(spare, 2, 1)
    assert [first.wait().exit_code, spare.wait().exit_code] == [Exit.OK, Exit.OK]


def test_an_attempt_that_rises_ends_the_ranks_of_the_one_before(start: Any) -> None:
    job = start(fake_plan(steps=60))
    first, second = job.pod("a", 1, 0), job.pod("b", 1, 1)
    job.wait_for_step(2)
    pids = job.rank_pids()
    for index, pod in enumerate((first, second)):
        job.assign(pod, 2, index)
    job.wait_for_step(30, attempt=2)
    assert all_dead(pids, within_s=0)
    assert [first.wait().exit_code, second.wait().exit_code] == [Exit.OK, Exit.OK]
    assert [event.attempt for event in job.events("started")] == [1, 2]


def test_only_the_pod_of_the_cause_ends_when_pods_must_be_replaced(start: Any) -> None:
    rules = [{"when": {"class": ["AppError"]}, "do": "ReplacePod"}]
    script = {"1.0": {"rank": 2, "step": 3, "do": "slow-raise"}}
    job = start(fake_plan(steps=40, rules=rules), script)
    first, broken = job.pod("a", 1, 0), job.pod("b", 1, 1)
    end = broken.wait()
    assert (end.exit_code, end.fault, end.rank) == (Exit.ERROR, FaultClass.APP_ERROR, 2)
    assert "ValueError: bad weights" in end.message
    assert "ValueError: bad weights" in end.tail[-1]
    assert end.history == History()  # who replaces the pod counts it
    first.wait_to_say("waiting for another attempt")
    replaced = job.pod("c", 2, 1)
    job.assign(first, 2, 0)
    assert [first.wait().exit_code, replaced.wait().exit_code] == [Exit.OK, Exit.OK]


def test_restarts_of_earlier_attempts_count_in_this_one(start: Any) -> None:
    script = {"5.0": {"rank": 2, "step": 3, "do": "slow-raise"}}
    job = start(fake_plan(limit=2), script)
    pods = [job.pod("a"), job.pod("b")]
    for index, pod in enumerate(pods):
        job.assign(pod, 5, index, user_restarts=2)
    for end in (pod.wait() for pod in pods):
        assert (end.exit_code, end.fault) == (Exit.GAVE_UP, FaultClass.APP_ERROR)
        assert "2 restarts used up restart.limit 2" in end.message
        assert end.history.user_restarts == 2


def test_a_class_that_returns_without_a_step_is_handed_to_the_operator(start: Any) -> None:
    part = {"rank": 3, "do": "slow-raise"}
    script = {"1.0": part | {"step": 5, "saves": False}, "1.1": part | {"step": 3}}
    job = start(fake_plan(), script)
    first, broken = job.pod("a", 1, 0), job.pod("b", 1, 1)
    end = broken.wait()
    assert (end.exit_code, end.fault, end.generation) == (Exit.ERROR, FaultClass.APP_ERROR, 1)
    assert end.history.user_restarts == 1  # the one in place
    first.wait_to_say("waiting for another attempt")


def test_a_pod_told_to_end_lets_its_ranks_end_first_and_the_others_wait(start: Any) -> None:
    job = start(fake_plan(steps=2000))
    first, second = job.pod("a", 1, 0), job.pod("b", 1, 1)
    job.wait_for_step(3)
    second.process.send_signal(signal.SIGTERM)
    end = second.wait(15)
    assert (end.exit_code, end.fault) == (Exit.INTERRUPTED, None)
    assert end.step >= 3
    assert sorted(path.name for path in job.run_dir.glob("interrupted-*")) == [
        "interrupted-2", "interrupted-3"
    ]  # fmt: skip
    first.wait_to_say("the supervisor of node 1 was told to end; waiting for another attempt")


def test_c18_data_that_ended_early_is_no_success_of_a_pod(start: Any) -> None:
    job = start(fake_plan(), {"1.0": {"do": "end", "step": 4}})
    pods = [job.pod("a", 1, 0), job.pod("b", 1, 1)]
    for end in (pod.wait() for pod in pods):
        assert (end.exit_code, end.fault) == (Exit.USER, FaultClass.START_ERROR)
        assert end.message.startswith("the data ended after step 4 of 12; give the sources")


@pytest.mark.parametrize(
    ("code", "exit_code", "fault"),
    [
        (Exit.USER, Exit.USER, FaultClass.START_ERROR),
        (Exit.ERROR, Exit.ERROR, FaultClass.DATA_SERVICE),
    ],
)
def test_a_data_service_that_cannot_go_on_ends_the_pod_with_its_words(
    start: Any, code: Exit, exit_code: Exit, fault: FaultClass
) -> None:
    job = start(fake_plan(steps=2000))
    pods = [job.pod("a", 1, 0), job.pod("b", 1, 1)]
    job.wait_for_step(2)
    DataEnd(exit_code=code, message="s3://omni/pictures: no such bucket").save(
        pods[1].pod.shared / END_FILE
    )
    end = pods[1].wait(20)
    assert (end.exit_code, end.fault) == (exit_code, fault)
    assert end.message == "s3://omni/pictures: no such bucket"


def test_a_pod_without_a_plan_says_so(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path / "pod", fake_plan())
    for piece in (folder.folder / "plan").iterdir():
        piece.unlink()
    container = TrainerContainer(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(end_all, [container])
        end = container.wait()
    assert (end.exit_code, end.fault) == (Exit.USER, FaultClass.START_ERROR)
    assert "no plan.json is packed there" in end.message
    assert "Traceback" not in container.log


def test_the_main_program_of_a_pod_needs_no_torch() -> None:
    """It lives beside the ranks of every pod, and must be there at once."""
    code = "import sys, omni_trainer.pod; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pods_of_a_job_reach_each_other_by_the_same_domain() -> None:
    assert own_host("a-1f2e3-1-0.a-1f2e3.team.svc.cluster.local", "a-1f2e3-4-7") == (
        "a-1f2e3-4-7.a-1f2e3.team.svc.cluster.local"
    )
    assert own_host("127.0.0.1", "laptop") == "127.0.0.1"
    assert own_host("localhost", "laptop") == "localhost"
