"""Where encoder tokens stand in an LLM microbatch: what both ends of a message know beforehand."""

# Shapes: n encoder tokens of healthy samples, c positions of corrupt ones, m healthy spans.

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_contract.spec_model import Modality
from omni_trainer.batch import MicrobatchInputs

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The encoder tokens of one microbatch, in the order in which encoders yield them."""

    positions: Ints
    """[n] position in the microbatch of each token."""
    blanks: Ints
    """[c] positions of corrupt content; their embedding is zero."""
    ids: Ints
    """[m, 3] source, epoch, index of the sample of each healthy span."""
    learns: bool
    """Whether a gradient is wanted for any of the tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of healthy samples."""
        return len(self.positions)


def places_of(
    inputs: MicrobatchInputs,
    modalities: Sequence[Modality],
    *,
    learning: Collection[Modality],
) -> Places:
    """Places of the encoder tokens: modality by modality, spans of each in their order."""
    spans, samples = inputs.spans, inputs.samples
    is_corrupt = spans[:, 5] != 0
    ordered = [spans[(spans[:, 1] == m.number) & ~is_corrupt] for m in modalities]
    healthy = np.concatenate([*ordered, spans[:0]])  # [m, 6]
    learns = any(
        bool(part[:, 3].sum())
        for part, modality in zip(ordered, modalities, strict=True)
        if modality in learning
    )
    return Places(
        positions=_positions(healthy),
        blanks=_positions(spans[is_corrupt]),
        ids=np.ascontiguousarray(samples[healthy[:, 0], :3]),
        learns=learns,
    )


def sample_classes(inputs: MicrobatchInputs, num_tokens: int) -> dict[str, NDArray[np.bool_]]:
    """Positions by what their sample holds: `text` (no modality), `image`, `audio`."""
    members = {
        m: np.isin(np.arange(len(inputs.samples)), inputs.spans[inputs.spans[:, 1] == m.number, 0])
        for m in (Modality.IMAGE, Modality.AUDIO)
    }
    members[Modality.TEXT] = ~(members[Modality.IMAGE] | members[Modality.AUDIO])
    classes = {}
    for modality, is_member in members.items():
        mask = np.zeros(num_tokens, bool)
        mask[_ranges(inputs.samples[is_member, 4], inputs.samples[is_member, 5])] = True
        classes[str(modality)] = mask
    return classes


def _positions(spans: Ints) -> Ints:
    return _ranges(spans[:, 2], spans[:, 3])


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    ranges = [np.arange(a, a + n) for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
    return np.concatenate([*ranges, np.empty(0, np.int64)])
