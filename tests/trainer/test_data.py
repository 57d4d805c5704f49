"""The sidecar client: what it hands out, how it survives a restart, how it says no."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_contract import wire
from omni_contract.errors import DataError, StaleError, UnavailableError
from omni_trainer.data import DataClient, EndOfData, Interrupted
from omni_trainer.environment import Pair
from tests.fakes.scripted_sidecar import ScriptedSidecar

PAIR = Pair(attempt=2, generation=3)


def client_of(path: Path, **changes: Any) -> DataClient:
    arguments: dict[str, Any] = {
        "plan_hash": "0123",
        "pair": PAIR,
        "rank": 1,
        "next_step": 1,
        "state": None,
        "away_s": 5.0,
    }
    return DataClient(path, **{**arguments, **changes})


def test_a_step_comes_as_the_sidecar_wrote_it(tmp_path: Path) -> None:
    with ScriptedSidecar(tmp_path / "socket") as sidecar:
        client = client_of(tmp_path / "socket")
        data = client.next(1)
        (microbatch,) = data.inputs.microbatches
        assert data.inputs.step == microbatch.index == 1
        assert microbatch.samples.tolist() == [[0, 0, 10, 0, 0, 5], [1, 2, 1, 3, 5, 3]]
        assert microbatch.spans.dtype == np.int64
        assert microbatch.tokens is not None and microbatch.tokens.tolist() == [1] * 8
        assert microbatch.tokens.dtype == torch.int32
        assert microbatch.loss_mask is not None and microbatch.loss_mask.sum() == 5
        assert microbatch.loss_mask.dtype == torch.bool
        assert microbatch.image_patches is not None and microbatch.image_patches.shape == (4, 12)
        assert microbatch.image_grid is not None and microbatch.image_grid.tolist() == [[2, 2]]
        assert microbatch.audio_features is not None
        assert microbatch.audio_features.shape == (0, 80)
        assert microbatch.labels is None
        assert (data.tokens_by_source, data.corrupt_samples) == ({"books": 5, "pictures": 3}, 1)
        client.release(1)
        assert client.snapshot(1) == wire.LoaderState(next_step=2, blob=b"after 1")
        client.close()
    assert sidecar.requests == [
        wire.Hello(plan_hash="0123", attempt=2, generation=3, rank=1, next_step=1, state=None),
        wire.Next(step=1),
        wire.Release(step=1),
        wire.Snapshot(step=1),
    ]


def test_records_outlive_the_ring_slot_and_tensors_are_its_views(tmp_path: Path) -> None:
    with ScriptedSidecar(tmp_path / "socket"):
        client = client_of(tmp_path / "socket")
        first = client.next(1).inputs.microbatches[0]
        client.release(1)
        client.next(2)
        client.next(3)  # the slot of step 1 again
        assert first.samples[0, 2] == 10
        assert first.tokens is not None and first.tokens.tolist() == [3] * 8
        client.close()


def test_arrays_stay_mapped_after_the_connection_is_gone(tmp_path: Path) -> None:
    with ScriptedSidecar(tmp_path / "socket"):
        client = client_of(tmp_path / "socket")
        tokens = client.next(1).inputs.microbatches[0].tokens
        client.close()
    assert tokens is not None and tokens.tolist() == [1] * 8


def test_a_restarted_sidecar_is_joined_again_at_the_next_step(tmp_path: Path) -> None:
    """Within the generation, with the state of the checkpoint it resumed from."""
    base = wire.LoaderState(next_step=21, blob=b"saved")
    with ScriptedSidecar(tmp_path / "socket", dies_at=23) as sidecar:
        client = client_of(tmp_path / "socket", next_step=21, state=base)
        for step in range(21, 26):
            tokens = client.next(step).inputs.microbatches[0].tokens
            assert tokens is not None and tokens.tolist() == [step] * 8
            client.release(step)
        client.close()
    hellos = sidecar.asked(wire.Hello)
    assert [(h.next_step, h.state, h.attempt, h.generation) for h in hellos
            if isinstance(h, wire.Hello)] == [(21, base, 2, 3), (23, base, 2, 3)]  # fmt: skip
    asked = [r.step for r in sidecar.requests if isinstance(r, wire.Next)]
    assert asked == [21, 22, 23, 23, 24, 25]


def test_a_sidecar_that_died_after_the_step_still_gives_its_state(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ScriptedSidecar(path):
        client = client_of(path)
        client.next(1)
    client.release(1)
    with ScriptedSidecar(path) as second:
        assert client.snapshot(1).next_step == 2
        client.close()
    (hello,) = second.asked(wire.Hello)
    assert isinstance(hello, wire.Hello) and hello.next_step == 2


def test_a_sidecar_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    sidecar = ScriptedSidecar(path)
    timer = threading.Timer(0.5, sidecar.__enter__)
    timer.start()
    try:
        client = client_of(path)
        assert client.next(1).inputs.step == 1
        client.close()
    finally:
        timer.join()
        sidecar.__exit__(None, None, None)


def test_a_sidecar_that_stays_away_is_an_error(tmp_path: Path) -> None:
    client = client_of(tmp_path / "socket", away_s=0.3)
    words = r"socket: the data service was away for 0 s .*run folder"
    with pytest.raises(UnavailableError, match=words):
        client.next(1)


def test_waiting_for_a_sidecar_ends_with_the_process(tmp_path: Path) -> None:
    client = client_of(tmp_path / "socket", is_ending=lambda: True)
    with pytest.raises(Interrupted):
        client.next(1)


def test_the_end_of_data_is_no_error(tmp_path: Path) -> None:
    with ScriptedSidecar(tmp_path / "socket", num_steps=1):
        client = client_of(tmp_path / "socket")
        client.next(1)
        with pytest.raises(EndOfData, match="used up"):
            client.next(2)
        assert client.snapshot(1).next_step == 2
        client.close()


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        ("stale", StaleError),
        ("mismatch", DataError),
        ("error", DataError),
        ("unavailable", UnavailableError),
    ],
)
def test_a_refusal_keeps_the_sidecars_words(
    tmp_path: Path, reason: Any, error: type[Exception]
) -> None:
    refuse = wire.Refused(reason=reason, message="s3://omni/books/0.tar: this shard is cut short")
    with ScriptedSidecar(tmp_path / "socket", refuse=refuse):
        client = client_of(tmp_path / "socket")
        with pytest.raises(error, match="^s3://omni/books/0.tar: this shard is cut short$"):
            client.next(1)
        client.close()
