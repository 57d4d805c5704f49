"""Tells the supervisor how far a rank is and that it is alive, through one file.

The file's content changes when phase or step does; its modification time moves once a second as
long as the process runs. So a stopped process (file grows old) is told from one that waits for
others (file is touched, step stands still).
"""

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Literal

from omni_contract.names import PROGRESS_FILE
from omni_contract.records import Progress
from omni_trainer.environment import Pair

HEARTBEAT_S = 1.0

Phase = Literal["starting", "restoring", "training", "saving", "done"]


class ProgressFile:
    """The progress file of one rank."""

    def __init__(
        self, run_dir: Path, rank: int, pair: Pair, *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._path = run_dir / PROGRESS_FILE.format(rank=rank)
        self._pair = pair
        self._heartbeat_s = heartbeat_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first state and begin to touch the file."""
        self.update("starting", 0)
        self._thread.start()

    def update(self, phase: Phase, step: int) -> None:
        """Replace the file: `step` steps are finished."""
        progress = Progress(
            pid=os.getpid(),
            attempt=self._pair.attempt,
            generation=self._pair.generation,
            phase=phase,
            step=step,
            time_s=time.time(),
        )
        # The pid keeps two generations that overlap for a moment off each other's file.
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(progress.model_dump_json())
        fresh.replace(self._path)

    def stop(self) -> None:
        """End the touching; the file stays."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.wait(self._heartbeat_s):
            with contextlib.suppress(OSError):  # the run folder may be gone at the very end
                os.utime(self._path)
