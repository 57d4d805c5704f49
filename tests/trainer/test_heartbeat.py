"""What rank 0's pod tells about a run, from the records in its folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from omni_contract.records import History, JobHeartbeat
from omni_contract.spec_run import FaultClass
from omni_trainer.events import record_event
from omni_trainer.supervisor.heartbeat import RunReader, TokenCount
from tests.cli.test_run import step_line

NOW_S = 1000.0


class Folder:
    """A run folder as ranks and supervisor fill it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reader = RunReader(path, clock=lambda: NOW_S)

    def step(self, step: int, **more: Any) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(step_line(step, **{"time_s": NOW_S, **more}))

    def progress(self, phase: str, step: int, *, attempt: int = 1, generation: int = 0) -> None:
        document = {
            "pid": 1, "attempt": attempt, "generation": generation, "phase": phase, "step": step,
            "time_s": 1.0,
        }  # fmt: skip
        (self.path / "progress-0.json").write_text(json.dumps(document))

    def event(self, kind: str, *, attempt: int = 1, generation: int = 0, **more: Any) -> None:
        fields = {"message": f"it is {kind}", **more}
        record_event(self.path, kind=kind, attempt=attempt, generation=generation, **fields)

    def read(self, attempt: int = 1, initial: History | None = None) -> JobHeartbeat:
        return self.reader.read(attempt, initial or History())


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_before_the_first_record_a_run_is_starting(folder: Folder) -> None:
    assert folder.read() == JobHeartbeat(attempt=1, generation=0, phase="starting", step=0)


def test_speed_loss_and_tokens_are_those_of_the_last_minute(folder: Folder) -> None:
    folder.step(1, time_s=NOW_S - 100, step_s=9.0)
    for step in (2, 3):
        folder.step(step, step_s=0.5, loss=2.0 / step)
    folder.progress("training", 3)
    beat = folder.read()
    assert (beat.phase, beat.step, beat.tokens) == ("training", 3, 1500)
    assert (beat.step_s, beat.tokens_per_second, beat.loss) == (0.5, 1000.0, 2.0 / 3)


def test_a_slow_step_has_a_speed_though_it_is_older_than_a_minute(folder: Folder) -> None:
    folder.step(1, time_s=NOW_S - 300, step_s=250.0)
    assert folder.read().step_s == 250.0


def test_a_restart_in_place_is_the_next_generation_at_once(folder: Folder) -> None:
    folder.progress("training", 7)
    folder.event("checkpoint", step=4)
    action = "RestartInPlace"
    folder.event("fault", step=7, fault="OOM", action=action, message="rank 2 is gone")
    folder.event("restart", step=7, fault="OOM", action=action)
    before = History(user_restarts=1, highest_step=2)
    beat = folder.read(1, before)
    assert (beat.generation, beat.phase, beat.step, beat.checkpoint_step) == (1, "starting", 4, 4)
    assert (beat.last_fault, beat.last_message) == (FaultClass.OOM, "rank 2 is gone")
    assert beat.history == History(
        user_restarts=1, infrastructure_restarts=1, restarts_without_progress=1, highest_step=7
    )
    folder.progress("training", 5, generation=1)
    assert (folder.read(1, before).phase, folder.read(1, before).step) == ("training", 5)


def test_it_tells_what_the_generation_went_on_from_whatever_was_saved_since(folder: Folder) -> None:
    folder.progress("training", 3)
    assert folder.read().resumed_step == 0
    folder.event("checkpoint", step=4)
    folder.event("restart", step=5, fault="OOM", action="RestartInPlace")
    assert folder.read().resumed_step is None
    folder.event("resumed", step=4, generation=1)
    folder.progress("training", 9, generation=1)
    folder.event("checkpoint", step=8, generation=1)
    beat = folder.read()
    assert (beat.checkpoint_step, beat.resumed_step) == (8, 4)


def test_a_generation_that_begins_while_it_is_looked_at_is_not_taken_for_one_from_step_0(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path)

    def begin() -> float:
        """The clock is read once the events are."""
        folder.event("resumed", step=40)
        folder.progress("training", 40)
        return NOW_S

    folder.progress("restoring", 0)
    folder.reader = RunReader(tmp_path, clock=begin)
    beats = [folder.read(), folder.read()]
    assert [(beat.phase, beat.resumed_step) for beat in beats] == [
        ("starting", None),
        ("training", 40),
    ]


def test_a_restart_that_the_operator_does_is_its_to_count(folder: Folder) -> None:
    folder.progress("training", 7)
    folder.event("fault", step=7, fault="OOM", action="ReplacePod")
    folder.event("restart", step=7, fault="OOM", action="ReplacePod")
    beat = folder.read()
    assert (beat.generation, beat.history, beat.last_fault) == (0, History(), None)


def test_records_of_an_older_attempt_are_not_taken_for_this_one(folder: Folder) -> None:
    folder.progress("training", 7)
    folder.event("checkpoint", step=6)
    folder.event("fault", fault="OOM", action="RestartInPlace")
    folder.event("restart", fault="OOM", action="RestartInPlace")
    beat = folder.read(2)
    assert (beat.attempt, beat.generation, beat.phase, beat.step) == (2, 0, "starting", 6)
    assert (beat.history, beat.last_fault) == (History(), None)


def test_steps_done_again_are_counted_once() -> None:
    count = TokenCount()
    for step in (1, 2, 3, 4, 2, 3):
        count.add(step, 100 + step)
    assert count.total == 306


def test_the_count_goes_on_from_that_of_another_pod() -> None:
    count = TokenCount()
    count.begin(step=20, tokens=2000)
    assert count.total == 2000
    count.add(11, 7)  # resumed from step 10
    assert count.total == 1007
    late = TokenCount()
    late.add(11, 7)
    late.begin(step=20, tokens=2000)
    assert late.total == 1007
