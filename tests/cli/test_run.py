"""The launcher with fake ranks and data services, its faults on order, and what it refuses."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console

from omni_cli.launcher import Launcher, Outcome, check_run_dir
from omni_cli.main import main
from omni_cli.progress_view import RunView, modality_shares
from omni_cli.rehearsal import Fault
from omni_contract.errors import OmniError, SpecError
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import Progress, RunEvent, StepRecord
from omni_contract.spec_run import FaultClass
from omni_trainer.events import read_events, record_event
from tests.contract.jobs import DEMO
from tests.trainer.test_supervise import all_dead, fake_plan

PLAN = fake_plan()


def step_line(step: int, **changed: Any) -> str:
    fields = dict(
        step=step, attempt=1, generation=0, time_s=1.0, step_s=0.5, loss=2.5, loss_by={},
        grad_norm=1.0, learning_rate=1.0, tokens=500, tokens_by_source={}, weights={},
        tokens_by_modality={"text": 300, "image": 100}, corrupt_samples=0,
        max_live_encoder_microbatches=2,
    )  # fmt: skip
    return StepRecord.model_validate(fields | changed).model_dump_json() + "\n"


class Run:
    """A launched run with fakes."""

    def __init__(self, run_dir: Path, plan: JobPlan, faults: list[str]) -> None:
        self.run_dir = run_dir
        check_run_dir(run_dir, plan)
        self.output = io.StringIO()
        self.before = {child.pid for child in psutil.Process().children()}
        self.plan = plan
        self.faults = [Fault.parse(text, plan) for text in faults]
        self.pids: set[int] = set()

    def to_end(self, supervisor_module: str = "omni_trainer.supervise") -> Outcome:
        console = Console(file=self.output, width=200)
        launcher = Launcher(
            self.plan, self.run_dir, env=os.environ, first_attempt=1, faults=self.faults,
            sidecar_module="tests.fakes.sidecar_program", supervisor_module=supervisor_module,
            supervisor_arguments=["--rank-module=tests.fakes.rank_program"],
        )  # fmt: skip
        with launcher, RunView(self.plan, self.run_dir, console) as view:
            outcome = launcher.run(view)
        assert not launcher.left_faults()
        assert {child.pid for child in psutil.Process().children()} <= self.before
        return outcome

    def events(self, kind: str) -> list[RunEvent]:
        return [event for event in read_events(self.run_dir) if event.kind == kind]


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "script.json").write_text("{}")
    yield tmp_path


def test_faults_on_order_are_mended_each_at_its_level(run_dir: Path) -> None:
    orders = ["kill-rank:2@4", "kill-sidecar:1@8", "kill-supervisor:0@12", "kill-rank:1@training"]
    run = Run(run_dir, fake_plan(steps=40), orders)
    assert run.to_end().exit_code == Exit.OK
    faults = [(e.attempt, e.generation, e.fault, e.rank, e.node) for e in run.events("fault")]
    assert faults == [
        (1, 0, FaultClass.UNKNOWN, 2, 1),
        (1, 1, FaultClass.UNKNOWN, None, 0),
        (2, 0, FaultClass.UNKNOWN, 1, 0),
    ]
    assert "supervisor on node 0" in run.events("fault")[1].message
    [restarted] = run.events("sidecar_restarted")
    assert (restarted.node, restarted.fault) == (1, FaultClass.DATA_SERVICE)
    assert restarted.message.startswith("data service of node 1")
    assert (run_dir / "starts-1").read_text() == "xx"
    assert (run_dir / "starts-0").read_text() == "x"  # lives on through attempts
    assert [event.attempt for event in run.events("started")] == [1, 2]
    # The last rank dies at the start of attempt 2: with or without a step between the incidents.
    recovered = [(e.attempt, e.generation) for e in run.events("recovered")]
    assert (recovered[0], recovered[-1]) == ((1, 1), (2, 1))
    assert len(run.events("completed")) == 1
    output = run.output.getvalue()
    assert "rehearsed fault: kill-rank:2@4" in output
    assert "step 40/40" in output


def test_c18_data_that_ends_early_is_no_success(run_dir: Path) -> None:
    (run_dir / "script.json").write_text(json.dumps({"1.0": {"do": "end", "step": 4}}))
    outcome = Run(run_dir, fake_plan(), []).to_end()
    assert outcome.exit_code == Exit.USER
    assert outcome.message.startswith("the data ended after step 4 of 12; give the sources")


def test_a_users_mistake_seen_by_the_data_service_is_its_sentence(run_dir: Path) -> None:
    (run_dir / "sidecar.json").write_text(json.dumps({"0": {"exit": 2, "times": 1}}))
    outcome = Run(run_dir, fake_plan(steps=400), []).to_end()
    assert outcome == Outcome(
        exit_code=Exit.USER,
        message="s3://omni/pictures: the bucket 'omni' does not exist; create it",
    )


def test_the_cause_counts_though_its_supervisor_ends_after_the_cascade(run_dir: Path) -> None:
    """Node 0 leaves first because node 1 is ending, and node 1 ends by a mistake of the user."""
    record_event(run_dir, kind="gave_up", attempt=0, generation=0, message="of an earlier run")
    codes = {"0": [0.0, Exit.PEER_LOST], "1": [1.0, Exit.USER]}
    (run_dir / "supervisor.json").write_text(json.dumps(codes))
    outcome = Run(run_dir, fake_plan(), []).to_end("tests.fakes.supervisor_program")
    assert outcome == Outcome(exit_code=Exit.USER, message="node 1 ends with 2")


def test_a_data_service_that_keeps_dying_ends_the_run(run_dir: Path) -> None:
    (run_dir / "sidecar.json").write_text(json.dumps({"1": {"exit": 1, "times": 9}}))
    run = Run(run_dir, fake_plan(steps=4000), [])
    outcome = run.to_end()
    assert outcome.exit_code == Exit.GAVE_UP
    assert "died 6 times within a minute" in outcome.message
    assert "data service of node 1" in outcome.message
    assert len(run.events("sidecar_restarted")) == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kill-rank:2", "no fault; write WHAT:INDEX@WHEN"),
        ("kill-rank:2@never", "no fault"),
        ("shoot-rank:2@5", "no fault"),
        ("kill-rank:4@5", "the job has 4 ranks, numbered 0 to 3"),
        ("kill-sidecar:2@5", "the job has 2 nodes, numbered 0 to 1"),
        ("kill-rank:1@12", "the job has 12 steps; use a step from 1 to 11"),
        ("kill-rank:1@0", "use a step from 1 to 11"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Fault.parse(text, PLAN)


def test_a_fault_waits_for_its_step_and_for_the_recovery_before_it() -> None:
    fault = Fault.parse("stop-rank:1@5", PLAN)

    def at(step: int, phase: Any = "training", generation: int = 1) -> Progress:
        return Progress(pid=1, attempt=1, generation=generation, phase=phase, step=step, time_s=0)

    assert not fault.is_due(at(4), (1, 0))
    assert fault.is_due(at(5), (1, 0))
    assert not fault.is_due(at(5), (1, 1))  # the fault before has just ended this generation
    assert not fault.is_due(at(8, "restoring"), (1, 0))
    saving = Fault.parse("kill-rank:0@saving", PLAN)
    assert saving.is_due(at(4, "saving"), (1, 0)) and not saving.is_due(at(4), (1, 0))


def test_plain_lines_say_step_loss_speed_shares_attempt_and_restarts(tmp_path: Path) -> None:
    output = io.StringIO()
    now = [0.0]
    with RunView(PLAN, tmp_path, Console(file=output, width=200), clock=lambda: now[0]) as view:
        for step in range(1, 5):
            now[0] += 3
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write(step_line(step))
            view.update()
        record_event(tmp_path, kind="restart", attempt=1, generation=0, message="after [Unknown]")
        view.update()
        assert view.restarts == 1
        assert view.line().endswith("1 restart  ETA 0:00:04")
    lines = output.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:2]] == ["1/12", "3/12"]  # not at every step
    for part in ("loss 2.5000", "1,000 tokens/s", "image 25 %, text 75 %", "attempt 1.0"):
        assert part in lines[0]
    assert lines[2] == "[1.0] restart: after [Unknown]"


def test_a_terminal_gets_one_live_line(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True)
    with RunView(PLAN, tmp_path, console) as view:
        (tmp_path / "metrics.jsonl").write_text(step_line(1))
        view.update()
    assert "step 1/12" in output.getvalue()


def test_shares_of_a_step_without_tokens_are_zero() -> None:
    step = StepRecord.model_validate_json(step_line(1, tokens_by_modality={"text": 0}))
    assert modality_shares(step) == {"text": 0.0}


def test_a_run_folder_of_another_job_is_refused(tmp_path: Path) -> None:
    PLAN.model_copy(update={"name": "other"}).save(tmp_path / "plan.json")
    with pytest.raises(OmniError, match="holds a run of job 'other', not of 'fake'"):
        check_run_dir(tmp_path, PLAN)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (None, [], "there is no such file"),
        ("a: [1\nb: 2", [], "line 2"),
        (DEMO, ["--run-dir", "/dev/null/x"], "take a folder that you may write to"),
        (DEMO, ["--fault", "kill-rank:9@1"], "the job has 4 ranks"),
        (DEMO, ["--trace-step", "500"], "the job has 123 steps"),
    ],
    ids=["missing", "yaml", "run-dir", "fault", "trace-step"],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    make: Any, options: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    if make is not None:
        job.write_text(make if isinstance(make, str) else yaml.safe_dump(make))
    begin = time.monotonic()
    options = options if "--run-dir" in options else [*options, "--run-dir", str(tmp_path / "run")]
    assert main(["run", str(job), *options]) == Exit.USER
    error = capfd.readouterr().err
    assert words in error and "Traceback" not in error
    assert time.monotonic() - begin < 10


def test_c21_nothing_is_left_when_the_launcher_itself_is_killed(run_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.cli.test_run import Run, fake_plan;"
        "Run(Path(sys.argv[1]), fake_plan(steps=4000), []).to_end()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(run_dir)])
    try:
        # 2 data services, 2 supervisors, 2 nurseries, 4 ranks
        pids = _pids_below(launcher.pid, at_least=10)
    finally:
        launcher.kill()
        launcher.wait()
    assert all_dead(pids, within_s=15)


def _pids_below(pid: int, *, at_least: int) -> list[int]:
    deadline = time.monotonic() + 60
    while True:
        found = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        if len(found) >= at_least:
            return found
        assert time.monotonic() < deadline
        time.sleep(0.1)
