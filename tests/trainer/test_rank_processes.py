"""Ranks of one node: whatever moment they are ended at, none is left."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

from omni_trainer.supervisor.nursery import Nursery
from omni_trainer.supervisor.rank_processes import RankProcesses, RunLogs


class SlowNursery:
    """Its rank has been forked and has not got to `setsid` yet: it leads no process group."""

    def __init__(self) -> None:
        self.rank: subprocess.Popen[bytes] | None = None

    def start(self, *, module: str, env: dict[str, str], log: str) -> int:
        self.rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return self.rank.pid

    def exit_code(self, pid: int) -> int | None:
        assert self.rank is not None
        return self.rank.poll()


def test_a_rank_killed_right_after_its_fork_is_dead(tmp_path: Path) -> None:
    nursery = SlowNursery()
    env = {"RANK": "0", "OMNI_ATTEMPT": "1", "OMNI_GENERATION": "0"}
    ranks = RankProcesses(
        nursery=cast(Nursery, nursery), module="none", envs={0: env}, logs=RunLogs(tmp_path)
    )
    ranks.start()
    assert nursery.rank is not None
    try:
        ranks.close(signal.SIGKILL, timeout=5)
        assert nursery.rank.poll() == -signal.SIGKILL
    finally:
        nursery.rank.kill()
        nursery.rank.wait()
