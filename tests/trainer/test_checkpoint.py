"""The commit protocol against a real S3 server: what counts, who may write, what is refused."""

import io
import json
from typing import Any

import pytest
import torch

from omni_contract.errors import SpecError, StaleError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.spec_data import StorageSpec
from omni_trainer import checkpoint
from omni_trainer.checkpoint import CheckpointRef, Claim
from omni_trainer.environment import Pair
from omni_trainer.storage import Blob, Folder
from tests.trainer.plans import plan_of

FIRST = Pair(attempt=1, generation=1)
SECOND = Pair(attempt=1, generation=2)
THIRD = Pair(attempt=1, generation=3)


@pytest.fixture
def folder(bucket: str) -> Folder:
    return Folder(f"{bucket}/run", StorageSpec())


@pytest.fixture
def plan(folder: Folder) -> JobPlan:
    return plan_of(folder.uri)


def ref_of(step: int, pair: Pair) -> CheckpointRef:
    return CheckpointRef(step=step, attempt=pair.attempt, generation=pair.generation)


def objects_of(step: int) -> dict[str, Any]:
    return {"rank-0": {"weight": torch.full((4, 3), float(step)), "step": step}}


def no_pause(seconds: float) -> None:
    raise AssertionError("every rank has written")


def save(folder: Folder, plan: JobPlan, held: Claim, step: int) -> Claim:
    ref = ref_of(step, held.latest.pair)
    checkpoint.write_rank(folder, ref, 0, objects_of(step), b"data state")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    return checkpoint.commit(folder, held, plan, ref, shards)


def resumed_step(folder: Folder, plan: JobPlan, pair: Pair) -> int:
    manifest = checkpoint.claim(folder, plan, pair).resume
    if manifest is None:
        return 0
    assert checkpoint.load_data_state(folder, manifest).next_step == manifest.ref.step + 1
    loaded = checkpoint.load_object(folder, manifest, "rank-0")
    assert torch.equal(loaded["weight"], objects_of(manifest.ref.step)["rank-0"]["weight"])
    return manifest.ref.step


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
    held = checkpoint.claim(folder, plan, FIRST)
    ref = ref_of(20, FIRST)
    checkpoint.write_rank(folder, ref, 0, saved, b"\0state")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    held = checkpoint.commit(folder, held, plan, ref, shards)
    manifest = checkpoint.read_manifest(folder, plan, held.latest)
    assert manifest is not None
    found = checkpoint.load_object(folder, manifest, "rank-0")
    for name in ("half", "odd", "rng"):
        before, after = saved["rank-0"][name], found[name]
        assert isinstance(before, torch.Tensor)
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    assert found["nested"] == [{"step": 3, "rate": 0.1}]
    state = checkpoint.load_data_state(folder, manifest)
    assert (state.next_step, state.blob) == (21, b"\0state")


def test_a_new_run_has_nothing_to_resume(folder: Folder, plan: JobPlan) -> None:
    assert checkpoint.newest_attempt(folder) == 0
    assert resumed_step(folder, plan, FIRST) == 0
    assert checkpoint.newest_attempt(folder) == 1


