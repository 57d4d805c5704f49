"""A vision transformer over packed patches of pictures of any resolution.

No picture is resized to a common shape and no table bounds the grid: positions are sines of the
patch's row and column, attention stays within the picture.
"""

# Shapes: i pictures, P patches of all of them, C encoder width, m merge side, O = P/m^2 output
# tokens, W width of the language model.

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from omni_contract.spec_model import Modality, VitSpec
from omni_planner.cost import patch_positions
from omni_trainer.batch import MicrobatchInputs
from omni_trainer.encoders.attend import SelfAttention
from omni_trainer.encoders.plugin import Encoder, Mlp, Projector


class VitBlock(nn.Module):
    """Attention within the picture, then an MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.attention = SelfAttention(hidden_size, num_heads)
        self.mlp = Mlp(hidden_size)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """[P, C] -> [P, C]."""
        x = x + self.attention(x, lengths)
        out: Tensor = x + self.mlp(x)
        return out  # [P, C]


class Vit(Encoder):
    """Pictures to tokens: patches, blocks, merge of m x m neighbours, projector."""

    modality = Modality.IMAGE

    def __init__(self, spec: VitSpec, out_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.out_size = out_size
        self.embed = nn.Linear(3 * spec.patch_size**2, spec.hidden_size)
        self.blocks = nn.ModuleList(
            VitBlock(spec.hidden_size, spec.heads) for _ in range(spec.layers)
        )
        self.projector = Projector(spec.merge_patches**2 * spec.hidden_size, out_size)

    def encode(self, inputs: MicrobatchInputs, device: torch.device) -> Tensor:
        """Tokens of all pictures: [O, W]; a picture of r x c patches makes r*c/m^2 of them."""
        patches, grid = inputs.image_patches, inputs.image_grid
        weight = self.embed.weight
        if patches is None or grid is None or not len(grid):
            return torch.zeros(0, self.out_size, device=device, dtype=weight.dtype)
        sizes = grid.numpy().astype(np.int64)  # [i, 2]
        lengths = (sizes[:, 0] * sizes[:, 1]).tolist()
        pixels = patches.to(device).to(weight.dtype) / 127.5 - 1  # [P, 3*patch*patch]
        positions = torch.from_numpy(_positions(sizes, self.spec.merge_patches)).to(
            device
        )  # [P, 2]
        x = self.embed(pixels)  # [P, C]
        x = x + _sines(positions, self.spec.hidden_size).to(weight.dtype)
        for block in self.blocks:
            x = block(x, lengths)
        # Patches arrive with each m x m square as one run, so merging moves nothing.
        merged = x.reshape(len(x) // self.spec.merge_patches**2, -1)  # [O, m*m*C]
        out: Tensor = self.projector(merged)
        return out  # [O, W]


def _positions(grid: NDArray[np.int64], merge: int) -> NDArray[np.float32]:
    """Row and column of each patch, in the order patches arrive: [i, 2] -> [P, 2]."""
    cells = [patch_positions(rows, columns, merge) for rows, columns in grid.tolist()]
    return np.concatenate(cells).astype(np.float32)  # [P, 2]


def _sines(positions: Tensor, size: int) -> Tensor:
    """Sine and cosine features of rows and of columns: [P, 2] -> [P, size]."""
    quarter = size // 4
    steps = torch.arange(quarter, device=positions.device) / max(quarter, 1)  # [size/4]
    angles = positions[:, :, None] * 100.0**-steps  # [P, 2, size/4]
    features = torch.cat((angles.sin(), angles.cos()), -1).flatten(1)  # [P, 4*(size/4)]
    return nn.functional.pad(features, (0, size - 4 * quarter))  # [P, size]
