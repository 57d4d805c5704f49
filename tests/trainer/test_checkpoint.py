"""Parts of a checkpoint in a real S3 server: what comes back, and what is refused."""

import io
import json

import pytest
import torch

from omni_contract.errors import SpecError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.spec_data import StorageSpec
from omni_trainer import checkpoint, claims
from omni_trainer.storage import Folder
from tests.trainer.plans import plan_of
from tests.trainer.saves import FIRST, SECOND, no_pause, objects_of, ref_of, resumed_step, save


@pytest.fixture
def folder(bucket: str) -> Folder:
    return Folder(f"{bucket}/run", StorageSpec())


@pytest.fixture
def plan(folder: Folder) -> JobPlan:
    return plan_of(folder.uri)


def test_what_was_saved_comes_back_bit_for_bit(folder: Folder, plan: JobPlan) -> None:
    torch.manual_seed(0)
    saved = {
        "rank-0": {
            "half": torch.randn(5).to(torch.bfloat16),
            "odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
            "rng": torch.get_rng_state(),
            "nested": [{"step": 3, "rate": 0.1}],
        }
    }
    held = claims.claim(folder, plan, FIRST)
    ref = ref_of(20)
    checkpoint.write_rank(folder, ref, 0, saved, b"\0state")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    held = claims.commit(folder, held, plan, ref, shards)
    manifest = checkpoint.read_manifest(folder, plan, held.latest.checkpoints[0])
    found = checkpoint.load_object(folder, manifest, "rank-0")
    for name in ("half", "odd", "rng"):
        before, after = saved["rank-0"][name], found[name]
        assert isinstance(before, torch.Tensor)
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert found["nested"] == [{"step": 3, "rate": 0.1}]
    state = checkpoint.load_data_state(folder, manifest)
    assert (state.next_step, state.blob) == (21, b"\0state")


@pytest.mark.parametrize("file", ["rank-0.pt", checkpoint.DATA_STATE])
def test_c11_a_missing_part_is_fatal(folder: Folder, plan: JobPlan, file: str) -> None:
    """Loader state silently not saved or not restored must never pass."""
    save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    folder.delete([f"{ref_of(20).folder}/{file}"])
    with pytest.raises(StorageError, match=rf"{file}: this part of the checkpoint is missing"):
        resumed_step(folder, plan, SECOND)


@pytest.mark.parametrize("file", ["rank-0.pt", checkpoint.DATA_STATE])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_part_is_refused(folder: Folder, plan: JobPlan, file: str, damage: str) -> None:
    save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    key = f"{ref_of(20).folder}/{file}"
    blob = folder.get(key)
    assert blob is not None
    flipped = blob.data[:-1] + bytes([blob.data[-1] ^ 1])
    folder.put(key, flipped if damage == "flipped" else blob.data[:-1])
    with pytest.raises(StorageError, match=rf"{file}: this part of the checkpoint is damaged"):
        resumed_step(folder, plan, SECOND)


def test_an_object_no_rank_wrote_is_missing(folder: Folder, plan: JobPlan) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    manifest = checkpoint.read_manifest(folder, plan, held.latest.checkpoints[0])
    with pytest.raises(StorageError, match=r"rank-1\.pt: this part of the checkpoint is missing"):
        checkpoint.load_object(folder, manifest, "rank-1")


def test_another_job_is_refused_with_both_values(folder: Folder, plan: JobPlan) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    with pytest.raises(SpecError, match=r"train\.seed: .* saved with 1, this job has 2"):
        checkpoint.read_manifest(folder, plan_of(folder.uri, seed=2), held.latest.checkpoints[0])


def test_loading_runs_no_code(folder: Folder, plan: JobPlan) -> None:
    """A checkpoint is data: a pickle that calls something is refused, not run."""
    held = claims.claim(folder, plan, FIRST)
    ref = ref_of(20)
    buffer = io.BytesIO()
    torch.save(json.JSONEncoder(), buffer)
    checkpoint.write_rank(folder, ref, 0, {"rank-0": json.JSONEncoder()}, b"s")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    held = claims.commit(folder, held, plan, ref, shards)
    manifest = checkpoint.read_manifest(folder, plan, held.latest.checkpoints[0])
    with pytest.raises(StorageError, match=r"rank-0\.pt: .*no tensors and plain values"):
        checkpoint.load_object(folder, manifest, "rank-0")


def test_a_rank_that_could_not_write_is_named(folder: Folder) -> None:
    ref = ref_of(20)
    checkpoint.write_rank(folder, ref, 0, objects_of(20), b"data state")
    checkpoint.write_failure(folder, ref, 1, "the object store is full")
    with pytest.raises(StorageError, match="rank 1: the object store is full"):
        checkpoint.wait_done(folder, ref, 2, patience_s=5, pause=no_pause)


def test_a_rank_that_writes_nothing_is_waited_for_only_so_long(folder: Folder) -> None:
    ref = ref_of(20)
    checkpoint.write_rank(folder, ref, 0, objects_of(20), b"data state")
    pauses: list[float] = []
    with pytest.raises(StorageError, match=r"1 of 2 ranks wrote nothing .* done-1\.json"):
        checkpoint.wait_done(folder, ref, 2, patience_s=0, pause=pauses.append)
