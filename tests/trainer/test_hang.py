"""A rank is hung when its step stands still, and silent when nobody touches its file."""

import os
from pathlib import Path
from typing import Any

import pytest

from omni_contract.records import Progress
from omni_trainer.supervisor.hang import HangWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """Two ranks, a clock, and a watch that looks every half second."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = Clock()
        self.touches = 0
        self.watch = HangWatch(
            run_dir=run_dir, ranks=[0, 1], attempt=1, generation=2,
            hang_after_s=10, start_after_s=30, clock=self.clock,
        )  # fmt: skip

    def write(self, rank: int, phase: Any, step: int, *, generation: int = 2) -> None:
        progress = Progress(
            pid=1, attempt=1, generation=generation, phase=phase, step=step, time_s=0
        )
        path = self.run_dir / f"progress-{rank}.json"
        path.write_text(progress.model_dump_json())
        self.touch(rank)

    def touch(self, rank: int) -> None:
        self.touches += 1
        os.utime(self.run_dir / f"progress-{rank}.json", ns=(self.touches, self.touches))

    def train_both(self) -> None:
        for rank in (0, 1):
            self.write(rank, "training", 4)
        self.watch.look()
        for rank in (0, 1):
            self.write(rank, "training", 5)
        self.watch.look()

    def wait(self, seconds: float, *, touching: tuple[int, ...] = (0, 1)) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for _ in range(int(seconds * 2)):
            self.clock.now += 0.5
            for rank in touching:
                self.touch(rank)
            found = dict(self.watch.look())
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_ranks_that_step_are_not_hung(scene: Scene) -> None:
    scene.train_both()
    for step in range(6, 12):
        for rank in (0, 1):
            scene.write(rank, "training", step)
        assert scene.wait(9) == {}
    assert scene.watch.highest_step == 11


def test_a_stopped_rank_is_told_from_those_that_wait_for_it(scene: Scene) -> None:
    scene.train_both()
    assert scene.wait(9.5, touching=(0,)) == {}
    assert scene.watch.silent() == [1]
    assert scene.wait(1, touching=(0,)) == {0: "stalled", 1: "silent"}


def test_the_first_step_of_a_generation_may_take_longer(scene: Scene) -> None:
    for rank in (0, 1):
        scene.write(rank, "training", 4)
    assert scene.wait(29) == {}
    assert scene.wait(2) == {0: "stalled", 1: "stalled"}


def test_a_rank_that_never_writes_is_hung_after_the_start_limit(scene: Scene) -> None:
    assert scene.wait(30, touching=()) == {}
    assert scene.wait(1, touching=()) == {0: "silent", 1: "silent"}


def test_files_of_an_older_generation_say_nothing(scene: Scene) -> None:
    scene.write(0, "training", 9, generation=1)
    scene.watch.look()
    assert scene.watch.highest_step == 0


def test_a_pause_of_the_supervisor_itself_is_not_held_against_the_ranks(scene: Scene) -> None:
    scene.train_both()
    scene.clock.now += 3600
    assert scene.watch.look() == {}
    assert scene.watch.silent() == []


def test_a_phase_that_changes_is_progress(scene: Scene) -> None:
    scene.train_both()
    assert scene.wait(9) == {}
    for rank in (0, 1):
        scene.write(rank, "saving", 5)
    scene.watch.look()
    for rank in (0, 1):
        scene.write(rank, "training", 5)
    assert scene.wait(9) == {}
    assert scene.wait(2) == {0: "stalled", 1: "stalled"}


def test_a_save_may_take_longer_than_a_step_while_the_rank_lives(scene: Scene) -> None:
    scene.train_both()
    for rank in (0, 1):
        scene.write(rank, "saving", 5)
    assert scene.wait(29) == {}
    assert scene.wait(2) == {0: "stalled", 1: "stalled"}


def test_a_rank_that_is_stopped_in_a_save_is_found_as_soon_as_in_a_step(scene: Scene) -> None:
    scene.train_both()
    for rank in (0, 1):
        scene.write(rank, "saving", 5)
    assert scene.wait(11, touching=(0,)) == {1: "silent"}
