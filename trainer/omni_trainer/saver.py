"""Saves while training goes on: serialising, uploading and commit on a thread of their own.

The thread runs no collective. Ranks meet again in `settle`, on the training thread, and agree
there whether the save before counted, so that all of them go on or none.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omni_contract.errors import OmniError, StaleError, StorageError, UnavailableError
from omni_contract.plan import JobPlan
from omni_contract.wire import LoaderState
from omni_trainer import checkpoint, claims
from omni_trainer.checkpoint import CheckpointRef
from omni_trainer.claims import Claim
from omni_trainer.storage import Folder

PATIENCE_S = 600.0
"""A save fails when no rank wrote anything for so long."""
_OK, _FAILED, _AWAY, _STALE = range(4)

Agree = Callable[[int], int]
"""The greatest of all ranks' numbers; a collective that every rank calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """How a save ended."""

    step: int
    seconds: float
    error: str | None
    """Why it does not count; None: it does."""
    note: str | None
    """What else did not work out."""


Report = Callable[[SaveOutcome], None]
"""Called on the saving thread of rank 0."""


class _Abandoned(Exception):
    """The process ends; the save is left as it is, uncommitted."""


class Saver:
    """The saves of one rank under the claim of this number; `held` is it, on rank 0 only."""

    def __init__(
        self,
        *,
        folder: Folder,
        plan: JobPlan,
        rank: int,
        claim: int,
        held: Claim | None,
        agree: Agree,
        report: Report,
        patience_s: float = PATIENCE_S,
    ) -> None:
        assert (rank == 0) == (held is not None)
        self._folder = folder
        self._plan = plan
        self._rank = rank
        self._claim = claim
        self._held = held
        self._agree = agree
        self._report = report
        self._patience_s = patience_s
        self._thread: threading.Thread | None = None
        self._error: OmniError | None = None
        self._crash: BaseException | None = None
        self._failures = 0
        self._abandoned = threading.Event()

    def save(
        self, step: int, objects: Mapping[str, Any], state: LoaderState | None, *, last: bool
    ) -> None:
        """Save the state after `step`. Collective over all ranks; waits for the save before.

        `objects` are copies: training goes on meanwhile. `state` is the data state, on rank 0
        only. `last`: wait for the end; it must succeed.
        Otherwise raises StorageError only when checkpoint.failedSaves is passed.
        """
        self.settle()
        if self._rank == 0 and (state is None or state.next_step != step + 1):
            raise StorageError(
                f"checkpoint of step {step}: the data service gave no state for it; it cannot be "
                "resumed from and is not saved"
            )
        ref = CheckpointRef(step=step, claim=self._claim)
        blob = state.blob if self._rank == 0 and state is not None else None
        self._thread = threading.Thread(
            target=self._run, args=(ref, objects, blob), name=f"save-{step}", daemon=True
        )
        self._thread.start()
        if last or not self._plan.spec.checkpoint.async_:
            self.settle(must_succeed=last)

    def settle(self, *, must_succeed: bool = False) -> None:
        """Wait for the save under way and agree on its outcome. Collective over all ranks."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if self._crash is not None:
            raise self._crash
        outcome = self._agree(_outcome(error))
        if outcome == _OK:
            self._failures = 0
            return
        if outcome == _STALE:
            raise (
                error
                if isinstance(error, StaleError)
                else StaleError(f"{self._folder.uri}: this generation no longer holds the run")
            )
        self._failures += 1
        allowed = self._plan.spec.checkpoint.failed_saves
        cause = "another rank could not write its part" if error is None else str(error)
        failure = UnavailableError if outcome == _AWAY else StorageError
        if must_succeed:
            raise failure(
                f"checkpoint.uri: the last save of the run failed: {cause}; start the job again "
                "to go on from the checkpoint before"
            )
        if self._failures > allowed:
            raise failure(
                f"checkpoint.failedSaves: {self._failures} saves in a row failed and {allowed} "
                f"may; the last one: {cause}"
            )

    def abandon(self) -> None:
        """The process ends early: stop a save under way; it will not count."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _pause(self, seconds: float) -> None:
        if self._abandoned.wait(seconds):
            raise _Abandoned

    def _run(self, ref: CheckpointRef, objects: Mapping[str, Any], state: bytes | None) -> None:
        begin_s, note = time.monotonic(), None
        try:
            note = self._write(ref, objects, state)
        except _Abandoned:
            return
        except OmniError as exc:
            self._error = exc
        except BaseException as exc:  # a bug: raised again where the ranks meet
            self._crash = exc
            return
        if self._rank == 0:
            self._report(
                SaveOutcome(
                    step=ref.step,
                    seconds=time.monotonic() - begin_s,
                    error=None if self._error is None else str(self._error),
                    note=note,
                )
            )

    def _write(
        self, ref: CheckpointRef, objects: Mapping[str, Any], state: bytes | None
    ) -> str | None:
        try:
            checkpoint.write_rank(self._folder, ref, self._rank, objects, state)
        except StorageError as exc:
            with contextlib.suppress(StorageError):  # rank 0 then finds out by waiting
                checkpoint.write_failure(self._folder, ref, self._rank, str(exc))
            raise
        if self._held is None:
            return None
        shards = checkpoint.wait_done(
            self._folder, ref, self._plan.layout.world_size,
            patience_s=self._patience_s, pause=self._pause,
        )  # fmt: skip
        self._held = claims.commit(self._folder, self._held, self._plan, ref, shards)
        try:
            claims.prune(self._folder, self._held)
        except StorageError as exc:
            return f"older checkpoints stay: {exc}"
        return None


def _outcome(error: OmniError | None) -> int:
    """What this rank says about its save; the greatest number counts for all."""
    match error:
        case None:
            return _OK
        case StaleError():
            return _STALE
        case UnavailableError():
            return _AWAY
    return _FAILED
