"""Trainer <-> sidecar: messages over a unix socket, payloads in a sealed memfd ring.

A frame is a 4-byte big-endian length and that many bytes of JSON. The memfd travels with the
`Welcome` frame (SCM_RIGHTS). A rank asks for one step at a time; the sidecar prepares ahead on its
own. Steps count from 1. A ring slot stays untouched from its `Batch` until the rank's `Release`.
"""

import base64
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

WIRE_VERSION = 1
MAX_FRAME_BYTES = 1 << 28
ALIGN_BYTES = 64


def _decode(value: Any) -> bytes:
    return value if isinstance(value, bytes) else base64.b64decode(value, validate=True)


Blob = Annotated[
    bytes,
    PlainValidator(_decode),
    PlainSerializer(lambda raw: base64.b64encode(raw).decode(), return_type=str, when_used="json"),
]


class Message(BaseModel):
    """A frozen frame."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LoaderState(Message):
    """The state of the sample plan before a step. The same for every topology until reorder."""

    next_step: int
    """The step that the state produces next."""
    blob: Blob
    """Versioned arrays, opaque to all but omni_dataloader.state."""


class Hello(Message):
    """A rank joins. A pair (attempt, generation) below one seen before is refused."""

    type: Literal["hello"] = "hello"
    version: int = WIRE_VERSION
    plan_hash: str
    attempt: int
    generation: int
    rank: int
    next_step: int
    """First step this rank will ask for."""
    state: LoaderState | None
    """State of the checkpoint it resumed from (next_step there <= next_step here; the sidecar
    plans forward from it); None: from the beginning."""


class Next(Message):
    """Ask for the batch of a step; answered once it is ready."""

    type: Literal["next"] = "next"
    step: int


class Release(Message):
    """The rank is done with a step's payload; its ring slot may be reused. Not answered."""

    type: Literal["release"] = "release"
    step: int


class Snapshot(Message):
    """Ask for the state with which training goes on after `step`; follows its optimizer step."""

    type: Literal["snapshot"] = "snapshot"
    step: int


class Welcome(Message):
    """The rank is in; the memfd of its ring is attached."""

    type: Literal["welcome"] = "welcome"
    ring_bytes: int


class Refused(Message):
    """The rank may not join or go on."""

    type: Literal["refused"] = "refused"
    reason: Literal["stale", "mismatch", "error", "unavailable"]
    """stale: a newer pair holds the run. mismatch: another plan or wire version. error: the data
    cannot be served; `message` is for the user. unavailable: not now, the store does not answer."""
    message: str


class TensorRef(Message):
    """An array in the ring, C order, 64-byte aligned."""

    dtype: Literal["uint8", "int32", "int64", "float32", "bool"]
    shape: list[int]
    offset: int
    """Bytes from the ring's begin."""


class Microbatch(Message):
    """One LLM microbatch as this rank needs it. Always there: `samples` and `spans`.

    samples int64 [n, 6]: source number (sorted source names), epoch, index, first token of the
    sample in this piece, start position in the microbatch, number of tokens. Pieces do not overlap
    and are ascending by start; positions outside all pieces are padding. Each piece is one
    attention block.
    spans int64 [m, 6]: row in `samples`, modality number, start position in the microbatch, number
    of LLM tokens, encoder units (patches or frames), 1 when the content is corrupt and masked.
    First stage: tokens int32 [T]. Last stage: labels int32 [T], loss_mask bool [T].
    The stage that encodes it: image.patches uint8 [P, 3*patch*patch], image.grid int32 [i, 2]
    (rows, columns in patches; patches in the order of `omni_planner.cost.patch_positions`, each
    merge square one run), audio.features float32 [F, mel_bins], audio.frames int32 [a]; items in
    the order of `spans` of that modality, corrupt ones left out.
    """

    index: int
    """LLM microbatch, from 1."""
    tensors: dict[str, TensorRef]


class Batch(Message):
    """The payload of one step lies in the ring."""

    type: Literal["batch"] = "batch"
    step: int
    microbatches: list[Microbatch]
    tokens_by_source: dict[str, int]
    """Tokens of the whole global batch by source, padding not counted."""
    tokens_by_modality: dict[str, int]
    weights: dict[str, float]
    """Mixture weights in force, normalised to 1."""
    corrupt_samples: int
    """Samples masked since the beginning, this step included."""


class EndOfData(Message):
    """No step is left: a source with whenExhausted: stop ran out. Agreed by all sidecars."""

    type: Literal["end"] = "end"
    step: int
    """The first step that does not exist."""
    message: str


class State(Message):
    """Answer to `Snapshot`."""

    type: Literal["state"] = "state"
    state: LoaderState


Request = Annotated[Hello | Next | Release | Snapshot, Field(discriminator="type")]
Reply = Annotated[Welcome | Refused | Batch | EndOfData | State, Field(discriminator="type")]
REQUEST: pydantic.TypeAdapter[Hello | Next | Release | Snapshot] = pydantic.TypeAdapter(Request)
REPLY: pydantic.TypeAdapter[Welcome | Refused | Batch | EndOfData | State] = pydantic.TypeAdapter(
    Reply
)


def encode(message: Message) -> bytes:
    """A whole frame: length and JSON."""
    body = message.model_dump_json().encode()
    return len(body).to_bytes(4, "big") + body
