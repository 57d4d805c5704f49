"""Saving beside training: failures are counted, agreed on, and never hurt what is saved."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_cli.local_s3 import LocalS3
from omni_contract.errors import OmniError, StaleError, StorageError, UnavailableError
from omni_contract.spec_data import StorageSpec
from omni_contract.wire import LoaderState
from omni_trainer import checkpoint, claims
from omni_trainer.environment import Pair
from omni_trainer.saver import SaveOutcome, Saver
from omni_trainer.storage import Folder
from tests.fakes.refusing_s3 import RefusingS3
from tests.trainer.plans import plan_of

FIRST = Pair(attempt=1, generation=1)
SECOND = Pair(attempt=1, generation=2)
THIRD = Pair(attempt=1, generation=3)
TOO_LONG = "x" * 2000
"""A name that makes a key no store takes."""


def state_after(step: int) -> LoaderState:
    return LoaderState(next_step=step + 1, blob=b"data state")


def alone(number: int) -> int:
    return number


def saver_of(
    folder: Folder, outcomes: list[SaveOutcome], *, pair: Pair = FIRST, **spec: Any
) -> Saver:
    plan = plan_of(folder.uri, **spec)
    held = claims.claim(folder, plan, pair)
    return Saver(
        folder=folder, plan=plan, rank=0, claim=held.latest.claim, held=held, agree=alone,
        report=outcomes.append,
    )  # fmt: skip


def saved_step(folder: Folder, pair: Pair) -> int:
    plan = plan_of(folder.uri)
    resume = claims.claim(folder, plan, pair).resume
    assert resume is not None
    manifest = resume.manifest
    checkpoint.load_object(folder, manifest, "rank-0")
    checkpoint.load_data_state(folder, manifest)
    return manifest.ref.step


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_saves_are_tolerated_in_a_row_then_fatal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """C53 too: the checkpoint before stays whole."""
    outcomes: list[SaveOutcome] = []
    with LocalS3(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        server.open().create_bucket("saves")
        folder = Folder("s3://saves/run", StorageSpec(), attempts=1)
        saver = saver_of(folder, outcomes, failedSaves=1, async_=asynchronous)
        objects = {"rank-0": {"weight": torch.ones(3)}}
        saver.save(20, objects, state_after(20), last=False)
        saver.settle()
    saver.save(40, objects, state_after(40), last=False)
    words = r"checkpoint\.failedSaves: 2 saves .*cannot be reached"
    with pytest.raises(UnavailableError, match=words):  # an outage, not the user's mistake
        saver.save(60, objects, state_after(60), last=False)
        saver.settle()
    assert [(o.step, o.error is None) for o in outcomes] == [(20, True), (40, False), (60, False)]
    with LocalS3(tmp_path / "s3") as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        assert saved_step(Folder("s3://saves/run", StorageSpec()), SECOND) == 20


def test_a_save_that_works_forgives_those_before(
    bucket: str,
) -> None:
    outcomes: list[SaveOutcome] = []
    folder = Folder(f"{bucket}/run", StorageSpec())
    saver = saver_of(folder, outcomes, failedSaves=1)
    objects: dict[str, Any] = {"rank-0": {"weight": torch.ones(3)}}
    bad: dict[str, Any] = {"rank-0": {"weight": torch.ones(3)}, TOO_LONG: 1}
    for step, what in [(20, bad), (40, objects), (60, bad), (80, objects)]:
        saver.save(step, what, state_after(step), last=False)
    saver.settle()
    assert [o.error is None for o in outcomes] == [False, True, False, True]
    assert saved_step(folder, SECOND) == 80


def test_the_last_save_must_succeed(bucket: str) -> None:
    folder = Folder(f"{bucket}/run", StorageSpec())
    saver = saver_of(folder, [], failedSaves=5)
    saver.save(20, {"rank-0": {"w": torch.ones(3)}}, state_after(20), last=False)
    with pytest.raises(
        StorageError, match="the last save of the run failed: .*start the job again"
    ):
        saver.save(23, {"rank-0": 1, TOO_LONG: 1}, state_after(23), last=True)
    assert saved_step(folder, SECOND) == 20


def test_c11_no_save_without_its_data_state(bucket: str) -> None:
    folder = Folder(f"{bucket}/run", StorageSpec())
    saver = saver_of(folder, [])
    for state in (None, state_after(19)):
        with pytest.raises(StorageError, match="gave no state for it"):
            saver.save(20, {"rank-0": 1}, state, last=False)
    assert not folder.list("step-")


def test_a_stale_saver_ends_and_leaves_latest_alone(bucket: str) -> None:
    folder = Folder(f"{bucket}/run", StorageSpec())
    old = saver_of(folder, [])
    objects = {"rank-0": {"weight": torch.ones(3)}}
    old.save(20, objects, state_after(20), last=False)
    old.settle()
    new = saver_of(folder, [], pair=SECOND)
    old.save(40, objects, state_after(40), last=False)
    with pytest.raises(StaleError, match=r"1\.1 is stale"):
        old.settle()
    new.save(40, objects, state_after(40), last=True)
    assert saved_step(folder, THIRD) == 40


class Ranks:
    """Savers of two ranks, each on a thread, that agree through a barrier."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=30)
        self._numbers = [0, 0]

    def agree(self, rank: int) -> Callable[[int], int]:
        def agree(number: int) -> int:
            self._numbers[rank] = number
            self._barrier.wait()
            greatest = max(self._numbers)
            self._barrier.wait()
            return greatest

        return agree

    def saver(self, folder: Folder, rank: int, outcomes: list[SaveOutcome], **spec: Any) -> Saver:
        plan = plan_of(folder.uri, nodes=2, **spec)
        held = claims.claim(folder, plan, FIRST) if rank == 0 else None
        return Saver(
            folder=folder, plan=plan, rank=rank, claim=1, held=held,
            agree=self.agree(rank), report=outcomes.append, patience_s=1.0,
        )  # fmt: skip

    @staticmethod
    def save_all(savers: list[Saver], step: int) -> list[OmniError | None]:
        def save(rank: int) -> OmniError | None:
            objects = {f"rank-{rank}": torch.full((2,), float(step))}
            try:
                savers[rank].save(
                    step, objects, state_after(step) if not rank else None, last=False
                )
                savers[rank].settle()
            except OmniError as exc:
                return exc
            return None

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(save, range(2)))


