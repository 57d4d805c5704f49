"""Who may write checkpoints of a run, and which of them count.

`latest` names the holder of the run and its committed checkpoints. `claim` rewrites it, which voids
the ETag that every older writer holds: their commit fails. The number of the claim grows by one
each time and names the folders of what is saved under it, so nothing saved is overwritten.

| the run's holder is | a claim by the same job | a claim by anybody else |
| --- | --- | --- |
| nobody | holds it | holds it |
| a job of a cluster, by its UID | with a greater pair: holds it; else stale | see below |
| a job of `omni run`, by its name | with a greater pair: holds it; else stale | see below |

The pair is (attempt, generation). Anybody else is a job of another UID (so of the same name, too,
where it was deleted and created anew), `omni run` where a cluster's job holds the run and the other
way round. It is refused, unless checkpoint.resumeFrom says that it takes the run over. A cluster's
job that has lost its run stays stale for good, or two jobs could take it from each other for ever.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omni_contract.errors import SpecError, StaleError, StorageError
from omni_contract.plan import JobPlan
from omni_trainer import checkpoint
from omni_trainer.checkpoint import CheckpointRef, Manifest, Shard, dump, parse
from omni_trainer.environment import Pair
from omni_trainer.storage import Folder

LATEST = "latest"
_TRIES = 20  # a claim loses a race only to another claim or commit


class Latest(checkpoint.Document):
    """Who holds the run, and its committed checkpoints, the newest first."""

    version: Literal[2] = 2
    job: str
    job_uid: str | None = None
    """UID of the job in its cluster; None: it was started by `omni run`."""
    attempt: int
    generation: int
    claim: int
    """Number of the claim, from 1."""
    holder: str = ""
    """Drawn anew by every claim: tells two apart that come with the same pair at the same time."""
    lost_by: list[str] = []
    """UIDs of jobs that the run was taken from."""
    checkpoints: list[CheckpointRef]

    @property
    def pair(self) -> Pair:
        """The pair that claimed it."""
        return Pair(attempt=self.attempt, generation=self.generation)

    @property
    def owner(self) -> str:
        """The job that holds it, in words."""
        if self.job_uid is None:
            return f"job {self.job!r} of omni run"
        return f"job {self.job!r} (UID {self.job_uid})"


class Resume(checkpoint.Document):
    """The checkpoint that a run goes on from."""

    uri: str
    """Folder of the run that saved it."""
    manifest: Manifest


class Start(checkpoint.Document):
    """What all ranks learn of the claim."""

    claim: int
    """Number of the claim."""
    resume: Resume | None
    """None: begin anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to move `latest`: it ends when somebody else rewrites it."""

    latest: Latest
    etag: str
    resume: Resume | None = None
    """What the run goes on from, as found when it was claimed; None: the beginning."""

    @property
    def start(self) -> Start:
        """What to tell all ranks."""
        return Start(claim=self.latest.claim, resume=self.resume)


def newest_attempt(folder: Folder, plan: JobPlan) -> int:
    """The attempt that holds the run, 0 where none ever did. `omni run` begins one above it.

    Raises SpecError where another job holds it and `plan` does not take it over.
    """
    folder.check_bucket()
    blob = folder.get(LATEST)
    if blob is None:
        return 0
    found = parse(Latest, folder, LATEST, blob.data)
    if not _is_ours(found, plan, job_uid=None):
        _check_takes_over(folder, found, plan)
    return found.attempt


def claim(folder: Folder, plan: JobPlan, pair: Pair, *, job_uid: str | None = None) -> Claim:
    """Make `pair` of a job the holder of the run. Rank 0 alone calls it, once a generation.

    Raises StaleError where this pair or a newer one holds it or the job has lost it, SpecError
    where it is another job's or the checkpoint to go on from does not fit, StorageError where that
    is gone. All of it before anything is written: a job that cannot go on must not end one that
    still runs.
    """
    folder.check_bucket()
    holder = secrets.token_hex(8)
    for _ in range(_TRIES):
        blob = folder.get(LATEST)
        found = None if blob is None else parse(Latest, folder, LATEST, blob.data)
        _check_right(folder, found, plan, pair, job_uid)
        try:
            resume = _find_resume(folder, found, plan)
        except StorageError:
            if folder.get(LATEST) == blob:
                raise
            continue  # its holder has saved and pruned since
        mine = Latest(
            job=plan.name,
            job_uid=job_uid,
            attempt=pair.attempt,
            generation=pair.generation,
            claim=1 + (_highest_claim(folder) if found is None else found.claim),
            holder=holder,
            lost_by=_losers(found, job_uid),
            checkpoints=[] if found is None else found.checkpoints,
        )
        if blob is None:
            etag = folder.put_if_absent(LATEST, dump(mine))
        else:
            etag = folder.put_if_match(LATEST, dump(mine), blob.etag)
        if etag is not None:
            return Claim(latest=mine, etag=etag, resume=resume)
    raise StorageError(f"{folder.uri}/{LATEST}: it changed {_TRIES} times during one claim")


def _is_ours(found: Latest, plan: JobPlan, *, job_uid: str | None) -> bool:
    return found.job_uid == job_uid and found.job == plan.name


def _check_right(
    folder: Folder, found: Latest | None, plan: JobPlan, pair: Pair, job_uid: str | None
) -> None:
    """Raise unless the table above lets this pair hold the run."""
    spec = plan.spec.checkpoint
    if found is None:
        if spec.resume_from == spec.uri:
            raise SpecError(
                "checkpoint.resumeFrom",
                f"{folder.uri} holds no run to go on from; correct it, or leave it out to begin "
                "anew",
            )
        return
    if not _is_ours(found, plan, job_uid=job_uid):
        if job_uid in found.lost_by:
            raise StaleError(f"{folder.uri}: {found.owner} has taken this run over, {pair} ends")
        _check_takes_over(folder, found, plan)
    elif found.pair > pair:
        raise StaleError(
            f"{folder.uri}: attempt.generation {found.pair} holds this run, {pair} is stale and "
            "ends here"
        )
    elif found.pair == pair:
        raise StaleError(
            f"{folder.uri}: another run of job {plan.name!r} holds this folder as "
            f"attempt.generation {pair}; wait for its end, or use another checkpoint.uri"
        )


def _check_takes_over(folder: Folder, found: Latest, plan: JobPlan) -> None:
    spec = plan.spec.checkpoint
    if spec.resume_from != spec.uri:
        raise SpecError(
            "checkpoint.uri",
            f"{folder.uri} is held by {found.owner}; to take its run over write "
            f"checkpoint.resumeFrom: {spec.uri} (that job can then save no more), to begin anew "
            "use another checkpoint.uri",
        )


def _losers(found: Latest | None, job_uid: str | None) -> list[str]:
    """UIDs of jobs that have lost the run once this one holds it."""
    if found is None:
        return []
    before = [] if found.job_uid in (None, job_uid) else [found.job_uid]
    return [*found.lost_by, *before]


def _find_resume(folder: Folder, found: Latest | None, plan: JobPlan) -> Resume | None:
    """The newest checkpoint of the run; without one, that of the run to resume from."""
    spec = plan.spec.checkpoint
    if found is not None and found.checkpoints:
        manifest = checkpoint.read_manifest(folder, plan, found.checkpoints[0])
        return Resume(uri=folder.uri, manifest=manifest)
    if spec.resume_from is None or spec.resume_from == spec.uri:
        return None
    source = folder.beside(spec.resume_from)
    source.check_bucket()
    for _ in range(_TRIES):
        blob = source.get(LATEST)
        theirs = None if blob is None else parse(Latest, source, LATEST, blob.data)
        if theirs is None or not theirs.checkpoints:
            raise SpecError(
                "checkpoint.resumeFrom",
                f"{source.uri} holds no checkpoint; correct it, or leave it out to begin anew",
            )
        try:
            manifest = checkpoint.read_manifest(source, plan, theirs.checkpoints[0])
        except StorageError:
            if source.get(LATEST) == blob:
                raise
        else:
            return Resume(uri=source.uri, manifest=manifest)
    raise StorageError(f"{source.uri}/{LATEST}: it changed {_TRIES} times while it was read")


def _highest_claim(folder: Folder) -> int:
    """Of folders left by a run whose `latest` was deleted; 0 where there are none."""
    refs = (CheckpointRef.of_key(key) for key in folder.list("step-"))
    return max((ref.claim for ref in refs if ref is not None), default=0)


def commit(
    folder: Folder,
    held: Claim,
    plan: JobPlan,
    ref: CheckpointRef,
    shards: Mapping[str, Shard],
) -> Claim:
    """Make a written checkpoint count: its manifest, then `latest`. The claim goes on.

    Raises StaleError where somebody else has claimed the run; `latest` is then left alone.
    """
    if not checkpoint.write_manifest(folder, plan, ref, shards):
        held = _renewed(folder, held)  # raises where a newer claim is the reason
        raise StorageError(f"{folder.uri}/{ref.folder}: this step was saved before")
    for _ in range(2):
        older = [known for known in held.latest.checkpoints if known != ref]
        kept = [ref, *older][: plan.spec.checkpoint.keep]
        latest = held.latest.model_copy(update={"checkpoints": kept})
        etag = folder.put_if_match(LATEST, dump(latest), held.etag)
        if etag is not None:
            return Claim(latest=latest, etag=etag)
        held = _renewed(folder, held)
    raise StorageError(f"{folder.uri}/{LATEST}: it changes while this claim holds it")


def _renewed(folder: Folder, held: Claim) -> Claim:
    """The claim, if it is still ours: a commit whose answer was lost has moved the ETag itself."""
    blob = folder.get(LATEST)
    found = None if blob is None else parse(Latest, folder, LATEST, blob.data)
    if blob is None or found is None or found.holder != held.latest.holder:
        pair = held.latest.pair
        who = "nobody"
        if found is not None:
            is_ours = (found.job, found.job_uid) == (held.latest.job, held.latest.job_uid)
            who = f"attempt.generation {found.pair}" if is_ours else found.owner
        raise StaleError(
            f"{folder.uri}/{LATEST}: {who} holds this run now, {pair} is stale and ends here"
        )
    return Claim(latest=found, etag=blob.etag)


def prune(folder: Folder, held: Claim) -> int:
    """Delete what `latest` no longer keeps and no newer claim can be writing; number of objects.

    The holder calls it after a commit: that leaves the folders of its own step before, of older
    claims, and remains of saves that never counted.
    """
    newest = held.latest.checkpoints[0]
    kept = {ref.folder for ref in held.latest.checkpoints}
    doomed = [
        key
        for key in folder.list("step-")
        if (ref := CheckpointRef.of_key(key)) is not None
        and ref.folder not in kept
        and _is_past(ref, newest, held.latest.claim)
    ]
    # Manifests first: a folder cut down halfway must not look whole.
    doomed.sort(key=lambda key: not key.endswith(f"/{checkpoint.MANIFEST}"))
    folder.delete(doomed)
    return len(doomed)


def _is_past(ref: CheckpointRef, newest: CheckpointRef, number: int) -> bool:
    return ref.claim < number or (ref.claim == number and ref.step < newest.step)
