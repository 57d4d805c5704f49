"""A one-rank checkpoint, saved and read back."""

from typing import Any

import torch

from omni_contract.plan import JobPlan
from omni_trainer import checkpoint, claims
from omni_trainer.checkpoint import CheckpointRef
from omni_trainer.claims import Claim, Resume
from omni_trainer.environment import Pair
from omni_trainer.storage import Folder

FIRST = Pair(attempt=1, generation=1)
SECOND = Pair(attempt=1, generation=2)
THIRD = Pair(attempt=1, generation=3)


def ref_of(step: int, number: int = 1) -> CheckpointRef:
    """A checkpoint of the first claim, or of another one."""
    return CheckpointRef(step=step, claim=number)


def objects_of(step: int) -> dict[str, Any]:
    return {"rank-0": {"weight": torch.full((4, 3), float(step)), "step": step}}


def no_pause(seconds: float) -> None:
    raise AssertionError("every rank has written")


def save(folder: Folder, plan: JobPlan, held: Claim, step: int) -> Claim:
    """Write and commit the checkpoint of a step."""
    ref = ref_of(step, held.latest.claim)
    checkpoint.write_rank(folder, ref, 0, objects_of(step), b"data state")
    shards = checkpoint.wait_done(folder, ref, 1, patience_s=5, pause=no_pause)
    return claims.commit(folder, held, plan, ref, shards)


def restored_step(folder: Folder, resume: Resume | None) -> int:
    """The step of a checkpoint that loads; 0 for the beginning."""
    if resume is None:
        return 0
    source, manifest = folder.beside(resume.uri), resume.manifest
    assert checkpoint.load_data_state(source, manifest).next_step == manifest.ref.step + 1
    loaded = checkpoint.load_object(source, manifest, "rank-0")
    assert torch.equal(loaded["weight"], objects_of(manifest.ref.step)["rank-0"]["weight"])
    return manifest.ref.step


def resumed_step(folder: Folder, plan: JobPlan, pair: Pair, uid: str | None = None) -> int:
    """Claim the run; the step it goes on from."""
    return restored_step(folder, claims.claim(folder, plan, pair, job_uid=uid).resume)
