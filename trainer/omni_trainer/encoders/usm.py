"""A Conformer speech encoder (USM style) on packed log-mel frames.

Convolutions stop at sample borders and every norm is a LayerNorm, so a recording is encoded alike
whatever it is packed with.
"""

# Shapes: a recordings, F frames of all of them, M mel features, C encoder width, O output tokens,
# W width of the language model, K kernel width.

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omni_contract.spec_model import Modality, UsmSpec
from omni_planner.size import KERNEL
from omni_trainer.batch import MicrobatchInputs
from omni_trainer.encoders.attend import SelfAttention, rotary_angles
from omni_trainer.encoders.plugin import Encoder, Mlp, Projector


class Halve(nn.Module):
    """A convolution of width 3 and stride 2: n frames of a recording become ceil(n / 2)."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(3 * in_size, out_size)
        self.norm = nn.LayerNorm(out_size)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[F, in] -> [sum of ceil(length / 2), out]."""
        index = torch.from_numpy(halving_windows(lengths)).to(x.device)  # [F', 3]
        # A row of zeros behind the last frame stands for what lies beyond a recording's border.
        padded = nn.functional.pad(x, (0, 0, 0, 1))  # [F+1, in]
        out: Tensor = self.norm(nn.functional.gelu(self.up(padded[index].flatten(1))))
        return out  # [F', out]


class Convolution(nn.Module):
    """The Conformer's convolution module, without its residual connection."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 2 * hidden_size)
        self.depthwise = nn.Conv1d(
            hidden_size, hidden_size, KERNEL, padding=KERNEL // 2, groups=hidden_size
        )
        self.inner_norm = nn.LayerNorm(hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, places: Tensor, num_places: int) -> Tensor:
        """[O, C] -> [O, C]; `places` [O] are the tokens' places in the row with silent gaps."""
        x = nn.functional.glu(self.up(self.norm(x)))  # [O, C]
        gapped = x.new_zeros(num_places, x.shape[1]).index_copy(0, places, x)  # [row, C]
        x = self.depthwise(gapped.T[None])[0].T.index_select(0, places)  # [O, C]
        out: Tensor = self.out(nn.functional.silu(self.inner_norm(x)))
        return out  # [O, C]


class ConformerBlock(nn.Module):
    """Half an MLP, attention, convolution, half an MLP, norm."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.first_mlp = Mlp(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads)
        self.convolution = Convolution(hidden_size)
        self.second_mlp = Mlp(hidden_size)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(
        self, x: Tensor, lengths: list[int], angles: Tensor, places: Tensor, num_places: int
    ) -> Tensor:
        """[O, C] -> [O, C]."""
        x = x + 0.5 * self.first_mlp(x)
        x = x + self.attention(x, lengths, angles)
        x = x + self.convolution(x, places, num_places)
        x = x + 0.5 * self.second_mlp(x)
        out: Tensor = self.norm(x)
        return out  # [O, C]


class Usm(Encoder):
    """Recordings to tokens: strided convolutions, Conformer blocks, projector."""

    modality = Modality.AUDIO

    def __init__(self, spec: UsmSpec, out_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.out_size = out_size
        self.norm = nn.LayerNorm(spec.mel_bins)
        num_halvings = spec.frames_per_token.bit_length() - 1
        widths = [spec.mel_bins] + [spec.hidden_size] * num_halvings
        self.halves = nn.ModuleList(Halve(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.blocks = nn.ModuleList(
            ConformerBlock(spec.hidden_size, spec.heads) for _ in range(spec.layers)
        )
        self.projector = Projector(spec.hidden_size, out_size)

    def encode(self, inputs: MicrobatchInputs, device: torch.device) -> Tensor:
        """Tokens of all recordings: [O, W]; n frames make ceil(n / framesPerToken) of them."""
        features, frames = inputs.audio_features, inputs.audio_frames
        weight = self.norm.weight
        if features is None or frames is None or not len(frames):
            return torch.zeros(0, self.out_size, device=device, dtype=weight.dtype)
        lengths: list[int] = frames.tolist()
        x = self.norm(features.to(device).to(weight.dtype))  # [F, M]
        for halve in self.halves:
            x = halve(x, lengths)  # [F', C]
            lengths = [(length + 1) // 2 for length in lengths]
        index, num_places = gapped_places(lengths)
        places = torch.from_numpy(index).to(device)  # [O]
        steps = np.concatenate([np.arange(length) for length in lengths])  # [O]
        angles = rotary_angles(
            torch.from_numpy(steps).to(device), self.spec.hidden_size // self.spec.heads
        )  # [O, D/2]
        for block in self.blocks:
            x = block(x, lengths, angles, places, num_places)
        out: Tensor = self.projector(x)
        return out  # [O, W]


def halving_windows(lengths: Sequence[int]) -> NDArray[np.int64]:
    """The 3 frames each output reads: [F', 3]; number F is the silence beyond a border."""
    total = sum(lengths)
    windows = []
    first = 0
    for length in lengths:
        window = np.arange(0, length, 2)[:, None] + np.array([-1, 0, 1])  # [ceil(length/2), 3]
        is_inside = (window >= 0) & (window < length)
        windows.append(np.where(is_inside, window + first, total))
        first += length
    return np.concatenate(windows)  # [F', 3]


def gapped_places(lengths: Sequence[int]) -> tuple[NDArray[np.int64], int]:
    """Places of tokens in a row with a gap of half a kernel between recordings, and its length."""
    gap = KERNEL // 2
    starts = np.cumsum([0] + [length + gap for length in lengths])  # [a+1]
    places = [start + np.arange(n) for start, n in zip(starts[:-1].tolist(), lengths, strict=True)]
    return np.concatenate(places), int(starts[-1])  # [O]
