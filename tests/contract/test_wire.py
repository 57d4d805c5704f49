"""What one side writes on the socket, the other reads as the same message."""

import pytest
from pydantic import ValidationError

from omni_contract import wire

STATE = wire.LoaderState(next_step=3, blob=bytes(range(256)))


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(plan_hash="ab", attempt=1, generation=2, rank=3, next_step=4, state=STATE),
        wire.Hello(plan_hash="ab", attempt=1, generation=2, rank=3, next_step=4, state=None),
        wire.Next(step=1),
        wire.Release(step=1),
        wire.Snapshot(step=1),
    ],
    ids=["hello-resume", "hello-new", "next", "release", "snapshot"],
)
def test_a_request_round_trips(message: wire.Message) -> None:
    frame = wire.encode(message)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert wire.REQUEST.validate_json(frame[4:]) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Welcome(ring_bytes=1 << 20),
        wire.Refused(reason="stale", message="attempt 1 is over"),
        wire.Batch(
            step=2,
            microbatches=[
                wire.Microbatch(
                    index=1,
                    tensors={"spans": wire.TensorRef(dtype="int64", shape=[0, 6], offset=64)},
                )
            ],
            tokens_by_source={"books": 8192},
            tokens_by_modality={"text": 8192},
            weights={"books": 1.0},
            corrupt_samples=0,
        ),
        wire.EndOfData(step=9, message="books ran out"),
        wire.State(state=STATE),
    ],
    ids=["welcome", "refused", "batch", "end", "state"],
)
def test_a_reply_round_trips(message: wire.Message) -> None:
    assert wire.REPLY.validate_json(wire.encode(message)[4:]) == message


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"type":"next"}', b'{"type":"next","step":1,"more":2}', b'{"type":"batch"}'],
    ids=["no-type", "no-step", "unknown-field", "a-reply"],
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationError):
        wire.REQUEST.validate_json(body)


def test_a_blob_that_is_no_base64_is_refused() -> None:
    with pytest.raises(ValidationError):
        wire.LoaderState.model_validate_json(b'{"next_step":1,"blob":"%%"}')
