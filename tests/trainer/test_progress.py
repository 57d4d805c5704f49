"""The progress file tells a stopped process from one that waits."""

import time
from pathlib import Path

from omni_contract.names import PROGRESS_FILE
from omni_contract.records import Progress
from omni_trainer.environment import Pair
from omni_trainer.progress import ProgressFile


def test_content_moves_with_the_step_and_time_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE.format(rank=3)
    progress = ProgressFile(tmp_path, 3, Pair(attempt=1, generation=2), heartbeat_s=0.02)
    progress.start()
    try:
        progress.update("training", 7)
        before = path.read_bytes()
        found = Progress.model_validate_json(before)
        assert (found.phase, found.step, found.generation) == ("training", 7, 2)
        touched = path.stat().st_mtime_ns
        deadline = time.monotonic() + 10
        while path.stat().st_mtime_ns == touched:  # waits, but lives
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert path.read_bytes() == before
    finally:
        progress.stop()
    touched = path.stat().st_mtime_ns
    time.sleep(0.1)
    assert path.stat().st_mtime_ns == touched
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_folder_that_is_gone_does_not_end_the_heartbeat(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    progress = ProgressFile(folder, 0, Pair(attempt=1, generation=0), heartbeat_s=0.01)
    progress.start()
    try:
        (folder / PROGRESS_FILE.format(rank=0)).unlink()
        time.sleep(0.1)
        progress.update("training", 1)
    finally:
        progress.stop()
