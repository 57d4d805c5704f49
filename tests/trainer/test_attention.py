"""Packed attention: blocks do not see each other, and positions restart in each."""

from typing import Any

import numpy as np
import pytest
import torch

from omni_contract.plan import JobPlan
from omni_trainer.device import Device
from omni_trainer.llm.attention import block_lengths, cumulative, packed_attention
from tests.trainer.inputs import TOKENS, make_content, pack, tiny_plan
from tests.trainer.ranks import run_ranks


def samples_at(*pieces: tuple[int, int]) -> Any:
    return np.array([(0, 0, i, 0, a, n) for i, (a, n) in enumerate(pieces)]).reshape(-1, 6)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([(0, 5), (5, 3)], [5, 3, 8], id="padding behind"),
        pytest.param([(0, 5), (8, 4)], [5, 3, 4, 4], id="padding between sequences"),
        pytest.param([(0, 16)], [16], id="full"),
        pytest.param([], [16], id="empty"),
    ],
)
def test_pieces_and_padding_tile_the_microbatch(
    pieces: list[tuple[int, int]], expected: list[int]
) -> None:
    assert block_lengths(samples_at(*pieces), 16) == expected


def test_bounds_start_at_zero() -> None:
    assert cumulative([2, 3], torch.device("cpu")).tolist() == [0, 2, 5]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_packed_equals_one_by_one(is_causal: bool, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 7, 1, 5]
    q = torch.randn(16, 4, 8, generator=generator)
    k, v = torch.randn(2, 16, kv_heads, 8, generator=generator)
    packed = packed_attention(q, k, v, lengths=lengths, is_causal=is_causal)
    first = 0
    for length in lengths:
        part = slice(first, first + length)
        scores = (
            torch.einsum("qhd,khd->hqk", q[part], k[part].repeat_interleave(4 // kv_heads, 1))
            / 8**0.5
        )
        if is_causal:
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        values = v[part].repeat_interleave(4 // kv_heads, 1)
        alone = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        torch.testing.assert_close(packed[part], alone, rtol=1e-5, atol=1e-6)
        first += length


def losses_packed_and_alone(rank: int, plan: JobPlan) -> list[tuple[Any, Any]]:
    """Token losses of each piece in a packed microbatch, and of the piece on its own."""
    from omni_trainer.llm import megatron

    cpu = Device.open("cpu").torch_device
    megatron.initialize_parallel(plan.layout, seed=rank)
    stage = megatron.build_stage(plan, device=cpu, dtype=torch.float32)
    ((pieces,),) = make_content(plan, [["tttt"]], seed=3)

    def losses(inputs: Any, num_tokens: int) -> Any:
        blocks = megatron.blocks_of(block_lengths(inputs.samples, num_tokens), cpu)
        embedded = megatron.embed(stage, inputs.tokens.long())
        with torch.no_grad():
            return megatron.run_stage(
                stage, embedded=embedded, labels=inputs.labels.long(), blocks=blocks
            )[0]

    whole = pack(pieces)
    together = losses(whole, TOKENS)
    pairs = []
    for piece, (start, length) in zip(pieces, whole.samples[:, 4:].tolist(), strict=True):
        alone = losses(pack([piece], num_tokens=length), length)
        pairs.append((together[start : start + length].numpy(), alone.numpy()))
    megatron.release_parallel()
    return pairs


def test_the_language_model_gives_packed_samples_the_losses_they_have_alone() -> None:
    (pairs,) = run_ranks(1, losses_packed_and_alone, tiny_plan(num_microbatches=1))
    assert len(pairs) == 4
    for together, alone in pairs:
        np.testing.assert_allclose(together, alone, rtol=1e-5)