def test_a_checkpoint_counts_once_every_rank_has_written(bucket: str) -> None:
    folder, ranks, outcomes = Folder(f"{bucket}/run", StorageSpec()), Ranks(), list[SaveOutcome]()
    savers = [ranks.saver(folder, rank, outcomes) for rank in range(2)]
    assert ranks.save_all(savers, 20) == [None, None]
    resume = claims.claim(folder, plan_of(folder.uri, nodes=2), SECOND).resume
    assert resume is not None
    assert sorted(resume.manifest.shards) == [checkpoint.DATA_STATE, "rank-0.pt", "rank-1.pt"]
    assert [o.step for o in outcomes] == [20]


def test_one_ranks_failure_is_everybodys(bucket: str) -> None:
    """The rank whose store is full cannot even say so: rank 0 waits only so long."""
    folder, ranks, outcomes = Folder(f"{bucket}/run", StorageSpec()), Ranks(), list[SaveOutcome]()
    with RefusingS3(status=507, code="XMinioStorageFull") as full:
        other = Folder(folder.uri, StorageSpec(endpoint=full.endpoint), attempts=1)
        savers = [
            ranks.saver(folder, 0, outcomes, failedSaves=1),
            ranks.saver(other, 1, outcomes, failedSaves=1),
        ]
        assert ranks.save_all(savers, 20) == [None, None]
        first, second = ranks.save_all(savers, 40)
    assert "1 of 2 ranks wrote nothing" in str(first)
    assert "the object store is full" in str(second)
    assert claims.claim(folder, plan_of(folder.uri, nodes=2), SECOND).latest.checkpoints == []
    assert [o.error is None for o in outcomes] == [False, False]


def test_an_abandoned_save_does_not_count(bucket: str) -> None:
    """A peer died: rank 0 must not wait for it until the patience ends."""
    folder = Folder(f"{bucket}/run", StorageSpec())
    plan = plan_of(folder.uri, nodes=2)
    saver = Saver(
        folder=folder, plan=plan, rank=0, claim=1, agree=alone, report=lambda outcome: None,
        held=claims.claim(folder, plan, FIRST),
    )  # fmt: skip
    saver.save(20, {"rank-0": 1}, state_after(20), last=False)
    saver.abandon()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("save-")]
    assert claims.claim(folder, plan_of(folder.uri, nodes=2), SECOND).latest.checkpoints == []
