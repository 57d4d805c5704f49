"""Optimizer and state: rates, one norm, who learns, and steps that repeat bit for bit."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from omni_contract.errors import OmniError
from omni_contract.plan import JobPlan
from omni_contract.spec_model import OptimizerSpec
from omni_trainer.device import Device
from omni_trainer.multiplex.gradients import learning_rate
from omni_trainer.multiplex.tensors import check_same_keys, copy_tensors
from omni_trainer.train import Engine
from tests.trainer.inputs import Content, make_content, rank_inputs, tiny_plan
from tests.trainer.ranks import run_ranks

SPEC = OptimizerSpec(learning_rate=2.0, min_learning_rate=0.5, warmup_tokens=100)


@pytest.mark.parametrize(
    ("decay", "tokens", "expected"),
    [
        ("cosine", 50, 1.0),
        ("cosine", 100, 2.0),
        ("cosine", 600, 1.25),
        ("cosine", 1100, 0.5),
        ("cosine", 5000, 0.5),
        ("linear", 350, 1.625),
        ("constant", 1100, 2.0),
    ],
)
def test_the_rate_rises_then_falls(decay: str, tokens: int, expected: float) -> None:
    spec = SPEC.model_copy(update={"decay": decay})
    assert learning_rate(spec, tokens=tokens, total_tokens=1100) == pytest.approx(expected)


def test_saved_tensors_of_another_model_are_refused_by_name() -> None:
    here = {"a": torch.zeros(2), "b": torch.zeros(3)}
    with pytest.raises(OmniError, match=r"llm-pp00: .*lacks 1, such as 'b' and has 1 too many"):
        check_same_keys({"a": 1, "c": 2}, here, where="llm-pp00")
    with pytest.raises(OmniError, match=r"'b' is torch.float32 \[4\] in the checkpoint"):
        copy_tensors(here, {"a": torch.ones(2), "b": torch.ones(4)}, where="llm-pp00")


def batches(plan: JobPlan) -> list[Content]:
    kinds = [["iat", "ta", "it", "aii"], ["a", "ti", "tt", "ia"]][: plan.layout.dp_size]
    return [make_content(plan, kinds, seed=seed) for seed in range(3)]


def train_and_resume(rank: int, plan: JobPlan, contents: list[Content]) -> dict[str, Any]:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    losses = []
    start = engine.state()
    engine.accumulate(rank_inputs(plan, rank, contents[0], step=1))
    gradients = engine.gradients()
    losses.append(engine.update())
    saved = engine.state()
    for step in (2, 3):
        losses.append(engine.step(rank_inputs(plan, rank, contents[step - 1], step=step)))
    final = engine.state()
    # Objects that other ranks write: everyone has all of them in a checkpoint.
    everywhere: list[dict[str, Any]] = [{}] * plan.layout.world_size
    torch.distributed.all_gather_object(everywhere, saved)
    names = [name for objects in everywhere for name in objects]
    checkpoint = {name: value for objects in everywhere for name, value in objects.items()}
    needed: list[str] = []

    def read(name: str) -> Any:
        needed.append(name)
        return checkpoint[name]

    engine.load(read, plan.layout)
    again = [engine.step(rank_inputs(plan, rank, contents[step - 1], step=step)) for step in (2, 3)]
    repeated = engine.state()
    engine.close()
    return {
        "start": start, "gradients": gradients, "results": losses, "again": again, "final": final,
        "repeated": repeated, "names": names, "needed": needed,
    }  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    plan = tiny_plan(pipeline=2, replicas=2)
    return run_ranks(4, train_and_resume, plan, batches(plan))


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {prefix: state}
    return {k: v for key, value in state.items() for k, v in flat(value, f"{prefix}/{key}").items()}


def assert_same_bits(a: Any, b: Any) -> None:
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for key, value in a.items():
        same = torch.equal(value, b[key]) if torch.is_tensor(value) else value == b[key]
        assert same, key


def test_steps_after_a_load_are_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        for result, repeated in zip(seen["results"][1:], seen["again"], strict=True):
            assert result.loss_sums == repeated.loss_sums
            assert result.grad_norm == repeated.grad_norm
        assert_same_bits(seen["final"], seen["repeated"])
        changed = flat(seen["start"]).keys() & flat(seen["final"]).keys()
        assert any(
            torch.is_tensor(flat(seen["start"])[k])
            and not torch.equal(flat(seen["start"])[k], flat(seen["final"])[k])
            for k in changed
        )


def test_every_object_has_one_writer_and_ranks_need_no_more(ranks: list[dict[str, Any]]) -> None:
    assert sorted(ranks[0]["names"]) == [
        "encoders", "llm-pp00", "llm-pp01",
        "optimizer-00000", "optimizer-00001", "optimizer-00002", "optimizer-00003",
    ]  # fmt: skip
    assert ranks[3]["needed"] == ["llm-pp01", "encoders", "optimizer-00003"]


def test_the_norm_counts_every_parameter_once(ranks: list[dict[str, Any]]) -> None:
    gradients: dict[str, Any] = {}
    for seen in ranks:
        gradients |= seen["gradients"]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    for seen in ranks:
        assert seen["results"][0].grad_norm == pytest.approx(norm, rel=1e-5)


def test_replicas_hold_the_same_weights_and_each_a_part_of_the_moments(
    ranks: list[dict[str, Any]],
) -> None:
    sizes = []
    for rank, seen in enumerate(ranks):
        shards = seen["final"][f"optimizer-{rank:05d}"]["shards"]
        sizes.append(sum(shard["main"].numel() for shard in shards.values()))
    total = sum(
        tensor.numel()
        for seen in ranks
        for name, objects in seen["final"].items()
        if not name.startswith("optimizer")
        for tensor in objects.values()
    )
    assert sum(sizes) == total
    assert max(sizes) < 0.5 * total


def test_encoder_state_that_is_not_sharded_steps_alike(ranks: list[dict[str, Any]]) -> None:
    """The same norm and weights, at the price of whole moments on every rank."""
    plan = tiny_plan(pipeline=2, replicas=2, zero=0)
    whole = run_ranks(4, train_and_resume, plan, batches(plan))
    for a, b in zip(ranks, whole, strict=True):
        for result, expected in zip(b["results"], a["results"], strict=True):
            assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
        assert_same_bits(b["final"], b["repeated"])
    encoders, expected = whole[0]["final"]["encoders"], ranks[0]["final"]["encoders"]
    for name, weight in expected.items():
        torch.testing.assert_close(encoders[name], weight, rtol=1e-3, atol=1e-3)
    shards = whole[3]["final"]["optimizer-00003"]["shards"]
    numbers = sum(s["main"].numel() for key, s in shards.items() if key.startswith("encoders"))
    assert numbers == sum(weight.numel() for weight in encoders.values())


def who_moves(rank: int, plan: JobPlan, content: Content) -> Any:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    before = engine.state()
    result = engine.step(rank_inputs(plan, rank, content))
    after = engine.state()
    engine.close()
    moved = {
        key: float((flat(after)[key] - value).abs().max())
        for key, value in flat(before).items()
        if torch.is_tensor(value) and not key.startswith("/optimizer")
    }
    return moved, result.learning_rate, sorted(after[f"optimizer-{rank:05d}"]["shards"])


def part(moved: dict[str, float], prefix: str) -> float:
    return max(value for key, value in moved.items() if prefix in key)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_frozen_parts_stay_and_have_no_optimizer_state(pipeline: int) -> None:
    plan = tiny_plan(
        pipeline=pipeline,
        num_microbatches=4,
        train={"llm": "frozen", "image": "projector", "audio": "frozen"},
    )
    content = make_content(plan, [["ia", "i", "a", "t"]])
    moved, rate, shards = run_ranks(pipeline, who_moves, plan, content)[0]
    assert part(moved, "image.projector") == pytest.approx(rate, rel=0.2)
    assert part(moved, "image.blocks") == part(moved, "encoders.audio") == part(moved, "/llm.") == 0
    assert all(shard.startswith("encoders.image.projector") for shard in shards)


def test_the_scale_of_an_encoder_applies_to_it_alone() -> None:
    plan = tiny_plan(num_microbatches=2, optimizer={"clipGradNorm": 0, "weightDecay": 0})
    model = plan.spec.model
    assert model.encoders.image is not None
    image = model.encoders.image.model_copy(update={"learning_rate_scale": 0.1})
    encoders = model.encoders.model_copy(update={"image": image})
    spec = plan.spec.model_copy(update={"model": model.model_copy(update={"encoders": encoders})})
    content = make_content(plan, [["ia", "i"]])
    moved, rate, _ = run_ranks(1, who_moves, plan.model_copy(update={"spec": spec}), content)[0]
    # Adam's first step moves every weight by the rate.
    assert part(moved, "image.projector") == pytest.approx(0.1 * rate, rel=0.05)
    assert part(moved, "audio.projector") == pytest.approx(rate, rel=0.05)
    assert part(moved, "output_layer") == pytest.approx(rate, rel=0.05)


def test_weight_decay_spares_norms_and_biases() -> None:
    """Without loss tokens there is no gradient, so what moves is decay."""
    plan = tiny_plan(num_microbatches=1, optimizer={"weightDecay": 0.5})
    content = make_content(plan, [["ia"]])
    silent = [[[replace(piece, has_loss=False) for piece in content[0][0]]]]
    moved, _, _ = run_ranks(1, who_moves, plan, silent)[0]
    decayed = {key for key, value in moved.items() if value > 0}
    assert decayed
    assert not any("norm" in key or key.endswith("bias") for key in decayed)
    assert all(key in decayed for key in moved if "norm" not in key and not key.endswith("bias"))


def losses_of(rank: int, plan: JobPlan, content: Content) -> Any:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    result = engine.step(rank_inputs(plan, rank, content))
    moved = engine.state().get("llm-pp00")
    engine.close()
    return result, moved


def test_c06_a_rank_without_loss_tokens_changes_nothing() -> None:
    """Two replicas, one of which has no loss token, step like the other one alone."""
    both = tiny_plan(replicas=2, num_microbatches=2)
    content = make_content(both, [["iat", "ta"], ["ta", "i"]])
    silent = [[replace(piece, has_loss=False) for piece in microbatch] for microbatch in content[1]]
    together, weights = run_ranks(2, losses_of, both, [content[0], silent])[0]
    lone = tiny_plan(num_microbatches=2)
    alone, expected = run_ranks(1, losses_of, lone, [content[0]])[0]
    assert together.loss_sums["all"].tokens == alone.loss_sums["all"].tokens
    assert together.loss_sums["all"].loss == pytest.approx(alone.loss_sums["all"].loss, rel=1e-6)
    assert together.grad_norm == pytest.approx(alone.grad_norm, rel=1e-5)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


def gradients_of(rank: int, plan: JobPlan, content: Content) -> Any:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    engine.accumulate(rank_inputs(plan, rank, content))
    sums, _ = engine.measure()
    found = engine.gradients()
    engine.close()
    return sums, found


def test_c06_loss_is_weighed_by_tokens_not_by_ranks() -> None:
    """Four samples on one rank and one on another count like five on one."""
    plan = tiny_plan(replicas=2, num_microbatches=1)
    content = make_content(plan, [["tttt"], ["t"]])
    sums, spread = run_ranks(2, gradients_of, plan, content)[0]
    tokens = [sum(int(p.targets[1].sum()) for p in replica[0]) for replica in content]
    assert tokens[0] > 2 * tokens[1]
    assert sums["all"].tokens == sums["text"].tokens == sum(tokens)
    assert sums["image"].tokens == sums["audio"].tokens == 0
    lone = tiny_plan(num_microbatches=1)
    _, together = run_ranks(1, gradients_of, lone, [[content[0][0] + content[1][0]]])[0]
    for name, gradient in together.items():
        torch.testing.assert_close(spread[name], gradient, rtol=1e-4, atol=1e-7)
