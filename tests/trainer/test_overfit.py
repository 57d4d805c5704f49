"""The encoders are really used: captions learned from pictures and recordings need those."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_trainer.device import Device
from omni_trainer.train import Engine
from tests.trainer.inputs import Content, Piece, make_piece, rank_inputs, tiny_plan
from tests.trainer.ranks import run_ranks

NUM_STEPS = 60


def samples(kind: str) -> list[Piece]:
    """Four samples of one shape, so that nothing but the content tells captions apart."""
    rng = np.random.default_rng(2)
    first = make_piece(rng, kind, 0)
    pieces = []
    for index in range(4):
        text = rng.integers(4, 64, 8)
        placeholders = first.tokens[: first.num_modality_tokens]
        piece = replace(
            first, ids=(*first.ids[:2], index), tokens=np.concatenate([placeholders, text])
        )
        if first.patches is not None:
            noise = rng.integers(0, 256, first.patches.shape).astype(np.uint8)
            piece = replace(piece, patches=noise)
        if first.features is not None:
            voice = rng.normal(size=first.features.shape).astype(np.float32)
            piece = replace(piece, features=voice)
        pieces.append(piece)
    return pieces


def swapped(pieces: list[Piece]) -> list[Piece]:
    """Every caption with the content of the next sample."""
    others = pieces[1:] + pieces[:1]
    return [
        replace(piece, patches=other.patches, features=other.features)
        for piece, other in zip(pieces, others, strict=True)
    ]


def content_of(pieces: list[Piece]) -> Content:
    return [[pieces[i : i + 2] for i in range(0, len(pieces), 2)]]


def overfit(rank: int, plan: JobPlan, pieces: dict[str, list[Piece]]) -> dict[str, Any]:
    engine = Engine.build(plan, rank, Device.open("cpu"))

    def measure(content: Content, step: int) -> dict[str, float]:
        engine.accumulate(rank_inputs(plan, rank, content, step=step))
        sums, _ = engine.measure()
        return {name: sums[name].loss / sums[name].tokens for name in pieces}

    content = content_of([p for group in pieces.values() for p in group])
    first = measure(content, 1)
    for step in range(1, NUM_STEPS + 1):
        engine.step(rank_inputs(plan, rank, content, step=step))
    last = measure(content, NUM_STEPS + 1)
    mixed_up = measure(
        content_of([p for group in pieces.values() for p in swapped(group)]), NUM_STEPS + 1
    )
    engine.close()
    return {"first": first, "last": last, "swapped": mixed_up}


def test_swapping_pictures_or_recordings_among_learned_captions_raises_the_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pieces = {
        str(Modality.IMAGE): samples("image"),
        str(Modality.AUDIO): samples("audio"),
    }
    plan = tiny_plan(num_microbatches=4, optimizer={"learningRate": 0.01, "decay": "constant"})
    (seen,) = run_ranks(1, overfit, plan, pieces)
    for name in pieces:
        first, last, wrong = seen["first"][name], seen["last"][name], seen["swapped"][name]
        with capsys.disabled():
            print(f"\n{name}: loss {first:.2f} -> {last:.3f}, with contents swapped {wrong:.2f}")
        assert last < 0.3 * first
        assert wrong > last + 1.0