def test_c51_killed_between_objects_and_manifest_the_older_checkpoint_counts(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    checkpoint.write_rank(folder, ref_of(40, FIRST), 0, objects_of(40), b"data state")
    assert resumed_step(folder, plan, SECOND) == 20
    assert held.latest.checkpoints == [ref_of(20, FIRST)]


def test_c51_killed_between_manifest_and_latest_the_older_checkpoint_counts(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    newer = checkpoint.claim(folder, plan, SECOND)  # the kill, seen from outside
    with pytest.raises(StaleError):
        save(folder, plan, held, 40)
    assert f"{ref_of(40, FIRST).folder}/{checkpoint.MANIFEST}" in folder.list("step-")
    assert newer.latest.checkpoints == [ref_of(20, FIRST)]
    assert resumed_step(folder, plan, THIRD) == 20


def test_c51_latest_names_a_checkpoint_without_manifest(folder: Folder, plan: JobPlan) -> None:
    save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    folder.delete([f"{ref_of(20, FIRST).folder}/{checkpoint.MANIFEST}"])
    with pytest.raises(StorageError, match="names this checkpoint but it is gone; restore it"):
        resumed_step(folder, plan, SECOND)


def test_a_stale_writer_neither_claims_nor_moves_latest(folder: Folder, plan: JobPlan) -> None:
    old = checkpoint.claim(folder, plan, FIRST)
    new = save(folder, plan, checkpoint.claim(folder, plan, SECOND), 60)
    with pytest.raises(StaleError, match=r"1\.1 is stale"):
        save(folder, plan, old, 80)
    with pytest.raises(StaleError, match=r"1\.2 holds this run, 1\.1 is stale"):
        checkpoint.claim(folder, plan, FIRST)
    assert save(folder, plan, new, 80).latest.checkpoints[0] == ref_of(80, SECOND)


def test_two_runs_that_start_with_the_same_pair_are_told_apart(
    folder: Folder, plan: JobPlan
) -> None:
    """Both would write their shards into one folder: the second launcher must be turned away."""
    held = checkpoint.claim(folder, plan, FIRST)
    with pytest.raises(StaleError, match=r"another run .* as attempt\.generation 1\.1; wait"):
        checkpoint.claim(folder, plan, FIRST)
    assert save(folder, plan, held, 20).latest.checkpoints == [ref_of(20, FIRST)]


class Overtaken(Folder):
    """Another run of the same pair claims between this one's read of `latest` and its write."""

    rival: Claim | None = None

    def get(self, key: str) -> Blob | None:
        blob = super().get(key)
        if key == checkpoint.LATEST and self.rival is None:
            self.rival = checkpoint.claim(
                Folder(self.uri, StorageSpec()), plan_of(self.uri), SECOND
            )
        return blob


@pytest.mark.parametrize("is_new", [True, False], ids=["new run", "resumed"])
def test_of_two_claims_at_once_one_holds(folder: Folder, plan: JobPlan, is_new: bool) -> None:
    if not is_new:
        save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    slower = Overtaken(folder.uri, StorageSpec())
    with pytest.raises(StaleError, match="another run"):
        checkpoint.claim(slower, plan, SECOND)
    assert slower.rival is not None
    assert save(folder, plan, slower.rival, 40).latest.checkpoints[0] == ref_of(40, SECOND)


def test_a_commit_whose_answer_was_lost_does_not_make_its_writer_stale(
    folder: Folder, plan: JobPlan
) -> None:
    before = checkpoint.claim(folder, plan, FIRST)
    save(folder, plan, before, 20)  # moved `latest`, but the writer never heard of it
    after = save(folder, plan, before, 40)
    assert after.latest.checkpoints == [ref_of(40, FIRST), ref_of(20, FIRST)]


@pytest.mark.parametrize("file", ["rank-0.pt", checkpoint.DATA_STATE])
def test_c11_a_missing_part_is_fatal(folder: Folder, plan: JobPlan, file: str) -> None:
    """Loader state silently not saved or not restored must never pass."""
    save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    folder.delete([f"{ref_of(20, FIRST).folder}/{file}"])
    with pytest.raises(StorageError, match=rf"{file}: this part of the checkpoint is missing"):
        resumed_step(folder, plan, SECOND)


@pytest.mark.parametrize("file", ["rank-0.pt", checkpoint.DATA_STATE])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_part_is_refused(folder: Folder, plan: JobPlan, file: str, damage: str) -> None:
    save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    key = f"{ref_of(20, FIRST).folder}/{file}"
    blob = folder.get(key)
    assert blob is not None
    flipped = blob.data[:-1] + bytes([blob.data[-1] ^ 1])
    folder.put(key, flipped if damage == "flipped" else blob.data[:-1])
    with pytest.raises(StorageError, match=rf"{file}: this part of the checkpoint is damaged"):
        resumed_step(folder, plan, SECOND)


def test_an_object_no_rank_wrote_is_missing(folder: Folder, plan: JobPlan) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    manifest = checkpoint.read_manifest(folder, plan, held.latest)
    assert manifest is not None
    with pytest.raises(StorageError, match=r"rank-1\.pt: this part of the checkpoint is missing"):
        checkpoint.load_object(folder, manifest, "rank-1")


def test_another_jobs_folder_is_refused(folder: Folder, plan: JobPlan) -> None:
    save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    with pytest.raises(
        SpecError, match=r"checkpoint\.uri: .* of job 'stamps', not of 'other'; use"
    ):
        checkpoint.claim(folder, plan_of(folder.uri, name="other"), SECOND)
    assert resumed_step(folder, plan, SECOND) == 20


def test_another_layout_is_refused_with_both_values(folder: Folder, plan: JobPlan) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    with pytest.raises(SpecError, match=r"ranksPerNode: .* saved with 1, this job has 2"):
        checkpoint.read_manifest(folder, plan_of(folder.uri, nodes=2), held.latest)


def test_a_job_that_does_not_fit_leaves_the_run_to_its_holder(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    before = folder.get(checkpoint.LATEST)
    with pytest.raises(SpecError, match=r"ranksPerNode: .* saved with 1, this job has 2"):
        checkpoint.claim(folder, plan_of(folder.uri, nodes=2), SECOND)
    assert folder.get(checkpoint.LATEST) == before
    save(folder, plan, held, 40)


class SavedMeanwhile(Folder):
    """The holder saves and prunes between a claim's read of `latest` and of its manifest."""

    held: Claim | None = None

    def get(self, key: str) -> Blob | None:
        blob = super().get(key)
        if key == checkpoint.LATEST and self.held is not None:
            held, self.held = self.held, None
            other, plan = Folder(self.uri, StorageSpec()), plan_of(self.uri, keep=1)
            checkpoint.prune(other, save(other, plan, held, 40))
        return blob


def test_a_claim_goes_on_from_what_the_holder_saved_meanwhile(folder: Folder) -> None:
    plan = plan_of(folder.uri, keep=1)
    slower = SavedMeanwhile(folder.uri, StorageSpec())
    slower.held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    newer = checkpoint.claim(slower, plan, SECOND)
    assert newer.resume is not None and newer.resume.ref == ref_of(40, FIRST)


def test_a_pointer_that_is_no_pointer_is_refused(folder: Folder, plan: JobPlan) -> None:
    folder.put(checkpoint.LATEST, b'{"version": 2}')
    with pytest.raises(StorageError, match="latest: this is no latest file of version 1"):
        checkpoint.claim(folder, plan, FIRST)


def test_loading_runs_no_code(folder: Folder, plan: JobPlan) -> None:
    """A checkpoint is data: a pickle that calls something is refused, not run."""
    held = checkpoint.claim(folder, plan, FIRST)
    ref = ref_of(20, FIRST)
    buffer = io.BytesIO()
    torch.save(json.JSONEncoder(), buffer)
    checkpoint.write_rank(folder, ref, 0, {"rank-0": json.JSONEncoder()}, b"s")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    held = checkpoint.commit(folder, held, plan, ref, shards)
    manifest = checkpoint.read_manifest(folder, plan, held.latest)
    assert manifest is not None
    with pytest.raises(StorageError, match=r"rank-0\.pt: .*no tensors and plain values"):
        checkpoint.load_object(folder, manifest, "rank-0")


def test_prune_keeps_the_newest_and_clears_remains(folder: Folder, plan: JobPlan) -> None:
    held = checkpoint.claim(folder, plan, FIRST)
    for step in (20, 40, 60):
        held = save(folder, plan, held, step)
    checkpoint.write_rank(folder, ref_of(50, FIRST), 0, objects_of(50), b"never committed")
    checkpoint.write_rank(folder, ref_of(80, SECOND), 0, objects_of(80), b"a newer writer's")
    folder.put("step-notes/by-hand.txt", b"not ours")
    checkpoint.prune(folder, held)
    left = {key.rsplit("/", 1)[0] for key in folder.list("step-")}
    assert left == {
        ref_of(40, FIRST).folder, ref_of(60, FIRST).folder, ref_of(80, SECOND).folder,
        "step-notes",
    }  # fmt: skip
    assert resumed_step(folder, plan, SECOND) == 60


def test_after_a_restart_the_older_pairs_abandoned_step_is_cleared(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, checkpoint.claim(folder, plan, FIRST), 20)
    checkpoint.write_rank(folder, ref_of(40, FIRST), 0, objects_of(40), b"killed here")
    held = save(folder, plan, checkpoint.claim(folder, plan, SECOND), 40)
    checkpoint.prune(folder, held)
    left = {key.rsplit("/", 1)[0] for key in folder.list("step-")}
    assert left == {ref_of(20, FIRST).folder, ref_of(40, SECOND).folder}


def test_a_rank_that_could_not_write_is_named(folder: Folder) -> None:
    ref = ref_of(20, FIRST)
    checkpoint.write_rank(folder, ref, 0, objects_of(20), b"data state")
    checkpoint.write_failure(folder, ref, 1, "the object store is full")
    with pytest.raises(StorageError, match="rank 1: the object store is full"):
        checkpoint.wait_done(folder, ref, 2, patience_s=5, pause=no_pause)


def test_a_rank_that_writes_nothing_is_waited_for_only_so_long(folder: Folder) -> None:
    ref = ref_of(20, FIRST)
    checkpoint.write_rank(folder, ref, 0, objects_of(20), b"data state")
    pauses: list[float] = []
    with pytest.raises(StorageError, match=r"1 of 2 ranks wrote nothing .* done-1\.json"):
        checkpoint.wait_done(folder, ref, 2, patience_s=0, pause=pauses.append)
