"""What a checkpoint is, who may write one, and when it counts.

    {checkpoint.uri}/latest                                     the only way in: resume follows it
    {checkpoint.uri}/step-00000020/{attempt}.{generation}/*.pt  objects of the ranks
                                                  data-state.bin  where the data goes on
                                                  done-{rank}.json  what a rank wrote
                                                  manifest.json   written last: all of it is there

Every pair (attempt, generation) writes into folders of its own, so nothing saved is overwritten.
`claim` rewrites `latest`, which voids the ETag that older writers hold: their commit fails.
"""

import hashlib
import io
import pickle
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_contract.errors import SpecError, StaleError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.wire import LoaderState
from omni_trainer.environment import Pair
from omni_trainer.storage import Folder

LATEST = "latest"
MANIFEST = "manifest.json"
DATA_STATE = "data-state.bin"
_CLAIM_TRIES = 20  # a claim loses a race only to another claim or commit


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Model):
    """One object of a checkpoint as written."""

    num_bytes: int
    sha256: str


class Done(_Model):
    """What one rank wrote of a checkpoint, or why it could not."""

    version: Literal[1] = 1
    rank: int
    shards: dict[str, Shard]
    error: str | None = None


class CheckpointRef(_Model):
    """Names a checkpoint."""

    step: int
    attempt: int
    generation: int

    @property
    def folder(self) -> str:
        """Where its objects lie, without a slash at the end."""
        return f"step-{self.step:08d}/{self.attempt}.{self.generation}"


class Manifest(_Model):
    """A whole checkpoint. It is there only when every object it names is."""

    version: Literal[1] = 1
    job: str
    ref: CheckpointRef
    fingerprint: dict[str, str]
    """Fields of the job that must be the same to resume, see `fingerprint`."""
    shards: dict[str, Shard]
    """Objects by file name."""


