"""A rank that does nothing but take steps and fail as its script says. Needs no torch.

The script, `script.json` in the run folder, maps "ATTEMPT.GENERATION" to {"rank", "step", "do"},
with "saves": false where nothing is to be saved.
Ranks that see a peer fall end like real ones that lost a connection.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from omni_contract import names
from omni_contract.plan import JobPlan
from omni_contract.records import Progress, StepRecord

STEP_S = 0.04


class FakeRank:
    """One rank."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.attempt = int(os.environ[names.ENV_ATTEMPT])
        self.generation = int(os.environ[names.ENV_GENERATION])
        self.run_dir = Path(os.environ[names.ENV_RUN_DIR])
        self.num_steps = JobPlan.load(Path(os.environ[names.ENV_PLAN])).num_steps
        pair = f"{self.attempt}.{self.generation}"
        self.fallen = self.run_dir / f"fallen-{pair}"
        script = json.loads((self.run_dir / "script.json").read_text())
        self.part: dict[str, Any] = script.get(pair, {})
        self.progress = self.run_dir / names.PROGRESS_FILE.format(rank=self.rank)

    def run(self) -> int:
        signal.signal(signal.SIGTERM, self._save)
        self._note("starting", 0)
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with socket.create_connection(address, timeout=5):
            print(f"store {address[1]} omp {os.environ.get('OMP_NUM_THREADS')}")
        threading.Thread(target=self._beat, daemon=True).start()
        step = self._saved()
        while step < self.num_steps:
            self._note("training", step)
            if not self._meet(step):
                print("lost a peer")
                return names.Exit.PEER_LOST
            time.sleep(STEP_S)
            step += 1
            self._finish(step)
            if self.part.get("do") == "end" and self.part["step"] == step:
                break
            if self.part.get("rank") == self.rank and self.part.get("step") == step:
                self._note("training", step)
                time.sleep(0.2)  # the supervisor must be able to see the step
                self._act(self.part["do"])
        self._note("done", step)
        return 0

    def _meet(self, step: int) -> bool:
        """Wait for all ranks to stand at a step; False when one has fallen."""
        paths = [
            self.run_dir / names.PROGRESS_FILE.format(rank=rank)
            for rank in range(int(os.environ["WORLD_SIZE"]))
        ]
        while not self.fallen.exists():
            seen = [Progress.model_validate_json(p.read_bytes()) for p in paths if p.exists()]
            here = [p for p in seen if (p.attempt, p.generation) == (self.attempt, self.generation)]
            if sum(p.step >= step and p.phase != "starting" for p in here) == len(paths):
                return True
            time.sleep(0.02)
        return False

    def _act(self, what: str) -> None:
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        self.fallen.touch()
        if what == "slow-raise":
            try:
                raise ValueError("bad weights")
            finally:
                time.sleep(0.6)  # teardown, while the peers fall already
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "user":
            print("data.sources.books: s3://omni/books is empty; upload it", file=sys.stderr)
            sys.exit(names.Exit.USER)
        if what == "stale":
            sys.exit(names.Exit.STALE)

    def _saved(self) -> int:
        with contextlib.suppress(OSError):
            return int((self.run_dir / "saved").read_text())
        return 0

    def _save(self, *_: object) -> None:
        (self.run_dir / f"interrupted-{self.rank}").touch()
        sys.exit(names.Exit.INTERRUPTED)

    def _finish(self, step: int) -> None:
        if self.rank != 0:
            return
        if step % 2 == 0 and self.part.get("saves", True):
            (self.run_dir / "saved").write_text(str(step))
        record = StepRecord(
            step=step, attempt=self.attempt, generation=self.generation, time_s=time.time(),
            step_s=STEP_S, loss=1 / step, loss_by={}, grad_norm=1, learning_rate=1, tokens=512,
            tokens_by_modality={}, tokens_by_source={"books": 512}, weights={"books": 1.0},
            corrupt_samples=0, max_live_encoder_microbatches=0,
        )  # fmt: skip
        with (self.run_dir / names.METRICS_FILE).open("a") as file:
            file.write(record.model_dump_json() + "\n")

    def _note(self, phase: Any, step: int) -> None:
        progress = Progress(
            pid=os.getpid(), attempt=self.attempt, generation=self.generation, phase=phase,
            step=step, time_s=time.time(),
        )  # fmt: skip
        fresh = self.progress.with_suffix(".tmp")
        fresh.write_text(progress.model_dump_json())
        fresh.replace(self.progress)

    def _beat(self) -> None:
        while True:
            time.sleep(1)
            self.progress.touch()


if __name__ == "__main__":
    sys.exit(FakeRank().run())
