"""A service that is stopped is told from one that starts or works."""

import asyncio
import os
from pathlib import Path

from omni_dataloader.beat import BeatWatch, beat_path, keep_beating


def test_a_service_is_silent_once_its_beats_stop(tmp_path: Path) -> None:
    now = [0.0]
    path = beat_path(tmp_path / "data.sock")
    path.touch()  # of an earlier life
    watch = BeatWatch(path, silent_after_s=10, clock=lambda: now[0])
    for second in range(20):  # it starts, for as long as it takes
        now[0] = second
        assert not watch.is_silent()
    for second in range(20, 40):
        now[0] = second
        path.touch()
        os.utime(path, (second, second))
        assert not watch.is_silent()
    for second in range(40, 50):
        now[0] = second
        assert not watch.is_silent()
    now[0] = 50
    assert watch.is_silent()


def test_a_watcher_that_stood_still_blames_itself(tmp_path: Path) -> None:
    now = [0.0]
    path = beat_path(tmp_path / "data.sock")
    watch = BeatWatch(path, silent_after_s=10, clock=lambda: now[0])
    path.touch()
    assert not watch.is_silent()
    now[0] = 1000
    assert not watch.is_silent()


def test_the_file_goes_with_the_service(tmp_path: Path) -> None:
    path = tmp_path / "data.beat"

    async def live() -> None:
        beating = asyncio.create_task(keep_beating(path))
        await asyncio.sleep(0.05)
        assert path.exists()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)

    asyncio.run(live())
    assert not path.exists()