class Latest(_Model):
    """Who holds the run, and its committed checkpoints, the newest first."""

    version: Literal[1] = 1
    job: str
    attempt: int
    generation: int
    holder: str = ""
    """Drawn anew by every claim: tells two apart that come with the same pair."""
    checkpoints: list[CheckpointRef]

    @property
    def pair(self) -> Pair:
        """The holder."""
        return Pair(attempt=self.attempt, generation=self.generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to move `latest`: it ends when somebody else rewrites it."""

    latest: Latest
    etag: str
    resume: Manifest | None = None
    """What the run goes on from, as found when it was claimed; None: the beginning."""


_D = TypeVar("_D", bound=_Model)


def _parse(model: type[_D], folder: Folder, key: str, data: bytes) -> _D:
    try:
        return model.model_validate_json(data)
    except ValidationError as exc:
        raise StorageError(
            f"{folder.uri}/{key}: this is no {model.__name__.lower()} file of version 1 "
            f"({exc.error_count()} wrong fields); use another checkpoint.uri or restore the file"
        ) from None


def _dump(document: _Model) -> bytes:
    return document.model_dump_json().encode()


def fingerprint(plan: JobPlan) -> dict[str, str]:
    """The fields of a job that a checkpoint depends on, as typed in the job file."""
    spec = plan.spec
    fields: dict[str, str] = {}
    _flatten(spec.model.model_dump(mode="json", by_alias=True), "model", fields)
    for field in list(fields):
        # Where weights and tokenizer come from may move, and a learning rate may change.
        if field.rsplit(".", 1)[1] in ("weights", "tokenizer", "learningRateScale"):
            del fields[field]
    fields["batch.sequenceTokens"] = str(spec.batch.sequence_tokens)
    fields["batch.globalSequences"] = str(spec.batch.global_sequences)
    fields["train.precision"] = spec.train.precision
    fields["train.seed"] = str(spec.train.seed)
    fields["parallelism.llm.pipeline"] = str(plan.layout.pp_size)
    fields["parallelism.encoders.zero"] = str(spec.parallelism.encoders.zero)
    fields["resources.nodes x resources.ranksPerNode"] = str(plan.layout.world_size)
    fields["data.sources"] = ", ".join(sorted(spec.data.sources))
    return fields


def _flatten(value: Any, path: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}", into)
    else:
        into[path] = str(value)


def newest_attempt(folder: Folder) -> int:
    """The attempt that holds the run, 0 where none ever did. A launcher begins one above it."""
    folder.check_bucket()
    blob = folder.get(LATEST)
    return 0 if blob is None else _parse(Latest, folder, LATEST, blob.data).attempt


def claim(folder: Folder, plan: JobPlan, pair: Pair) -> Claim:
    """Make `pair` the holder of the run. Rank 0 alone calls it, once a generation.

    Raises StaleError where this pair or a newer one holds it, SpecError where the folder is
    another job's or its newest checkpoint does not fit, StorageError where that is gone. All of it
    before anything is written: a job that cannot go on must not end one that still runs.
    """
    job = plan.name
    folder.check_bucket()
    holder = secrets.token_hex(8)
    for _ in range(_CLAIM_TRIES):
        blob = folder.get(LATEST)
        if blob is None:
            first = Latest(
                job=job,
                attempt=pair.attempt,
                generation=pair.generation,
                holder=holder,
                checkpoints=[],
            )
            etag = folder.put_if_absent(LATEST, _dump(first))
            if etag is not None:
                return Claim(latest=first, etag=etag)
            continue
        found = _parse(Latest, folder, LATEST, blob.data)
        if found.job != job:
            raise SpecError(
                "checkpoint.uri",
                f"{folder.uri} holds the checkpoints of job {found.job!r}, not of {job!r}; "
                "use another folder",
            )
        if found.pair > pair:
            raise StaleError(_stale(folder, found.pair, pair))
        if found.pair == pair:  # both would write into the same folders
            raise StaleError(
                f"{folder.uri}: another run of job {job!r} holds this folder as "
                f"attempt.generation {pair}; wait for its end, or use another checkpoint.uri"
            )
        try:
            resume = read_manifest(folder, plan, found)
        except StorageError:
            if folder.get(LATEST) == blob:
                raise
            continue  # its holder has saved and pruned since
        mine = found.model_copy(
            update={"attempt": pair.attempt, "generation": pair.generation, "holder": holder}
        )
        etag = folder.put_if_match(LATEST, _dump(mine), blob.etag)
        if etag is not None:
            return Claim(latest=mine, etag=etag, resume=resume)
    raise StorageError(f"{folder.uri}/{LATEST}: it changed {_CLAIM_TRIES} times during one claim")


def _stale(folder: Folder, holder: Pair, pair: Pair) -> str:
    return (
        f"{folder.uri}: attempt.generation {holder} holds this run, {pair} is stale and ends here"
    )


def read_manifest(folder: Folder, plan: JobPlan, latest: Latest) -> Manifest | None:
    """The checkpoint to resume from; None: there is none yet. Raises where it does not fit."""
    if not latest.checkpoints:
        return None
    key = f"{latest.checkpoints[0].folder}/{MANIFEST}"
    blob = folder.get(key)
    if blob is None:
        raise StorageError(
            f"{folder.uri}/{key}: {LATEST} names this checkpoint but it is gone; restore it, or "
            f"delete {folder.uri}/{LATEST} to start from the beginning"
        )
    manifest = _parse(Manifest, folder, key, blob.data)
    mine = fingerprint(plan)
    problems = [
        (
            field,
            f"the checkpoint {folder.uri}/{manifest.ref.folder} was saved with "
            f"{manifest.fingerprint.get(field, 'no such field')}, this job has "
            f"{mine.get(field, 'no such field')}; use the same or another checkpoint.uri",
        )
        for field in sorted({*mine, *manifest.fingerprint})
        if mine.get(field) != manifest.fingerprint.get(field)
    ]
    if problems:
        raise SpecError(*problems[0], *problems[1:])
    return manifest


def _read_shard(folder: Folder, manifest: Manifest, file: str) -> bytes:
    key = f"{manifest.ref.folder}/{file}"
    shard = manifest.shards.get(file)
    blob = folder.get(key) if shard is not None else None
    if shard is None or blob is None:
        raise StorageError(
            f"{folder.uri}/{key}: this part of the checkpoint is missing; restore it, or point "
            f"{folder.uri}/{LATEST} at an older checkpoint"
        )
    if len(blob.data) != shard.num_bytes or _sha256(blob.data) != shard.sha256:
        raise StorageError(
            f"{folder.uri}/{key}: this part of the checkpoint is damaged ({len(blob.data)} bytes, "
            f"{shard.num_bytes} were saved, or another checksum); restore it, or point "
            f"{folder.uri}/{LATEST} at an older checkpoint"
        )
    return blob.data


def load_object(folder: Folder, manifest: Manifest, name: str) -> Any:
    """An object of a rank, as it was saved. Raises StorageError where it is missing or damaged."""
    import torch  # late: the launcher reads `latest` and has no need of it

    data = _read_shard(folder, manifest, f"{name}.pt")
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise StorageError(
            f"{folder.uri}/{manifest.ref.folder}/{name}.pt: this holds more than torch's "
            "weights_only loading allows: no tensors and plain values; it is not loaded"
        ) from None


def load_data_state(folder: Folder, manifest: Manifest) -> LoaderState:
    """The data state of a checkpoint. Raises StorageError where it is missing or damaged."""
    blob = _read_shard(folder, manifest, DATA_STATE)
    return LoaderState(next_step=manifest.ref.step + 1, blob=blob)


def write_rank(
    folder: Folder,
    ref: CheckpointRef,
    rank: int,
    objects: Mapping[str, Any],
    data_state: bytes | None,
) -> None:
    """Write the objects of one rank, then its done file. `data_state`: on rank 0 only."""
    import torch  # late: the launcher reads `latest` and has no need of it

    shards: dict[str, Shard] = {}
    for name, value in objects.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        shards[f"{name}.pt"] = _write(folder, f"{ref.folder}/{name}.pt", buffer.getvalue())
    if data_state is not None:
        shards[DATA_STATE] = _write(folder, f"{ref.folder}/{DATA_STATE}", data_state)
    folder.put(_done_key(ref, rank), _dump(Done(rank=rank, shards=shards)))


def write_failure(folder: Folder, ref: CheckpointRef, rank: int, error: str) -> None:
    """Say that a rank cannot write its part, so that rank 0 need not wait for it."""
    folder.put(_done_key(ref, rank), _dump(Done(rank=rank, shards={}, error=error)))


def _done_key(ref: CheckpointRef, rank: int) -> str:
    return f"{ref.folder}/done-{rank}.json"


def _write(folder: Folder, key: str, data: bytes) -> Shard:
    folder.put(key, data)
    return Shard(num_bytes=len(data), sha256=_sha256(data))


def wait_done(
    folder: Folder,
    ref: CheckpointRef,
    world_size: int,
    *,
    patience_s: float,
    pause: Callable[[float], None],
) -> dict[str, Shard]:
    """All objects of a checkpoint, once every rank has written its own.

    Raises StorageError where a rank failed, or nothing new appeared for `patience_s`. `pause`
    sleeps, and may raise to give up.
    """
    wanted = {_done_key(ref, rank) for rank in range(world_size)}
    seen, changed_s, wait_s = -1, time.monotonic(), 0.05
    while True:
        sizes = folder.list(f"{ref.folder}/")
        missing = wanted - sizes.keys()
        if not missing:
            break
        if len(sizes) != seen:
            seen, changed_s = len(sizes), time.monotonic()
        if time.monotonic() - changed_s > patience_s:
            raise StorageError(
                f"{folder.uri}/{ref.folder}: {len(missing)} of {world_size} ranks wrote nothing "
                f"more for {patience_s:.0f} s, among them {min(missing).rsplit('/', 1)[1]}"
            )
        pause(wait_s)
        wait_s = min(2 * wait_s, 1.0)
    shards: dict[str, Shard] = {}
    for rank in range(world_size):
        key = _done_key(ref, rank)
        blob = folder.get(key)
        done = _parse(Done, folder, key, b"" if blob is None else blob.data)
        if done.error is not None:
            raise StorageError(f"rank {rank}: {done.error}")
        twice = shards.keys() & done.shards.keys()
        assert not twice, f"two ranks wrote {twice}"
        shards.update(done.shards)
    for file, shard in shards.items():
        size = sizes.get(f"{ref.folder}/{file}")
        if size != shard.num_bytes:
            raise StorageError(
                f"{folder.uri}/{ref.folder}/{file}: the store holds {size} bytes, "
                f"{shard.num_bytes} were written"
            )
    return shards


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
    assert DATA_STATE in shards, "a checkpoint without data state cannot be resumed"
    manifest = Manifest(job=plan.name, ref=ref, fingerprint=fingerprint(plan), shards=dict(shards))
    if folder.put_if_absent(f"{ref.folder}/{MANIFEST}", _dump(manifest)) is None:
        raise _lost(folder, held.latest.pair)
    for _ in range(2):
        older = [known for known in held.latest.checkpoints if known != ref]
        kept = [ref, *older][: plan.spec.checkpoint.keep]
        latest = held.latest.model_copy(update={"checkpoints": kept})
        etag = folder.put_if_match(LATEST, _dump(latest), held.etag)
        if etag is not None:
            return Claim(latest=latest, etag=etag)
        held = _renewed(folder, held)
    raise _lost(folder, held.latest.pair)


def _renewed(folder: Folder, held: Claim) -> Claim:
    """The claim, if it is still ours: a commit whose answer was lost has moved the ETag itself."""
    blob = folder.get(LATEST)
    found = None if blob is None else _parse(Latest, folder, LATEST, blob.data)
    if blob is None or found is None or found.holder != held.latest.holder:
        raise _lost(folder, held.latest.pair)
    return Claim(latest=found, etag=blob.etag)


def _lost(folder: Folder, pair: Pair) -> StaleError:
    return StaleError(
        f"{folder.uri}/{LATEST}: a newer attempt.generation holds this run, {pair} is stale and "
        "ends here"
    )


def prune(folder: Folder, held: Claim) -> int:
    """Delete what `latest` no longer keeps and no newer pair can be writing; number of objects.

    The holder calls it after a commit: that leaves the folders of its own step before, of older
    pairs, and remains of saves that never counted.
    """
    newest = held.latest.checkpoints[0]
    kept = {ref.folder for ref in held.latest.checkpoints}
    doomed = [
        key
        for key in folder.list("step-")
        if (ref := _ref_of(key)) is not None
        and ref.folder not in kept
        and _is_past(ref, newest, held.latest.pair)
    ]
    # Manifests first: a folder cut down halfway must not look whole.
    doomed.sort(key=lambda key: not key.endswith(f"/{MANIFEST}"))
    folder.delete(doomed)
    return len(doomed)


def _is_past(ref: CheckpointRef, newest: CheckpointRef, holder: Pair) -> bool:
    pair = Pair(attempt=ref.attempt, generation=ref.generation)
    return pair < holder or (pair == holder and ref.step < newest.step)


def _ref_of(key: str) -> CheckpointRef | None:
    parts = key.split("/")
    try:
        attempt, generation = parts[1].split(".")
        return CheckpointRef(
            step=int(parts[0].removeprefix("step-")), attempt=int(attempt),
            generation=int(generation),
        )  # fmt: skip
    except (IndexError, ValueError):
        return None  # not ours: left alone


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
