"""From decoded parts to the arrays of one rank's microbatch, as omni_contract.wire names them."""

# Shapes: T token positions, n pieces, m spans, P patches, i pictures, F frames, a recordings.

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_contract.spec_model import Modality, UsmSpec, VitSpec
from omni_dataloader.fetch import Fetched
from omni_dataloader.sample_plan import Ints, MicrobatchPlan
from omni_dataloader.select import Need
from omni_dataloader.sources import OpenedData, Source
from omni_dataloader.tokenizer import AUDIO, IMAGE, SPECIAL_TOKENS

Sample = tuple[int, int, int]
"""Source number, epoch, index."""

_PLACEHOLDER = {
    Modality.IMAGE: SPECIAL_TOKENS.index(IMAGE),
    Modality.AUDIO: SPECIAL_TOKENS.index(AUDIO),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """An array on its way into a ring, in parts that lie one behind the other."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    chunks: Sequence[NDArray[np.generic]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def assemble(
    need: Need,
    microbatch: MicrobatchPlan,
    data: OpenedData,
    fetched: Fetched,
    *,
    corrupt: Set[Sample],
    microbatch_tokens: int,
) -> dict[str, Payload]:
    """The arrays of one microbatch for one rank."""
    spans = marked_spans(microbatch, corrupt)
    arrays = {"samples": _payload(microbatch.samples), "spans": _payload(spans)}
    if need.text:
        tokens, labels, loss_mask = _text_arrays(
            microbatch.samples, data, fetched, corrupt, microbatch_tokens
        )
        if need.tokens:
            arrays["tokens"] = _payload(tokens)
        if need.labels:
            arrays |= {"labels": _payload(labels), "loss_mask": _payload(loss_mask)}
    if need.encode:
        for modality in data.encoders:
            arrays |= _encoder_arrays(modality, microbatch.samples, spans, data, fetched)
    return arrays


def marked_spans(microbatch: MicrobatchPlan, corrupt: Set[Sample]) -> Ints:
    """The spans with corrupt samples marked.

    A corrupt text has no span that could be marked, so it gets one of modality text.
    """
    spans = microbatch.spans.copy()
    more = []
    for row, (source, epoch, index, _, start, tokens) in enumerate(microbatch.samples.tolist()):
        if (source, epoch, index) not in corrupt:
            continue
        of_sample = spans[:, 0] == row
        spans[of_sample, 5] = 1
        if not of_sample.any():
            more.append((row, Modality.TEXT.number, start, tokens, 0, 1))
    if not more:
        return spans
    spans = np.concatenate([spans, np.array(more, np.int64)])
    return spans[np.argsort(spans[:, 2], kind="stable")]


def _text_arrays(
    samples: Ints, data: OpenedData, fetched: Fetched, corrupt: Set[Sample], num_tokens: int
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Tokens [T], labels [T] and loss mask [T]."""
    tokens = np.full(num_tokens, data.tokenizer.pad_id, np.int32)
    labels = np.zeros(num_tokens, np.int32)
    loss_mask = np.zeros(num_tokens, np.bool_)
    for source, epoch, index, first, start, count in samples.tolist():
        if (source, epoch, index) in corrupt:
            continue  # padding, in effect: nothing of it is learnt
        ids, learnt = _sample_tokens(
            data.sources[source], index, fetched.texts[source, index], data.tokenizer.eos_id
        )
        piece = slice(first, first + count)
        tokens[start : start + count] = ids[piece]
        # The last position of a piece predicts nothing: what follows is another piece.
        labels[start : start + count - 1] = ids[piece][1:]
        loss_mask[start : start + count - 1] = learnt[piece][1:]
    labels *= loss_mask
    return tokens, labels, loss_mask


def _sample_tokens(
    source: Source, index: int, text: NDArray[np.int32], eos_id: int
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Token ids of a whole sample in template order, and which of them are learnt."""
    ids: list[NDArray[np.int32]] = []
    learnt: list[NDArray[np.bool_]] = []
    lengths = {media.modality: int(media.tokens[index]) for media in source.table.media}
    for modality in source.spec.order:
        is_text = modality is Modality.TEXT
        part = text if is_text else np.full(lengths[modality], _PLACEHOLDER[modality], np.int32)
        ids.append(part)
        learnt.append(np.full(len(part), is_text))
    ids.append(np.array([eos_id], np.int32))
    learnt.append(np.ones(1, np.bool_))
    return np.concatenate(ids), np.concatenate(learnt)


def _encoder_arrays(
    modality: Modality, samples: Ints, spans: Ints, data: OpenedData, fetched: Fetched
) -> dict[str, Payload]:
    """Encoder inputs of one modality in the order of its spans, corrupt ones left out."""
    mine = spans[(spans[:, 1] == modality.number) & (spans[:, 5] == 0)]
    inputs = [
        fetched.media[source, index, modality]
        for source, index in samples[mine[:, 0]][:, [0, 2]].tolist()
    ]
    units = [item.units for item in inputs]
    shapes = np.array([item.shape for item in inputs], np.int32)
    num_units = sum(len(chunk) for chunk in units)
    match data.encoders[modality]:
        case VitSpec(patch_size=side):
            return {
                "image.patches": Payload(
                    dtype=np.dtype(np.uint8), shape=(num_units, 3 * side * side), chunks=units
                ),
                "image.grid": _payload(shapes.reshape(-1, 2)),
            }
        case UsmSpec(mel_bins=bins):
            return {
                "audio.features": Payload(
                    dtype=np.dtype(np.float32), shape=(num_units, bins), chunks=units
                ),
                "audio.frames": _payload(shapes.reshape(-1)),
            }


def _payload(array: NDArray[np.generic]) -> Payload:
    return Payload(dtype=array.dtype, shape=array.shape, chunks=[array])
