"""Tiny plans and synthetic batches, cut per rank as the data service would."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_contract.dataflow import stage_of
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.spec_model import Modality
from omni_planner.compile import compile_plan
from omni_trainer.batch import MicrobatchInputs, StepInputs

TOKENS = 96
VOCAB = 64
PATCH = 4
MEL = 16


def tiny_plan(
    *,
    pipeline: int = 1,
    replicas: int = 1,
    num_microbatches: int = 4,
    schedule: str = "onDemand",
    train: dict[str, str] | None = None,
    optimizer: dict[str, Any] | None = None,
    zero: int = 1,
) -> JobPlan:
    """Hidden size 64, 4 layers, both encoders; `train` says what learns by llm, image, audio."""
    trained = {"llm": "full", "image": "full", "audio": "full"} | (train or {})
    spec = {
        "model": {
            "llm": {
                "layers": 4, "hiddenSize": 64, "heads": 4, "kvHeads": 2, "vocabSize": VOCAB,
                "tokenizer": "s3://omni/tokenizer.json", "train": trained["llm"],
            },
            "encoders": {
                "image": {
                    "kind": "vit", "layers": 2, "hiddenSize": 48, "heads": 4, "patchSize": PATCH,
                    "maxPatches": 64, "mergePatches": 2, "train": trained["image"],
                },
                "audio": {
                    "kind": "usm", "layers": 2, "hiddenSize": 64, "heads": 4, "melBins": MEL,
                    "maxFrames": 200, "framesPerToken": 8, "train": trained["audio"],
                },
            },
        },
        "batch": {"globalSequences": num_microbatches * replicas, "sequenceTokens": TOKENS},
        "train": {
            "tokens": num_microbatches * replicas * TOKENS * 100,
            "precision": "fp32",
            "seed": 7,
            "optimizer": {"learningRate": 0.003, **(optimizer or {})},
        },
        "parallelism": {
            "llm": {"pipeline": pipeline}, "encoders": {"schedule": schedule, "zero": zero},
        },
        "data": {
            "sources": {
                "books": {"uri": "s3://omni/books", "parts": {"text": "txt"}},
                "pictures": {
                    "uri": "s3://omni/pictures", "parts": {"image": "png", "text": "txt"},
                    "template": "<image>{text}",
                },
                "speech": {
                    "uri": "s3://omni/speech", "parts": {"audio": "ogg", "text": "txt"},
                    "template": "<audio>{text}",
                },
            }
        },
        "checkpoint": {"uri": "s3://omni/runs/tiny"},
        "resources": {"nodes": 1, "ranksPerNode": pipeline * replicas, "device": "cpu"},
    }  # fmt: skip
    job = {
        "apiVersion": "megascale-omni.dev/v1alpha1", "kind": "MultimodalTrainingJob",
        "metadata": {"name": "tiny"}, "spec": spec,
    }  # fmt: skip
    return compile_plan(Job.read(job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One sample with everything in it."""

    ids: tuple[int, int, int]
    tokens: NDArray[np.int64]
    """Placeholders and text."""
    modality: Modality
    num_modality_tokens: int = 0
    patches: NDArray[np.uint8] | None = None
    grid: tuple[int, int] = (0, 0)
    features: NDArray[np.float32] | None = None
    is_corrupt: bool = False
    has_loss: bool = True

    @property
    def targets(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Labels and loss mask: each position predicts the next text token of its piece."""
        labels = np.zeros(len(self.tokens), np.int64)
        labels[:-1] = self.tokens[1:]
        mask = np.zeros(len(self.tokens), bool)
        mask[max(0, self.num_modality_tokens - 1) : -1] = self.has_loss and not self.is_corrupt
        return labels, mask


Content = list[list[list[Piece]]]
"""Pieces by replica and microbatch."""


def make_piece(rng: np.random.Generator, kind: str, index: int) -> Piece:
    """A random sample: `text`, `image` or `audio`."""
    text = rng.integers(4, VOCAB, rng.integers(6, 14))
    match kind:
        case "image":
            grid = (2 * int(rng.integers(1, 4)), 2 * int(rng.integers(1, 4)))
            patches = rng.integers(0, 256, (grid[0] * grid[1], 3 * PATCH * PATCH)).astype(np.uint8)
            number = grid[0] * grid[1] // 4
            return Piece(
                ids=(1, 0, index), modality=Modality.IMAGE, patches=patches, grid=grid,
                tokens=np.concatenate([np.full(number, 2), text]), num_modality_tokens=number,
            )  # fmt: skip
        case "audio":
            frames = int(rng.integers(20, 120))
            number = -(-frames // 8)
            return Piece(
                ids=(2, 0, index), modality=Modality.AUDIO,
                features=rng.normal(size=(frames, MEL)).astype(np.float32),
                tokens=np.concatenate([np.full(number, 3), text]), num_modality_tokens=number,
            )  # fmt: skip
    return Piece(ids=(0, 0, index), modality=Modality.TEXT, tokens=text)


def make_content(plan: JobPlan, kinds: Sequence[Sequence[str]], *, seed: int = 0) -> Content:
    """Random pieces; `kinds[replica][microbatch]` names them by initials, such as "iat"."""
    rng = np.random.default_rng(seed)
    names = {"i": "image", "a": "audio", "t": "text"}
    count = iter(range(10**6))
    content = [
        [[make_piece(rng, names[k], next(count)) for k in microbatch] for microbatch in replica]
        for replica in kinds
    ]
    assert len(content) == plan.layout.dp_size
    assert all(len(replica) == plan.num_microbatches for replica in content)
    return content


def rank_inputs(plan: JobPlan, rank: int, content: Content, *, step: int = 1) -> StepInputs:
    """What the data service would serve this rank, and no more."""
    coords = plan.layout.coords(rank)
    microbatches = []
    for index, pieces in enumerate(content[coords.dp_rank], 1):
        whole = pack(pieces, index)
        is_first, is_last = coords.pp_rank == 0, coords.pp_rank == plan.layout.pp_size - 1
        is_encoder = stage_of(plan.dataflow, index) == coords.pp_rank
        microbatches.append(
            replace(
                whole,
                tokens=whole.tokens if is_first else None,
                labels=whole.labels if is_last else None,
                loss_mask=whole.loss_mask if is_last else None,
                image_patches=whole.image_patches if is_encoder else None,
                image_grid=whole.image_grid if is_encoder else None,
                audio_features=whole.audio_features if is_encoder else None,
                audio_frames=whole.audio_frames if is_encoder else None,
            )
        )
    return StepInputs(step=step, microbatches=tuple(microbatches))


def pack(pieces: Sequence[Piece], index: int = 1, num_tokens: int = TOKENS) -> MicrobatchInputs:
    """One microbatch with everything in it, pieces one behind the other, then padding."""
    tokens = np.zeros(num_tokens, np.int32)
    labels = np.zeros(num_tokens, np.int32)
    mask = np.zeros(num_tokens, bool)
    samples, spans = [], []
    patches, grids, features, frames = [], [], [], []
    start = 0
    for row, piece in enumerate(pieces):
        end = start + len(piece.tokens)
        assert end <= num_tokens, "too many pieces for one microbatch"
        tokens[start:end] = piece.tokens
        labels[start:end], mask[start:end] = piece.targets
        samples.append((*piece.ids, 0, start, end - start))
        if piece.modality is not Modality.TEXT:
            units = piece.grid[0] * piece.grid[1]
            spans.append(
                (row, piece.modality.number, start, piece.num_modality_tokens, units,
                 int(piece.is_corrupt))
            )  # fmt: skip
        if piece.patches is not None and not piece.is_corrupt:
            patches.append(piece.patches)
            grids.append(piece.grid)
        if piece.features is not None and not piece.is_corrupt:
            features.append(piece.features)
            frames.append(len(piece.features))
        start = end
    return MicrobatchInputs(
        index=index,
        samples=np.array(samples, np.int64).reshape(-1, 6),
        spans=np.array(spans, np.int64).reshape(-1, 6),
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        image_patches=torch.from_numpy(
            np.concatenate([*patches, np.empty((0, 3 * PATCH * PATCH), np.uint8)])
        ),
        image_grid=torch.tensor(grids, dtype=torch.int32).view(-1, 2),
        audio_features=torch.from_numpy(
            np.concatenate([*features, np.empty((0, MEL), np.float32)])
        ),
        audio_frames=torch.tensor(frames, dtype=torch.int32),
    )
