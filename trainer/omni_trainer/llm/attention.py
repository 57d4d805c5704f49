"""Attention over packed samples: each block attends within itself and to nothing else.

The only door to flash_attn. On a GPU in bf16 one varlen kernel does it; elsewhere one call of
scaled_dot_product_attention per block.
"""

# Shapes: T packed tokens, n sample pieces, b blocks, H query heads, G key and value heads (G
# divides H), D head features.

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn


def block_lengths(samples: NDArray[np.int64], num_tokens: int) -> list[int]:
    """Lengths of the attention blocks that tile a microbatch: each piece, and each gap between.

    `samples` is `wire.Microbatch.samples` [n, 6]; padding attends to itself only.
    """
    lengths: list[int] = []
    end = 0
    for start, length in samples[:, 4:6].tolist():
        if start > end:
            lengths.append(start - end)
        lengths.append(length)
        end = start + length
    if num_tokens > end:
        lengths.append(num_tokens - end)
    return lengths


def cumulative(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Block bounds as kernels want them: [b] -> int32 [b+1], from 0."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return torch.from_numpy(bounds).to(device)  # [b+1]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Sequence[int], is_causal: bool
) -> Tensor:
    """Attend within blocks: [T, H, D], [T, G, D], [T, G, D] -> [T, H, D]."""
    kernel = _varlen_kernel() if q.is_cuda and q.dtype != torch.float32 else None
    if kernel is not None:
        bounds = cumulative(lengths, q.device)  # [b+1]
        longest = max(lengths, default=0)
        out: Tensor = kernel(
            q, k, v, bounds, bounds, longest, longest, causal=is_causal, deterministic=True
        )
        return out  # [T, H, D]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)  # [T, H, D]
        v = v.repeat_interleave(groups, dim=1)  # [T, H, D]
    blocks = []
    for block in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
        q_block, k_block, v_block = (x.transpose(0, 1)[None] for x in block)  # [1, H, t, D]
        attended = F.scaled_dot_product_attention(q_block, k_block, v_block, is_causal=is_causal)
        blocks.append(attended[0].transpose(0, 1))  # [t, H, D]
    return torch.cat(blocks)  # [T, H, D]


class PackedCausalAttention(nn.Module):
    """Core attention of megatron's local layer: causal within each block of `packed_seq_params`."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any,
        **_: object,
    ) -> Tensor:
        """[T, H, D], [T, G, D], [T, G, D] -> [T, H*D]; positions are in the inputs already."""
        out = packed_attention(
            query, key, value, lengths=packed_seq_params.lengths, is_causal=True
        )  # [T, H, D]
        return out.flatten(1)  # [T, H*D]


@functools.cache
def _varlen_kernel() -> Any:
    if importlib.util.find_spec("flash_attn") is None:
        return None
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func
