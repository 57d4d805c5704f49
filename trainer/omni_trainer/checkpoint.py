"""What a checkpoint is made of, and how its parts are written and read.

    {checkpoint.uri}/latest                          the only way in, see `claims`
    {checkpoint.uri}/step-00000020/{claim}/*.pt      objects of the ranks
                                     data-state.bin  where the data goes on
                                   done-{rank}.json  what a rank wrote
                                      manifest.json  written last: all of it is there

Knows nothing of who may write.
"""

import hashlib
import io
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_contract.errors import SpecError, StorageError
from omni_contract.plan import JobPlan
from omni_contract.topology import Layout
from omni_contract.wire import LoaderState
from omni_trainer.storage import Folder

MANIFEST = "manifest.json"
DATA_STATE = "data-state.bin"


class Document(BaseModel):
    """What is stored as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(Document):
    """One object of a checkpoint as written."""

    num_bytes: int
    sha256: str


class Done(Document):
    """What one rank wrote of a checkpoint, or why it could not."""

    version: Literal[1] = 1
    rank: int
    shards: dict[str, Shard]
    error: str | None = None


class CheckpointRef(Document):
    """Names a checkpoint."""

    step: int
    claim: int
    """Number of the claim it was saved under."""

    @property
    def folder(self) -> str:
        """Where its objects lie, without a slash at the end."""
        return f"step-{self.step:08d}/{self.claim}"

    @classmethod
    def of_key(cls, key: str) -> Self | None:
        """The checkpoint that an object belongs to; None: it is none of ours."""
        parts = key.split("/")
        try:
            return cls(step=int(parts[0].removeprefix("step-")), claim=int(parts[1]))
        except (IndexError, ValueError):
            return None


class Manifest(Document):
    """A whole checkpoint. It is there only when every object it names is."""

    version: Literal[2] = 2
    job: str
    ref: CheckpointRef
    layout: Layout
    """The ranks that wrote it; those that resume may be another number of replicas."""
    fingerprint: dict[str, str]
    """Fields of the job that must be the same to resume, see `fingerprint`."""
    shards: dict[str, Shard]
    """Objects by file name."""


_D = TypeVar("_D", bound=Document)


def parse(model: type[_D], folder: Folder, key: str, data: bytes) -> _D:
    """Read a document of the folder. Raises StorageError where it is none of this version."""
    try:
        return model.model_validate_json(data)
    except ValidationError as exc:
        version = model.model_fields["version"].default
        other = [error["input"] for error in exc.errors() if error["loc"] == ("version",)]
        if other:
            raise StorageError(
                f"{folder.uri}/{key}: this is of version {other[0]}, and this release reads "
                f"{version}; go on with the release that wrote it, or use another checkpoint.uri"
            ) from None
        raise StorageError(
            f"{folder.uri}/{key}: this is no {model.__name__.lower()} file of version {version} "
            f"({exc.error_count()} wrong fields); use another checkpoint.uri or restore the file"
        ) from None


def dump(document: Document) -> bytes:
    """A document as `parse` reads it."""
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
    fields["data.sources"] = ", ".join(sorted(spec.data.sources))
    return fields


def _flatten(value: Any, path: str, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _flatten(inner, f"{path}.{key}", into)
    else:
        into[path] = str(value)


def read_manifest(folder: Folder, plan: JobPlan, ref: CheckpointRef) -> Manifest:
    """A committed checkpoint. Raises SpecError where `plan` cannot go on from it."""
    key = f"{ref.folder}/{MANIFEST}"
    blob = folder.get(key)
    if blob is None:
        raise StorageError(
            f"{folder.uri}/{key}: this checkpoint was committed but it is gone; restore it, or "
            f"delete {folder.uri}/latest to start from the beginning"
        )
    manifest = parse(Manifest, folder, key, blob.data)
    mine = fingerprint(plan)
    problems = [
        (
            field,
            f"the checkpoint {folder.uri}/{manifest.ref.folder} was saved with "
            f"{manifest.fingerprint.get(field, 'no such field')}, this job has "
            f"{mine.get(field, 'no such field')}; use the same, or begin anew in another "
            "checkpoint.uri",
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
            f"{folder.uri}/latest at an older checkpoint"
        )
    if len(blob.data) != shard.num_bytes or _sha256(blob.data) != shard.sha256:
        raise StorageError(
            f"{folder.uri}/{key}: this part of the checkpoint is damaged ({len(blob.data)} bytes, "
            f"{shard.num_bytes} were saved, or another checksum); restore it, or point "
            f"{folder.uri}/latest at an older checkpoint"
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
    folder.put(_done_key(ref, rank), dump(Done(rank=rank, shards=shards)))


def write_failure(folder: Folder, ref: CheckpointRef, rank: int, error: str) -> None:
    """Say that a rank cannot write its part, so that rank 0 need not wait for it."""
    folder.put(_done_key(ref, rank), dump(Done(rank=rank, shards={}, error=error)))


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
        done = parse(Done, folder, key, b"" if blob is None else blob.data)
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


def write_manifest(
    folder: Folder, plan: JobPlan, ref: CheckpointRef, shards: Mapping[str, Shard]
) -> bool:
    """Write what makes a checkpoint whole. False: there is another one already."""
    assert DATA_STATE in shards, "a checkpoint without data state cannot be resumed"
    manifest = Manifest(
        job=plan.name,
        ref=ref,
        layout=plan.layout,
        fingerprint=fingerprint(plan),
        shards=dict(shards),
    )
    return folder.put_if_absent(f"{ref.folder}/{MANIFEST}", dump(manifest)) is not None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
