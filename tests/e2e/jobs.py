"""Small whole runs: `omni run` as a process of its own, and what it left behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from omni_contract import names
from omni_contract.records import ConsumedRecord, RunEvent, StepRecord
from tests.contract.jobs import changed

MARK = "OMNI_TEST_RUN"
STEP_TOKENS = 4 * 256
Place = tuple[int, int, str, int, int, int]


def small_job(
    bucket: str, run: str, *, steps: int = 14, saves_async: bool = True, **restart: Any
) -> dict[str, Any]:
    """pp 2 x dp 2 on 2 nodes, a save every 4 steps, a ramp from step 4 to 10."""
    job = changed("metadata.name", "small")
    spec = job["spec"]
    spec["model"]["llm"].update(
        layers=2, hiddenSize=32, heads=2, kvHeads=2, tokenizer=f"{bucket}/tokenizer.json"
    )
    for encoder in spec["model"]["encoders"].values():
        encoder.update(layers=1, hiddenSize=32, heads=2)
    spec["batch"] = {"globalSequences": 4, "microbatchSequences": 1, "sequenceTokens": 256}
    spec["train"]["tokens"] = steps * STEP_TOKENS
    spec["train"]["optimizer"] = {"learningRate": 0.003, "warmupTokens": STEP_TOKENS}
    for name, source in spec["data"]["sources"].items():
        source["uri"] = f"{bucket}/{name}"
    last = {"pictures": 1, "drawings": 1, "speech": 4, "books": 1}
    spec["data"]["mixture"] = [
        {"until": 3 * STEP_TOKENS, "weights": {"pictures": 1, "books": 1}},
        {"until": 10 * STEP_TOKENS, "ramp": "linear", "weights": last},
        {"weights": last},
    ]
    spec["checkpoint"] = {
        "uri": f"{bucket}/runs/{run}", "every": "4 steps", "keep": 3, "async": saves_async
    }  # fmt: skip
    spec["restart"] = {"hangAfterSeconds": 6, **restart}
    return job


class OmniRun:
    """`omni run` on a small job."""

    def __init__(
        self, folder: Path, job: Mapping[str, Any], env: Mapping[str, str], faults: Sequence[str]
    ) -> None:
        folder.mkdir(parents=True)
        self.run_dir = folder / "run"
        self.temp_dir = folder / "tmp"
        self.temp_dir.mkdir()
        self.mark = uuid.uuid4().hex
        (folder / "job.yaml").write_text(yaml.safe_dump(dict(job)))
        self._output = folder / "output"
        self._shared_memory = set(os.listdir("/dev/shm"))
        command = [sys.executable, "-m", "omni_cli.main", "run", str(folder / "job.yaml")]
        command += ["--run-dir", str(self.run_dir)]
        for fault in faults:
            command += ["--fault", fault]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **env, MARK: self.mark, "TMPDIR": str(self.temp_dir)},
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        """What it said."""
        return self._output.read_text()

    def wait(self, timeout_s: float = 200) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End it whatever happens; the kernel ends its children."""
        self.process.kill()
        self.process.wait()
        for left in self.processes():
            left.kill()

    def wait_for_step(self, step: int, timeout_s: float = 120) -> None:
        """Return once a step is done."""
        deadline = time.monotonic() + timeout_s
        while not any(line.step >= step for line in self.steps()):
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def interrupt(self) -> float:
        """Ctrl-C; seconds until it has ended."""
        begin = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        return time.monotonic() - begin

    def steps(self) -> list[StepRecord]:
        """All steps done, replays too."""
        return StepRecord.read_all(self.run_dir / names.METRICS_FILE)

    def events(self, kind: str) -> list[RunEvent]:
        """Events of a kind."""
        found = RunEvent.read_all(self.run_dir / names.EVENTS_FILE)
        return [event for event in found if event.kind == kind]

    def losses(self) -> dict[int, set[str]]:
        """Losses of each step to the last bit, of all times it was done."""
        found: dict[int, set[str]] = {}
        for line in self.steps():
            found.setdefault(line.step, set()).add(line.loss.hex())
        return found

    def consumed(self) -> dict[tuple[int, int], set[tuple[Place, ...]]]:
        """By (step, rank): the samples in order, of all times the step was done."""
        found: dict[tuple[int, int], set[tuple[Place, ...]]] = {}
        for path in sorted(self.run_dir.glob("consumed-*.jsonl")):
            for record in ConsumedRecord.read_all(path):
                places = tuple(
                    (s.microbatch, int(s.corrupt), s.source, s.epoch, s.index, s.first_token)
                    for s in record.samples
                )
                found.setdefault((record.step, record.rank), set()).add(places)
        return found

    def processes(self) -> list[psutil.Process]:
        """Living processes of the run, wherever they hang in the tree."""
        found = []
        for process in psutil.process_iter():
            try:
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def leftovers(self) -> list[str]:
        """Processes (so ports, too), shared memory and sockets that are still there."""
        deadline = time.monotonic() + 1
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        shared = set(os.listdir("/dev/shm")) - self._shared_memory
        sockets = [path for path in self.temp_dir.rglob("*") if path.is_socket()]
        return [*map(str, left), *sorted(shared), *map(str, sockets)]
