"""Reads samples as the model was given them: patches, log-mel frames, tokens."""

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.image import imsave
from numpy.typing import NDArray

from omni_cli.summary import Piece
from omni_contract.plan import JobPlan
from omni_contract.records import ConsumedSample
from omni_contract.spec_model import Modality, UsmSpec, VitSpec
from omni_dataloader.decode import audio_features, decode_text, image_patches
from omni_dataloader.sources import OpenedData, Source, plan_samples
from omni_dataloader.store import Store
from omni_planner.cost import patch_positions

MOST_CHARACTERS = 420
MOST_SOUND_BYTES = 1 << 18
PER_SOURCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """One consumed piece, ready for a page."""

    source: str
    name: str
    """Shard and key."""
    where: str
    """Step, epoch and tokens, in words."""
    text: str
    picture: str | None
    """The patches put together again, as a PNG data address."""
    frames: NDArray[np.float32] | None
    """Log-mel frames [F, bins]."""
    sound: str | None
    """The recording itself, as a data address."""


def planned_pieces(data: OpenedData, plan: JobPlan) -> dict[int, list[Piece]]:
    """The sample plan of the whole job, computed again from the index alone, by step."""
    samples = plan_samples(data, plan)
    names = [source.name for source in data.sources]
    state, planned = samples.begin(), {}
    for step in range(1, plan.num_steps + 1):
        step_plan, state = samples.step(state)
        planned[step] = [
            (names[source], epoch, index, first, tokens)
            for _, source, epoch, index, first, _, tokens in step_plan.pieces.tolist()
        ]
    return planned


def choose(
    final: Mapping[int, Sequence[ConsumedSample]], sources: Sequence[Source]
) -> Iterator[tuple[int, Source, ConsumedSample]]:
    """The last pieces of each source, healthy and whole where they have media; step and piece."""
    for source in sources:
        wanted = PER_SOURCE if source.table.media else 1
        found: dict[int, tuple[int, Source, ConsumedSample]] = {}
        for step in sorted(final, reverse=True):
            for sample in final[step]:
                if sample.source == source.name and not sample.corrupt and len(found) < wanted:
                    found.setdefault(sample.index, (step, source, sample))
            if len(found) == wanted:
                break
        yield from found.values()


def shown(
    step: int, source: Source, sample: ConsumedSample, data: OpenedData, store: Store
) -> ShownSample:
    """Read one sample and turn it into what the model was given."""
    row = sample.index
    parts = {m: source.index.part(ext, m) for m, ext in source.spec.parts.items()}
    ranges = [(int(p.offset[row]), int(p.length[row])) for p in parts.values()]
    raw = dict(zip(parts, store.read_ranges(source.index.shard_uri(row), ranges), strict=True))
    picture, frames, sound = None, None, None
    for modality, encoder in data.encoders.items():
        if modality not in parts:
            continue
        size = [int(n) for n in parts[modality].size[row]]
        match encoder:
            case VitSpec():
                patches, grid = image_patches(raw[modality], size, encoder)
                picture = _png(unpatched(patches, grid, encoder))
            case UsmSpec():
                frames = audio_features(raw[modality], size, encoder)
                if len(raw[modality]) <= MOST_SOUND_BYTES:
                    sound = _data_address(f"audio/{source.spec.parts[modality]}", raw[modality])
    text = decode_text(raw[Modality.TEXT])
    media = [f"{int(m.tokens[row])} {m.modality} tokens" for m in source.table.media]
    if not media:
        ids = data.tokenizer.encode(text).tolist()
        end = sample.first_token + sample.num_tokens
        text = data.tokenizer.decode(ids[sample.first_token : end])
        media = [f"tokens {sample.first_token:,} to {end:,} of {len(ids) + 1:,}"]
    else:
        media.append(f"{int(parts[Modality.TEXT].text_tokens[row])} text tokens, an end token")
    return ShownSample(
        source=source.name,
        name=source.index.keys[row].decode(errors="replace"),
        where=f"step {step}, epoch {sample.epoch}: {', '.join(media)}",
        text=text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ...",
        picture=picture,
        frames=frames,
        sound=sound,
    )


def unpatched(patches: NDArray[np.uint8], grid: tuple[int, int], vit: VitSpec) -> NDArray[np.uint8]:
    """Put the patches of a picture [R*C, 3*P*P] together again: [R*P, C*P, 3]."""
    rows, columns = grid
    side = vit.patch_size
    image = np.zeros((rows, columns, side, side, 3), np.uint8)
    places = patch_positions(rows, columns, vit.merge_patches)
    image[places[:, 0], places[:, 1]] = patches.reshape(-1, 3, side, side).transpose(0, 2, 3, 1)
    return image.transpose(0, 2, 1, 3, 4).reshape(rows * side, columns * side, 3)


def _png(image: NDArray[np.uint8]) -> str:
    file = io.BytesIO()
    imsave(file, image, format="png")
    return _data_address("image/png", file.getvalue())


def _data_address(kind: str, data: bytes | memoryview) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
