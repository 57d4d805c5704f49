"""The attention that encoders share: pre-norm, full within each sample."""

# Shapes: T packed positions, C encoder width, H heads, D head features.

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni_trainer.llm.attention import packed_attention


class SelfAttention(nn.Module):
    """Pre-norm multi-head attention within samples, without its residual connection."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, lengths: Sequence[int], angles: Tensor | None = None) -> Tensor:
        """[T, C] -> [T, C]; rotates queries and keys by `angles` [T, D/2], where given."""
        qkv: Tensor = self.qkv(self.norm(x))  # [T, 3*C]
        q, k, v = qkv.unflatten(1, (3, self.num_heads, -1)).unbind(1)  # [T, H, D] each
        if angles is not None:
            q, k = _rotate(q, angles), _rotate(k, angles)
        attended = packed_attention(q, k, v, lengths=lengths, is_causal=False)  # [T, H, D]
        out: Tensor = self.out(attended.flatten(1))
        return out  # [T, C]


def rotary_angles(positions: Tensor, head_features: int) -> Tensor:
    """Angles of rotary positions: [T] -> [T, D/2]."""
    steps = torch.arange(0, head_features, 2, device=positions.device) / head_features  # [D/2]
    return positions.float()[:, None] * (10_000.0**-steps)  # [T, D/2]


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos = angles.cos().to(x.dtype)[:, None]  # [T, 1, D/2]
    sin = angles.sin().to(x.dtype)[:, None]  # [T, 1, D/2]
    first, second = x.chunk(2, dim=-1)  # [T, H, D/2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)  # [T, H, D]
