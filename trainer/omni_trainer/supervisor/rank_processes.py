"""The ranks of one node and generation, in the form torch's elastic agent watches."""

import contextlib
import os
import signal
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import (
    LogsDest,
    LogsSpecs,
    PContext,
    RunProcsResult,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from omni_contract.log_store import LOG_FOLDER, LogFile
from omni_contract.names import ENV_ATTEMPT, ENV_GENERATION
from omni_trainer.supervisor.nursery import Nursery


def rank_log(*, rank: int, attempt: int, generation: int) -> Path:
    """Log of a rank's stdout and stderr, relative to the run folder."""
    file = LogFile(kind="rank", number=rank, attempt=attempt, generation=generation)
    return Path(LOG_FOLDER) / file.name


class RunLogs(LogsSpecs):
    """One log and one error file per rank and generation, in the run folder."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self._run_dir = run_dir

    @property
    def root_log_dir(self) -> str:
        """Folder of the logs."""
        return str(self._run_dir / LOG_FOLDER)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Paths per local rank; tells each rank its error file."""
        dest = LogsDest()
        for local_rank, env in envs.items():
            log = self._run_dir / rank_log(
                rank=int(env["RANK"]),
                attempt=int(env[ENV_ATTEMPT]),
                generation=int(env[ENV_GENERATION]),
            )
            error_file = log.with_suffix(".error.json")
            dest.stdouts[local_rank] = dest.stderrs[local_rank] = str(log)
            dest.error_files[local_rank] = str(error_file)
            env["TORCHELASTIC_ERROR_FILE"] = str(error_file)
        return dest


class RankProcesses(PContext):
    """Ranks forked from the nursery. Unlike torch's own contexts it ends no rank by itself.

    A poll that finds a failure leaves the others alone, so that the supervisor can see whether
    the true cause is among them before it kills them.
    """

    def __init__(
        self, *, nursery: Nursery, module: str, envs: dict[int, dict[str, str]], logs: RunLogs
    ) -> None:
        super().__init__(
            name="trainer",
            entrypoint=module,
            args={local_rank: () for local_rank in envs},
            envs=envs,
            logs_specs=logs,
        )
        self._nursery = nursery
        self._module = module
        self._pids: dict[int, int] = {}
        self._failures: dict[int, ProcessFailure] = {}

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return self._pids

    def exit_codes(self) -> dict[int, int | None]:
        """Exit codes by local rank, None for those that run."""
        return {r: self._nursery.exit_code(pid) for r, pid in self._pids.items()}

    def failures(self) -> dict[int, ProcessFailure]:
        """Ranks that ended with another code than 0; their times are those of the first look."""
        for local_rank, code in self.exit_codes().items():
            if code and local_rank not in self._failures:
                self._failures[local_rank] = ProcessFailure(
                    local_rank=local_rank,
                    pid=self._pids[local_rank],
                    exitcode=code,
                    error_file=self.error_files[local_rank],
                )
        return dict(self._failures)

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            self._pids[local_rank] = self._nursery.start(
                module=self._module,
                env=self.envs[local_rank],
                log=self.stdouts[local_rank],
            )

    def _poll(self) -> RunProcsResult | None:
        if failures := self.failures():
            return RunProcsResult(failures=failures)
        if any(code is None for code in self.exit_codes().values()):
            return None
        return RunProcsResult(return_values=dict.fromkeys(self._pids))

    def tell_to_end(self) -> None:
        """SIGTERM to every rank that runs."""
        for local_rank, code in self.exit_codes().items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._pids[local_rank], signal.SIGTERM)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Kill the ranks with all they started, whatever the signal; `timeout` bounds the wait."""
        for local_rank, code in self.exit_codes().items():
            pid = self._pids[local_rank]
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # also when the rank is dead: its children may live
            if code is None:  # a rank just forked leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._wait(timeout)

    def _wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and None in self.exit_codes().values():
            time.sleep(0.01)
