"""Every layout computes the gradients of one rank that knows no anchor, pipeline or packing."""

from dataclasses import replace
from typing import Any

import pytest

from omni_contract.plan import JobPlan
from omni_contract.spec_model import Modality
from omni_trainer.device import Device
from omni_trainer.train import Engine
from tests.trainer.inputs import Content, Piece, make_content, rank_inputs, tiny_plan
from tests.trainer.ranks import run_ranks
from tests.trainer.reference import reference_step

TOLERANCE = 1e-5
CORRUPT = "corrupt samples"

# Pieces by replica and microbatch: i picture, a recording, t text. At pp 2 stage 1 encodes
# microbatches 2 and 4, so a rank is without pictures where those of its replica hold none.
BATCHES = {
    "mixed": [["iat", "ta", "it", "aii"], ["a", "ti", "tt", "ia"]],
    "ranks without pictures": [["at", "ta", "a", "tt"], ["t", "ti", "ta", "i"]],
    "ranks without speech": [["at", "i", "a", "ii"], ["t", "ti", "t", "i"]],
    "all text": [["t", "tt", "ttt", "t"], ["tt", "t", "t", "tt"]],
    CORRUPT: [["ia", "i", "ta", "ai"], ["a", "ia", "t", "it"]],
}


def contents(*, replicas: int) -> list[Content]:
    """The batches; for one replica the microbatches of both one behind the other."""
    plan = tiny_plan(pipeline=1, replicas=2)
    batches = [make_content(plan, kinds, seed=seed) for seed, kinds in enumerate(BATCHES.values())]
    if replicas == 2:
        return batches
    return [[[pieces for replica in batch for pieces in replica]] for batch in batches]


def damaged(piece: Piece) -> Piece:
    """Two of three pictures and recordings are corrupt: in some microbatches all."""
    is_corrupt = piece.modality is not Modality.TEXT and piece.ids[2] % 3 != 1
    return replace(piece, is_corrupt=is_corrupt)


def gradients(rank: int, plan: JobPlan, batches: list[Content]) -> list[Any]:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    results = []
    for batch in batches:
        engine.accumulate(rank_inputs(plan, rank, batch))
        loss_sums, _ = engine.measure()
        results.append((loss_sums["all"].loss / loss_sums["all"].tokens, engine.gradients()))
    engine.close()
    return results


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    plan = tiny_plan(num_microbatches=8)
    (results,) = run_ranks(1, reference_step, plan, contents(replicas=1))
    return list(results)


@pytest.mark.parametrize(
    ("pipeline", "replicas", "schedule", "zero"),
    [
        pytest.param(2, 2, "onDemand", 1, id="pp2 x dp2"),
        pytest.param(2, 2, "upfront", 1, id="pp2 x dp2, upfront"),
        pytest.param(1, 1, "onDemand", 1, id="pp1"),
        pytest.param(2, 1, "onDemand", 0, id="pp2, encoders not sharded"),
        pytest.param(4, 1, "onDemand", 1, id="pp4"),
    ],
)
def test_raw_gradients_match_one_rank_without_the_anchor(
    pipeline: int, replicas: int, schedule: str, zero: int, expected: list[Any]
) -> None:
    plan = tiny_plan(
        pipeline=pipeline,
        replicas=replicas,
        num_microbatches=8 // replicas,
        schedule=schedule,
        zero=zero,
    )
    ranks = run_ranks(pipeline * replicas, gradients, plan, contents(replicas=replicas))
    worst = 0.0
    for number, name in enumerate(BATCHES):
        loss, reference = expected[number]
        found: dict[str, Any] = {}
        for rank in ranks:
            found |= rank[number][1]
        assert found.keys() == reference.keys()
        assert ranks[0][number][0] == pytest.approx(loss, rel=1e-6), name
        for key, gradient in reference.items():
            norm = float(gradient.norm())
            difference = float((found[key] - gradient).norm())
            if norm == 0:
                assert difference == 0, f"{name}: {key} has a gradient and should have none"
                continue
            assert difference <= TOLERANCE * norm, f"{name}: {key} {difference / norm:.1e}"
            worst = max(worst, difference / norm)
    print(f"largest relative difference {worst:.1e}")
