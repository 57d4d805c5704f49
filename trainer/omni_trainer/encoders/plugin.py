"""What an encoder is: packed samples of one modality in, language-model tokens out.

An encoder knows nothing of where it runs: no pipeline, no microbatches in flight, no ranks.
"""

# Shapes: O output tokens, W width of the language model.

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from omni_contract.spec_model import Modality, Trained
from omni_trainer.batch import MicrobatchInputs


class Encoder(nn.Module, ABC):
    """An encoder with its projector into the language model.

    A subclass sets `body` and `projector` as submodules and says how to read its inputs.
    """

    modality: Modality
    """What it reads."""
    projector: nn.Module
    """The part that `train: projector` lets learn."""

    @abstractmethod
    def encode(self, inputs: MicrobatchInputs, device: torch.device) -> Tensor:
        """Tokens of all healthy samples of the microbatch, in order: [O, W].

        Without samples it is [0, W] and depends on no parameter. Samples do not see each other:
        packed equals one by one.
        """

    def train_only(self, trained: Trained) -> None:
        """Let learn what the job file says; the rest builds no graph and has no optimizer state."""
        self.requires_grad_(trained == "full")
        if trained == "projector":
            self.projector.requires_grad_(True)

    @property
    def learns(self) -> bool:
        """Whether any of it learns."""
        return any(p.requires_grad for p in self.parameters())


class Projector(nn.Module):
    """LayerNorm and a two-layer MLP from encoder features to language-model tokens."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_size)
        self.up = nn.Linear(in_size, out_size)
        self.last = nn.Linear(out_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """[O, in] -> [O, W]."""
        hidden: Tensor = nn.functional.gelu(self.up(self.norm(x)))  # [O, W]
        out: Tensor = self.last(hidden)
        return out  # [O, W]


class Mlp(nn.Module):
    """A pre-norm two-layer MLP, without its residual connection."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[T, C] -> [T, C]."""
        out: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out  # [T, C]
