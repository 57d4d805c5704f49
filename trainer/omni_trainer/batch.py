"""What one optimizer step is given and what it answers: the types between loop and engine."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omni_contract.records import LossSum, OpSpan

# Shapes: T token positions of a microbatch, n sample pieces, m modality spans, P patches,
# i images, F log-mel frames, a recordings.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInputs:
    """One LLM microbatch as this rank needs it; the columns are those of `wire.Microbatch`."""

    index: int
    """LLM microbatch of this replica, from 1."""
    samples: NDArray[np.int64]
    """[n, 6] source, epoch, index, first token, start position, number of tokens."""
    spans: NDArray[np.int64]
    """[m, 6] row in samples, modality number, start position, LLM tokens, units, corrupt."""
    tokens: Tensor | None = None
    """[T] token ids; first stage only."""
    labels: Tensor | None = None
    """[T] the token each position predicts; last stage only."""
    loss_mask: Tensor | None = None
    """[T] bool, positions that count; last stage only."""
    image_patches: Tensor | None = None
    """uint8 [P, 3*patch*patch]; the encoding stage only."""
    image_grid: Tensor | None = None
    """[i, 2] rows and columns in patches; the encoding stage only."""
    audio_features: Tensor | None = None
    """float32 [F, mel_bins]; the encoding stage only."""
    audio_frames: Tensor | None = None
    """[a] frames of each recording; the encoding stage only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """All microbatches of one optimizer step of one replica, ascending."""

    step: int
    microbatches: tuple[MicrobatchInputs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did. Equal on every rank, but for `spans`."""

    loss_sums: Mapping[str, LossSum]
    """Over the global batch by `all`, `text` (samples without modality), `image`, `audio`
    (samples that hold one); a sample holding both counts in both."""
    grad_norm: float
    """Norm over LLM and encoders together, before clipping."""
    learning_rate: float
    """Rate of the language model; encoders scale it."""
    max_live_encoder_microbatches: int
    """Most encoder microbatches alive at once on any rank of the world."""
    spans: tuple[OpSpan, ...] | None
    """Operations of this rank as executed, when the step was traced."""
