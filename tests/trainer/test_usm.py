"""The speech encoder: recordings that do not see each other, tokens as planned."""

import numpy as np
import pytest
import torch

from omni_contract.spec_model import UsmSpec
from omni_planner.size import KERNEL
from omni_trainer.batch import MicrobatchInputs
from omni_trainer.encoders.usm import Usm, gapped_places, halving_windows
from omni_trainer.weights import initialize
from tests.trainer.inputs import MEL, Piece, make_piece, pack

CPU = torch.device("cpu")


def make_usm(**fields: object) -> Usm:
    spec = UsmSpec(layers=2, hidden_size=64, heads=4, mel_bins=MEL, **fields)
    usm = Usm(spec, 32)
    initialize(usm.named_parameters(), seed=1, num_layers=2)
    return usm


def recordings(number: int) -> list[Piece]:
    rng = np.random.default_rng(5)
    return [make_piece(rng, "audio", i) for i in range(number)]


def inputs_of(*lengths: int) -> MicrobatchInputs:
    empty = pack([])
    return MicrobatchInputs(
        index=1,
        samples=empty.samples,
        spans=empty.spans,
        audio_features=torch.randn(sum(lengths), MEL, generator=torch.Generator().manual_seed(0)),
        audio_frames=torch.tensor(lengths, dtype=torch.int32),
    )


def test_packed_equals_one_by_one() -> None:
    usm, pieces = make_usm(), recordings(4)
    packed = usm.encode(pack(pieces, num_tokens=200), CPU)
    alone = torch.cat([usm.encode(pack([piece]), CPU) for piece in pieces])
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)


def test_convolutions_stop_at_the_border_of_a_recording() -> None:
    usm = make_usm()
    first, second, third = recordings(3)
    count = first.num_modality_tokens
    a = usm.encode(pack([first, second]), CPU)[:count]
    b = usm.encode(pack([first, third]), CPU)[:count]
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    behind = usm.encode(pack([second, first]), CPU)[-count:]
    torch.testing.assert_close(a, behind, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("frames_per_token", [4, 8, 16])
@pytest.mark.parametrize("lengths", [(1,), (7, 8, 9), (100, 1, 33), (16, 17)])
def test_tokens_are_frames_over_frames_per_token_rounded_up(
    frames_per_token: int, lengths: tuple[int, ...]
) -> None:
    usm = make_usm(frames_per_token=frames_per_token)
    expected = sum(-(-length // frames_per_token) for length in lengths)
    assert usm.encode(inputs_of(*lengths), CPU).shape == (expected, 32)


def test_windows_read_silence_beyond_the_border() -> None:
    assert halving_windows([3, 2]).tolist() == [[5, 0, 1], [1, 2, 5], [5, 3, 4]]


def test_gaps_are_wider_than_the_kernel_reaches() -> None:
    places, num_places = gapped_places([2, 3])
    assert places.tolist() == [0, 1, 2 + KERNEL // 2, 3 + KERNEL // 2, 4 + KERNEL // 2]
    assert num_places == 5 + 2 * (KERNEL // 2)


def test_no_recordings_make_no_tokens_and_no_graph() -> None:
    tokens = make_usm().encode(pack([]), CPU)
    assert tokens.shape == (0, 32)
    assert not tokens.requires_grad


def test_it_holds_no_batch_norm_and_a_frozen_one_builds_no_graph() -> None:
    usm = make_usm()
    assert not any("BatchNorm" in type(module).__name__ for module in usm.modules())
    usm.train_only("frozen")
    assert not usm.encode(pack(recordings(1)), CPU).requires_grad
    usm.train_only("projector")
    usm.encode(pack(recordings(1)), CPU).sum().backward()
    touched = {n.split(".")[0] for n, p in usm.named_parameters() if p.grad is not None}
    assert touched == {"projector"}
