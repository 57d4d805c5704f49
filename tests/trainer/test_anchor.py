"""The anchor on real ranks: refusals, live encoder microbatches, what was executed, corruption."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from omni_contract.errors import SpecError
from omni_contract.plan import JobPlan
from omni_contract.spec_model import ENCODED, EncodersSpec
from omni_planner.schedule import op_table
from omni_trainer.batch import StepInputs
from omni_trainer.device import Device
from omni_trainer.multiplex.anchor import EncoderAnchor, cfg, merge
from omni_trainer.multiplex.places import places_of, sample_classes
from omni_trainer.multiplex.work import Embeddings, StagePlace
from omni_trainer.train import Engine
from tests.trainer.inputs import Content, make_content, pack, rank_inputs, tiny_plan
from tests.trainer.ranks import RankError, run_ranks

PLACE = StagePlace(
    stage=0, num_stages=2, num_microbatches=2, width=8, device=torch.device("cpu"),
    dtype=torch.float32, link=None,
)  # fmt: skip


def lone_anchor() -> EncoderAnchor:
    return EncoderAnchor([], cfg(place=PLACE))


def test_a_dataflow_is_taken_over_only_when_it_can_run() -> None:
    anchor = lone_anchor()
    good = {"1": (0, [0, 1]), "-1": (0, [-1, -2]), "2": (1, [0, 1]), "-2": (1, [-2, -3])}
    anchor.dataflow = good
    with pytest.raises(SpecError, match=r"dataflow\['2'\]: stage 5 does not exist"):
        anchor.dataflow = good | {"2": (5, [0, 1])}
    assert anchor.dataflow == good


def test_sharded_encoder_parameters_are_refused() -> None:
    with pytest.raises(SpecError, match="zero3: True is not offered"):
        cfg(place=PLACE, zero3=True)


def test_hooks_belong_into_a_step() -> None:
    with pytest.raises(AssertionError, match="between steps"):
        lone_anchor().hook(None, True)


def test_places_are_in_the_order_of_encoders_and_leave_corrupt_samples_out() -> None:
    ((pieces,),) = make_content(tiny_plan(num_microbatches=1), [["aiti"]])
    pieces[1] = replace(pieces[1], is_corrupt=True)
    inputs = pack(pieces)
    places = places_of(inputs, ENCODED, learning=ENCODED[:1])
    starts = inputs.samples[:, 4].tolist()
    assert places.ids.tolist() == [list(pieces[3].ids), list(pieces[0].ids)]
    assert places.positions[0] == starts[3]
    assert places.positions[-1] == starts[0] + pieces[0].num_modality_tokens - 1
    assert places.blanks[0] == starts[1]
    assert len(places.blanks) == pieces[1].num_modality_tokens
    assert places.learns
    assert not places_of(inputs, ENCODED, learning=()).learns
    embedded = torch.ones(96, 1, 4)
    tokens = torch.full((places.num_tokens, 4), 2.0)
    merged = merge(embedded, Embeddings(tokens=tokens, places=places))[:, 0, 0]
    assert (merged[places.positions] == 2).all()
    assert (merged[places.blanks] == 0).all()
    assert int((merged == 1).sum()) == 96 - places.num_tokens - len(places.blanks)


def test_positions_are_counted_to_what_their_sample_holds() -> None:
    ((pieces,),) = make_content(tiny_plan(num_microbatches=1), [["ait"]])
    inputs = pack(pieces)
    classes = sample_classes(inputs, 96)
    for piece, name, start in zip(
        pieces, ("audio", "image", "text"), inputs.samples[:, 4].tolist(), strict=True
    ):
        expected = np.zeros(96, bool)
        expected[start : start + len(piece.tokens)] = True
        assert (classes[name] == expected).all()


def run_step(rank: int, plan: JobPlan, content: Content) -> Any:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    result = engine.step(rank_inputs(plan, rank, content), trace=True)
    engine.close()
    return result


@pytest.mark.parametrize(
    ("schedule", "pipeline", "live"),
    [("onDemand", 2, 2), ("upfront", 2, 4), ("upfront", 1, 8)],
)
def test_live_encoder_microbatches_as_executed(schedule: str, pipeline: int, live: int) -> None:
    """On demand at most 2 of 8, up front N / p; the timeline holds the table's operations."""
    plan = tiny_plan(pipeline=pipeline, num_microbatches=8, schedule=schedule)
    content = make_content(plan, [["ia", "i", "a", "it", "a", "ti", "i", "a"]])
    results = run_ranks(pipeline, run_step, plan, content)
    table = op_table(num_stages=pipeline, num_microbatches=8, dataflow=plan.dataflow)
    for ops, result in zip(table, results, strict=True):
        assert result.max_live_encoder_microbatches == live
        ran = [(s.op, s.microbatch) for s in result.spans if s.op in ("LF", "LB", "EF", "EB")]
        assert ran == [(op.kind.value, op.microbatch) for op in ops]
        assert max(s.live for s in result.spans) <= live
        assert [s.op for s in result.spans][-2:] == ["reduce", "optimizer"]


def test_a_job_without_encoders_has_empty_slots() -> None:
    plan = tiny_plan(pipeline=2, num_microbatches=4)
    model = plan.spec.model.model_copy(update={"encoders": EncodersSpec()})
    plan = plan.model_copy(update={"spec": plan.spec.model_copy(update={"model": model})})
    results = run_ranks(2, run_step, plan, make_content(plan, [["t", "tt", "t", "t"]]))
    for result in results:
        assert result.max_live_encoder_microbatches == 0
        assert result.loss_sums["all"].tokens == result.loss_sums["text"].tokens > 0


def disturbed(rank: int, plan: JobPlan, content: Content, what: str) -> None:
    """Stage 1 encodes something else than stage 0 has placeholders for."""
    engine = Engine.build(plan, rank, Device.open("cpu"))
    inputs = rank_inputs(plan, rank, content)
    second = inputs.microbatches[1]
    if rank == 1 and what == "sample":
        samples = second.samples.copy()
        samples[0, 2] = 77
        second = replace(second, samples=samples)
    elif rank == 1:
        assert second.image_patches is not None and second.image_grid is not None
        second = replace(
            second,
            spans=second.spans[:1],
            image_patches=second.image_patches[: second.spans[0, 4]],
            image_grid=second.image_grid[:1],
        )
    microbatches = (inputs.microbatches[0], second, *inputs.microbatches[2:])
    engine.step(StepInputs(step=1, microbatches=microbatches))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param(
            "sample",
            r"microbatch 2: stage 1 encoded pictures epoch 0 sample 77 where stage 0 has "
            r"pictures epoch 0 sample 1;",
            id="another sample",
        ),
        pytest.param(
            "number",
            r"microbatch 2: stage 1 sent embeddings of .*'samples': 1, .* stage 0 expects "
            r".*'samples': 2",
            id="fewer samples",
        ),
    ],
)
def test_c04_embeddings_of_other_samples_are_refused_where_they_meet(
    what: str, message: str
) -> None:
    plan = tiny_plan(pipeline=2, num_microbatches=4)
    content = make_content(plan, [["t", "ii", "t", "t"]])
    with pytest.raises(RankError, match=message):
        run_ranks(2, disturbed, plan, content, what)
