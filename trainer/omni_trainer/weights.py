"""Random starting weights: a function of the seed and the parameter's name, of no layout.

So a model starts alike on one rank and on a thousand, and replicas need no broadcast.
"""

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

_RESIDUAL_OUT = ("linear_proj.weight", "linear_fc2.weight", "out.weight", "down.weight")
_SMALL_STD = 0.02


@torch.no_grad()
def initialize(parameters: Iterable[tuple[str, Tensor]], *, seed: int, num_layers: int) -> None:
    """Fill parameters in place by their global names.

    Matrices are normal with variance 1 / fan-in; those that end a residual branch are smaller by
    sqrt(2 * num_layers), so that the depth does not grow the stream. Biases are 0, norms 1.
    """
    for name, parameter in parameters:
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = 1 / math.sqrt(parameter[0].numel())
        if name.endswith(_RESIDUAL_OUT):
            std /= math.sqrt(2 * num_layers)
        elif name.endswith("output_layer.weight"):
            std = min(std, _SMALL_STD)  # the first loss is then that of a uniform guess
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.copy_(values * std)
