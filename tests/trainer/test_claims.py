"""The commit protocol against a real S3 server: who may write, and what counts."""

import pytest

from omni_contract.errors import SpecError, StaleError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.spec_data import StorageSpec
from omni_trainer import checkpoint, claims
from omni_trainer.claims import Claim
from omni_trainer.environment import Pair
from omni_trainer.storage import Blob, Folder
from tests.trainer.plans import plan_of
from tests.trainer.saves import (
    FIRST,
    SECOND,
    THIRD,
    objects_of,
    ref_of,
    restored_step,
    resumed_step,
    save,
)


@pytest.fixture
def folder(bucket: str) -> Folder:
    return Folder(f"{bucket}/run", StorageSpec())


@pytest.fixture
def plan(folder: Folder) -> JobPlan:
    return plan_of(folder.uri)


def test_a_new_run_has_nothing_to_resume(folder: Folder, plan: JobPlan) -> None:
    assert claims.newest_attempt(folder, plan) == 0
    assert resumed_step(folder, plan, FIRST) == 0
    assert claims.newest_attempt(folder, plan) == 1


def test_c51_killed_between_objects_and_manifest_the_older_checkpoint_counts(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    checkpoint.write_rank(folder, ref_of(40), 0, objects_of(40), b"data state")
    assert resumed_step(folder, plan, SECOND) == 20
    assert held.latest.checkpoints == [ref_of(20)]


def test_c51_killed_between_manifest_and_latest_the_older_checkpoint_counts(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    newer = claims.claim(folder, plan, SECOND)  # the kill, seen from outside
    with pytest.raises(StaleError):
        save(folder, plan, held, 40)
    assert f"{ref_of(40).folder}/{checkpoint.MANIFEST}" in folder.list("step-")
    assert newer.latest.checkpoints == [ref_of(20)]
    assert resumed_step(folder, plan, THIRD) == 20


def test_c51_latest_names_a_checkpoint_without_manifest(folder: Folder, plan: JobPlan) -> None:
    save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    folder.delete([f"{ref_of(20).folder}/{checkpoint.MANIFEST}"])
    with pytest.raises(StorageError, match="was committed but it is gone; restore it"):
        resumed_step(folder, plan, SECOND)


def test_a_stale_writer_neither_claims_nor_moves_latest(folder: Folder, plan: JobPlan) -> None:
    old = claims.claim(folder, plan, FIRST)
    new = save(folder, plan, claims.claim(folder, plan, SECOND), 60)
    with pytest.raises(StaleError, match=r"1\.1 is stale"):
        save(folder, plan, old, 80)
    with pytest.raises(StaleError, match=r"1\.2 holds this run, 1\.1 is stale"):
        claims.claim(folder, plan, FIRST)
    assert save(folder, plan, new, 80).latest.checkpoints[0] == ref_of(80, 2)


def test_two_runs_that_start_with_the_same_pair_are_told_apart(
    folder: Folder, plan: JobPlan
) -> None:
    """Both would write their shards into one folder: the second launcher must be turned away."""
    held = claims.claim(folder, plan, FIRST)
    with pytest.raises(StaleError, match=r"another run .* as attempt\.generation 1\.1; wait"):
        claims.claim(folder, plan, FIRST)
    assert save(folder, plan, held, 20).latest.checkpoints == [ref_of(20)]


class Overtaken(Folder):
    """Another run of the same pair claims between this one's read of `latest` and its write."""

    rival: Claim | None = None

    def get(self, key: str) -> Blob | None:
        blob = super().get(key)
        if key == claims.LATEST and self.rival is None:
            self.rival = claims.claim(Folder(self.uri, StorageSpec()), plan_of(self.uri), SECOND)
        return blob


@pytest.mark.parametrize("is_new", [True, False], ids=["new run", "resumed"])
def test_of_two_claims_at_once_one_holds(folder: Folder, plan: JobPlan, is_new: bool) -> None:
    if not is_new:
        save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    slower = Overtaken(folder.uri, StorageSpec())
    with pytest.raises(StaleError, match="another run"):
        claims.claim(slower, plan, SECOND)
    assert slower.rival is not None
    number = 1 if is_new else 2
    assert save(folder, plan, slower.rival, 40).latest.checkpoints[0] == ref_of(40, number)


def test_a_commit_whose_answer_was_lost_does_not_make_its_writer_stale(
    folder: Folder, plan: JobPlan
) -> None:
    before = claims.claim(folder, plan, FIRST)
    save(folder, plan, before, 20)  # moved `latest`, but the writer never heard of it
    after = save(folder, plan, before, 40)
    assert after.latest.checkpoints == [ref_of(40), ref_of(20)]


def test_a_job_that_does_not_fit_leaves_the_run_to_its_holder(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    before = folder.get(claims.LATEST)
    with pytest.raises(SpecError, match=r"train\.seed: .* saved with 1, this job has 2"):
        claims.claim(folder, plan_of(folder.uri, seed=2), SECOND)
    assert folder.get(claims.LATEST) == before
    save(folder, plan, held, 40)


class SavedMeanwhile(Folder):
    """The holder saves and prunes between a claim's read of `latest` and of its manifest."""

    held: Claim | None = None

    def get(self, key: str) -> Blob | None:
        blob = super().get(key)
        if key == claims.LATEST and self.held is not None:
            held, self.held = self.held, None
            other, plan = Folder(self.uri, StorageSpec()), plan_of(self.uri, keep=1)
            claims.prune(other, save(other, plan, held, 40))
        return blob


def test_a_claim_goes_on_from_what_the_holder_saved_meanwhile(folder: Folder) -> None:
    plan = plan_of(folder.uri, keep=1)
    slower = SavedMeanwhile(folder.uri, StorageSpec())
    slower.held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    newer = claims.claim(slower, plan, SECOND)
    assert newer.resume is not None and newer.resume.manifest.ref == ref_of(40)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (b'{"version": 2}', "latest: this is no latest file of version 2"),
        (
            b'{"version": 1, "job": "stamps", "attempt": 3, "generation": 0, "checkpoints": []}',
            "latest: this is of version 1, and this release reads 2; go on with the release",
        ),
    ],
)
def test_a_pointer_that_is_no_pointer_is_refused(
    folder: Folder, plan: JobPlan, found: bytes, says: str
) -> None:
    folder.put(claims.LATEST, found)
    with pytest.raises(StorageError, match=says):
        claims.claim(folder, plan, FIRST)


def test_prune_keeps_the_newest_and_clears_remains(folder: Folder, plan: JobPlan) -> None:
    held = claims.claim(folder, plan, FIRST)
    for step in (20, 40, 60):
        held = save(folder, plan, held, step)
    checkpoint.write_rank(folder, ref_of(50), 0, objects_of(50), b"never committed")
    checkpoint.write_rank(folder, ref_of(80, 2), 0, objects_of(80), b"a newer writer's")
    folder.put("step-notes/by-hand.txt", b"not ours")
    claims.prune(folder, held)
    left = {key.rsplit("/", 1)[0] for key in folder.list("step-")}
    assert left == {
        ref_of(40).folder, ref_of(60).folder, ref_of(80, 2).folder,
        "step-notes",
    }  # fmt: skip
    assert resumed_step(folder, plan, SECOND) == 60


def test_after_a_restart_the_older_pairs_abandoned_step_is_cleared(
    folder: Folder, plan: JobPlan
) -> None:
    held = save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    checkpoint.write_rank(folder, ref_of(40), 0, objects_of(40), b"killed here")
    held = save(folder, plan, claims.claim(folder, plan, SECOND), 40)
    claims.prune(folder, held)
    left = {key.rsplit("/", 1)[0] for key in folder.list("step-")}
    assert left == {ref_of(20).folder, ref_of(40, 2).folder}


ANN, BEN = "a1-uid", "b2-uid"
OMNI_RUN = None
LATER = Pair(attempt=7, generation=0)


def taking(uri: str, source: str | None = None, *, name: str = "stamps") -> JobPlan:
    """The plan with resumeFrom, left to itself that of the same folder."""
    return plan_of(uri, name=name, resumeFrom=source or uri)


HOLDERS = pytest.mark.parametrize(
    ("holder", "name", "uid"),
    [(ANN, "stamps", BEN), (ANN, "stamps", OMNI_RUN), (OMNI_RUN, "stamps", BEN),
     (OMNI_RUN, "other", OMNI_RUN), (ANN, "other", BEN)],
    ids=["created anew", "run by hand", "brought to a cluster", "another by hand", "another job"],
)  # fmt: skip


@HOLDERS
@pytest.mark.parametrize("pair", [FIRST, LATER], ids=str)
def test_anybody_elses_run_is_refused(
    folder: Folder, plan: JobPlan, holder: str | None, name: str, uid: str | None, pair: Pair
) -> None:
    held = save(folder, plan, claims.claim(folder, plan, SECOND, job_uid=holder), 20)
    before = folder.get(claims.LATEST)
    who = "of omni run" if holder is None else rf"\(UID {holder}\)"
    says = rf"checkpoint\.uri: .* is held by job 'stamps' {who}; .*resumeFrom: {folder.uri} "
    with pytest.raises(SpecError, match=says):
        claims.claim(folder, plan_of(folder.uri, name=name), pair, job_uid=uid)
    with pytest.raises(SpecError, match=says):
        elsewhere = taking(folder.uri, f"{folder.uri}/other", name=name)
        claims.claim(folder, elsewhere, pair, job_uid=uid)
    assert folder.get(claims.LATEST) == before
    save(folder, plan, held, 40)


@HOLDERS
@pytest.mark.parametrize("pair", [FIRST, LATER], ids=str)
def test_resume_from_takes_a_run_over_and_the_older_writer_commits_no_more(
    folder: Folder, plan: JobPlan, holder: str | None, name: str, uid: str | None, pair: Pair
) -> None:
    old = save(folder, plan, claims.claim(folder, plan, SECOND, job_uid=holder), 20)
    plan_of_new = taking(folder.uri, name=name)
    new = claims.claim(folder, plan_of_new, pair, job_uid=uid)
    assert restored_step(folder, new.resume) == 20
    with pytest.raises(StaleError, match=rf"latest: job '{name}' .* holds this run now"):
        save(folder, plan, old, 40)
    assert save(folder, plan_of_new, new, 40).latest.checkpoints == [ref_of(40, 2), ref_of(20, 1)]


def test_two_jobs_do_not_take_a_run_from_each_other_for_ever(folder: Folder) -> None:
    """Both say resumeFrom, and the one that was taken over is restarted by its operator."""
    plan = taking(folder.uri)
    claims.claim(folder, plan_of(folder.uri), FIRST, job_uid=ANN)
    held = claims.claim(folder, plan, FIRST, job_uid=BEN)
    with pytest.raises(StaleError, match=rf"\(UID {BEN}\) has taken this run over, 7\.0 ends"):
        claims.claim(folder, plan, LATER, job_uid=ANN)
    save(folder, plan, held, 20)
    assert resumed_step(folder, plan, FIRST) == 20  # by hand, from both
    for uid in (ANN, BEN):
        with pytest.raises(StaleError, match="of omni run has taken this run over"):
            claims.claim(folder, plan, LATER, job_uid=uid)


@pytest.mark.parametrize("uid", [ANN, OMNI_RUN])
def test_of_one_job_the_greater_pair_holds(folder: Folder, plan: JobPlan, uid: str | None) -> None:
    first = save(folder, plan, claims.claim(folder, plan, FIRST, job_uid=uid), 20)
    second = claims.claim(folder, plan, SECOND, job_uid=uid)
    for stale in (FIRST, SECOND):
        with pytest.raises(StaleError):
            claims.claim(folder, taking(folder.uri), stale, job_uid=uid)
    with pytest.raises(StaleError, match=r"attempt\.generation 1\.2 holds this run now"):
        save(folder, plan, first, 40)
    save(folder, plan, second, 40)
    assert resumed_step(folder, plan, LATER, uid) == 40


def test_the_number_of_a_claim_grows_whoever_makes_it(folder: Folder, plan: JobPlan) -> None:
    takes = taking(folder.uri)
    made = [
        claims.claim(folder, plan, LATER, job_uid=ANN),
        claims.claim(folder, takes, FIRST, job_uid=BEN),
        claims.claim(folder, takes, SECOND, job_uid=BEN),
        claims.claim(folder, takes, FIRST),
    ]
    assert [held.latest.claim for held in made] == [1, 2, 3, 4]
    save(folder, takes, made[-1], 20)
    folder.delete([claims.LATEST])  # as an error tells the user to
    held = claims.claim(folder, plan, FIRST)
    assert held.latest.claim == 5  # or it would meet objects that are there
    assert save(folder, plan, held, 20).latest.checkpoints == [ref_of(20, 5)]


def test_omni_run_started_again_goes_on(folder: Folder, plan: JobPlan) -> None:
    for attempt, step in ((1, 0), (2, 20), (3, 40)):
        assert claims.newest_attempt(folder, plan) == attempt - 1
        held = claims.claim(folder, plan, Pair(attempt=attempt, generation=0))
        assert restored_step(folder, held.resume) == step
        save(folder, plan, held, step + 20)


def test_omni_run_is_refused_before_it_starts_anything(folder: Folder, plan: JobPlan) -> None:
    claims.claim(folder, plan, LATER, job_uid=ANN)
    with pytest.raises(SpecError, match=r"checkpoint\.resumeFrom"):
        claims.newest_attempt(folder, plan)
    assert claims.newest_attempt(folder, taking(folder.uri)) == 7


def test_a_run_begins_where_another_one_is_and_goes_on_by_itself(
    folder: Folder, plan: JobPlan
) -> None:
    theirs = save(folder, plan, claims.claim(folder, plan, LATER, job_uid=ANN), 20)
    branch = folder.beside(f"{folder.uri}-branch")
    ours = taking(branch.uri, folder.uri)
    assert resumed_step(branch, ours, FIRST, BEN) == 20
    theirs = save(folder, plan, theirs, 40)  # its own holder is not disturbed
    held = claims.claim(branch, ours, SECOND, job_uid=BEN)  # nothing was saved here
    assert restored_step(branch, held.resume) == 40
    save(branch, ours, held, 60)
    save(folder, plan, theirs, 80)
    assert resumed_step(branch, ours, THIRD, BEN) == 60


def test_a_branch_follows_the_rules_of_a_resume(folder: Folder, plan: JobPlan) -> None:
    save(folder, plan, claims.claim(folder, plan, FIRST), 20)
    branch = folder.beside(f"{folder.uri}-branch")
    other = plan_of(branch.uri, seed=2, resumeFrom=folder.uri)
    with pytest.raises(SpecError, match=r"train\.seed: .* saved with 1, this job has 2"):
        claims.claim(branch, other, FIRST)
    assert branch.get(claims.LATEST) is None


@pytest.mark.parametrize("is_claimed", [False, True])
def test_resume_from_a_folder_without_a_checkpoint_is_refused(
    folder: Folder, plan: JobPlan, is_claimed: bool
) -> None:
    """A slip of the pen must not begin a training anew."""
    if is_claimed:
        claims.claim(folder, plan, FIRST)
    branch = folder.beside(f"{folder.uri}-branch")
    with pytest.raises(SpecError, match=r"checkpoint\.resumeFrom: .* holds no checkpoint; correct"):
        claims.claim(branch, taking(branch.uri, folder.uri), FIRST)
    with pytest.raises(SpecError, match=r"checkpoint\.resumeFrom: .* holds no run to go on from"):
        claims.claim(branch, taking(branch.uri), FIRST)
