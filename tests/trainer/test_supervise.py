"""Two real supervisors with fake ranks: what fell first is the cause, and all go on together."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import Progress, RunEvent
from omni_contract.spec import Job
from omni_contract.spec_run import FaultClass
from omni_planner.compile import compile_plan
from omni_trainer.events import read_events
from tests.contract.jobs import changed
from tests.trainer.test_rendezvous import free_address

END_S = 60


def fake_plan(*, steps: int = 12, **restart: Any) -> JobPlan:
    """2 nodes x 2 ranks for so many steps."""
    job = changed("metadata.name", "fake")
    batch = job["spec"]["batch"]
    job["spec"]["train"]["tokens"] = steps * batch["globalSequences"] * batch["sequenceTokens"]
    job["spec"]["data"]["mixture"] = []
    job["spec"]["restart"] = {"hangAfterSeconds": 5, **restart}
    return compile_plan(Job.read(job))


class Supervised:
    """The supervisors of one attempt."""

    def __init__(self, run_dir: Path, plan: JobPlan, script: dict[str, Any]) -> None:
        self.run_dir = run_dir
        plan.save(run_dir / "plan.json")
        (run_dir / "script.json").write_text(json.dumps(script))
        address = free_address()
        self.processes = [self._start(node, f"{address.host}:{address.port}") for node in range(2)]

    def _start(self, node: int, rendezvous: str) -> "subprocess.Popen[bytes]":
        command = [
            sys.executable, "-m", "omni_trainer.supervise",
            "--plan", str(self.run_dir / "plan.json"), "--node", str(node), "--attempt", "1",
            "--rendezvous", rendezvous, "--sidecar", "none", "--run-dir", str(self.run_dir),
            "--rank-module", "tests.fakes.rank_program",
        ]  # fmt: skip
        with (self.run_dir / f"supervisor-{node}.log").open("w") as log:
            return subprocess.Popen(command, stderr=log)

    def exit_codes(self) -> list[int]:
        return [process.wait(END_S) for process in self.processes]

    def events(self, kind: str) -> list[RunEvent]:
        return [event for event in read_events(self.run_dir) if event.kind == kind]

    def rank_pids(self) -> list[int]:
        paths = self.run_dir.glob("progress-?.json")
        return [Progress.model_validate_json(path.read_bytes()).pid for path in paths]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + END_S
        while f'"step":{step},' not in self._metrics():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def _metrics(self) -> str:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text() if path.exists() else ""


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Any]:
    started: list[Supervised] = []

    def start(plan: JobPlan, script: dict[str, Any] | None = None) -> Supervised:
        started.append(Supervised(tmp_path, plan, script or {}))
        return started[-1]

    yield start
    for run in started:
        for process in run.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def all_dead(pids: list[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_every_fault_restarts_all_ranks_in_place_and_names_its_cause(supervised: Any) -> None:
    script = {
        # Its peers fall at once, it needs a while to end: they must not be taken for the cause.
        "1.0": {"rank": 2, "step": 3, "do": "slow-raise"},
        "1.1": {"rank": 1, "step": 5, "do": "kill"},
        "1.2": {"rank": 3, "step": 8, "do": "stop"},
    }
    run = supervised(fake_plan(), script)
    assert run.exit_codes() == [Exit.OK, Exit.OK]
    faults = run.events("fault")
    assert [(fault.fault, fault.rank, fault.node) for fault in faults] == [
        (FaultClass.APP_ERROR, 2, 1),
        (FaultClass.UNKNOWN, 1, 0),
        (FaultClass.HANG, 3, 1),
    ]
    assert "ValueError: bad weights; log: logs/rank-2.1.0.log" in faults[0].message
    assert "killed by SIGKILL" in faults[1].message
    assert "no heartbeat" in faults[2].message
    assert len(run.events("restart")) == 3
    recovered = run.events("recovered")
    assert [event.generation for event in recovered] == [1, 2, 3]
    assert all(event.seconds is not None and event.seconds < 5 for event in recovered)
    assert len(run.events("completed")) == 1
    stores = [(run.run_dir / f"logs/rank-0.1.{g}.log").read_text().split()[1] for g in range(4)]
    assert len(set(stores)) == 4  # a fresh worker store per generation
    assert "omp 1" in (run.run_dir / "logs/rank-3.1.3.log").read_text()
    assert all_dead(run.rank_pids(), within_s=1)


def test_it_gives_up_with_the_cause_when_the_budget_is_used_up(supervised: Any) -> None:
    run = supervised(fake_plan(limit=0), {"1.0": {"rank": 2, "step": 3, "do": "slow-raise"}})
    assert run.exit_codes() == [Exit.GAVE_UP, Exit.GAVE_UP]
    [gave_up] = run.events("gave_up")
    for part in ("restart.limit 0", "rank 2 on node 1", "AppError", "    ValueError: bad weights"):
        assert part in gave_up.message
    assert not run.events("restart")
    log = (run.run_dir / "supervisor-1.log").read_text()
    assert "ValueError: bad weights" in log and "Traceback" not in log


def test_a_users_mistake_is_not_restarted_but_said(supervised: Any) -> None:
    run = supervised(fake_plan(), {"1.0": {"rank": 3, "step": 1, "do": "user"}})
    assert run.exit_codes() == [Exit.USER, Exit.USER]
    [gave_up] = run.events("gave_up")
    assert gave_up.message.startswith("data.sources.books: s3://omni/books is empty")
    assert "\n" not in gave_up.message  # the log would only say it again


def test_a_killed_supervisor_takes_its_ranks_along_and_ends_the_attempt(supervised: Any) -> None:
    run = supervised(fake_plan(steps=2000))
    run.wait_for_step(3)
    ranks = run.rank_pids()
    assert len(ranks) == 4
    run.processes[0].send_signal(signal.SIGKILL)
    assert run.processes[1].wait(20) == Exit.PEER_LOST
    assert all_dead(ranks, within_s=5)


def test_sigterm_reaches_the_ranks_and_ends_everything(supervised: Any) -> None:
    run = supervised(fake_plan(steps=2000))
    run.wait_for_step(3)
    ranks = run.rank_pids()
    begin = time.monotonic()
    for process in run.processes:
        process.terminate()
    assert run.exit_codes() == [Exit.INTERRUPTED, Exit.INTERRUPTED]
    assert time.monotonic() - begin < 8
    assert len(list(run.run_dir.glob("interrupted-*"))) == 4
    assert all_dead(ranks, within_s=1)


def test_a_wrong_command_line_is_one_sentence(tmp_path: Path) -> None:
    fake_plan().save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "omni_trainer.supervise", "--node=0", "--attempt=1",
               "--sidecar=none", "--rank-module=tests.fakes.rank_program"]  # fmt: skip
    cases = {
        "no job plan": [f"--plan={tmp_path / 'none.json'}", f"--run-dir={tmp_path}"],
        "a folder you own": [f"--plan={tmp_path / 'plan.json'}", "--run-dir=/dev/null/run"],
    }
    for words, arguments in cases.items():
        ended = subprocess.run(
            [*command, "--rendezvous=127.0.0.1:1", *arguments],
            capture_output=True, text=True, timeout=END_S, check=False,
        )  # fmt: skip
        assert (ended.returncode, words in ended.stderr) == (Exit.USER, True), ended.stderr
        assert "Traceback" not in ended.stderr
