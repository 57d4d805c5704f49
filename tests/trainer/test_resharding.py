"""A job that goes on with another number of replicas trains as the undisturbed one would have."""

import pickle
from typing import Any

import pytest
import torch

from omni_contract.plan import JobPlan
from omni_trainer.device import Device
from omni_trainer.train import Engine
from tests.trainer.inputs import Content, make_content, rank_inputs, tiny_plan
from tests.trainer.ranks import run_ranks

NUM_SEQUENCES = 12
SAVED, LAST = 2, 4
KINDS = ["iat", "ta", "it", "aii", "a", "ti", "tt", "ia", "t", "ai", "i", "tta"]
TOLERANCE = 1e-5


def plan_of(pipeline: int, replicas: int, zero: int) -> JobPlan:
    return tiny_plan(
        pipeline=pipeline, replicas=replicas, zero=zero, num_microbatches=NUM_SEQUENCES // replicas
    )


def content_of(plan: JobPlan, step: int) -> Content:
    """The same sequences whatever the layout, dealt to its replicas."""
    (whole,) = make_content(plan_of(1, 1, 1), [KINDS], seed=step)
    size = plan.num_microbatches
    return [whole[start : start + size] for start in range(0, NUM_SEQUENCES, size)]


def train(
    rank: int, plan: JobPlan, steps: range, saved: bytes | None, saved_by: JobPlan
) -> dict[str, Any]:
    """The steps, after a load of what was pickled."""
    engine = Engine.build(plan, rank, Device.open("cpu"))
    if saved is not None:
        engine.load(pickle.loads(saved).__getitem__, saved_by.layout)
    gradients: list[dict[str, Any]] = []
    norms: list[float] = []
    states: list[dict[str, Any]] = []
    for step in steps:
        engine.accumulate(rank_inputs(plan, rank, content_of(plan, step), step=step))
        gradients.append(engine.gradients())
        norms.append(engine.update().grad_norm)
        states.append(engine.state())
    engine.close()
    return {"gradients": gradients, "norms": norms, "states": states}


def whole(ranks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """The checkpoint of all ranks after their step of this index."""
    return {k: v for seen in ranks for k, v in seen["states"][index].items()}


def optimizer_values(saved: dict[str, Any]) -> dict[str, torch.Tensor]:
    """State of each parameter joined from all shards, as one tensor."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in saved.items():
        if not name.startswith("optimizer"):
            continue
        for key, shard in value["shards"].items():
            parameter, _, place = key.rpartition("[")
            for field in ("main", "exp_avg", "exp_avg_sq", "step"):
                start = int(place.partition(":")[0])
                parts.setdefault(f"{parameter}/{field}", {})[start] = shard[field].view(-1)
    return {k: torch.cat([v for _, v in sorted(p.items())]) for k, p in parts.items()}


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """Ranks of a run from the first step to the last, by its layout."""
    runs: dict[tuple[int, int, int], list[dict[str, Any]]] = {}

    def run(pipeline: int, replicas: int, zero: int) -> list[dict[str, Any]]:
        key = (pipeline, replicas, zero)
        if key not in runs:
            plan = plan_of(*key)
            runs[key] = run_ranks(pipeline * replicas, train, plan, range(1, LAST + 1), None, plan)
        return runs[key]

    return run


@pytest.mark.parametrize(
    ("pipeline", "before", "after", "zero"),
    [(1, 4, 2, 1), (1, 4, 3, 1), (1, 2, 4, 1), (2, 2, 1, 1), (2, 1, 2, 1),
     (2, 2, 1, 0)],
)  # fmt: skip
def test_another_number_of_replicas_goes_on_alike(
    undisturbed: Any, pipeline: int, before: int, after: int, zero: int
) -> None:
    old = undisturbed(pipeline, before, zero)
    saved = whole(old, SAVED - 1)
    plan, saved_by = plan_of(pipeline, after, zero), plan_of(pipeline, before, zero)
    steps = range(SAVED + 1, LAST + 1)
    new = run_ranks(pipeline * after, train, plan, steps, pickle.dumps(saved), saved_by)
    expected: dict[str, Any] = {}
    for seen in old:
        expected |= seen["gradients"][SAVED]
    for seen in new:
        assert seen["norms"] == pytest.approx(old[0]["norms"][SAVED:], rel=1e-4)
        for name, gradient in seen["gradients"][0].items():
            scale = float(expected[name].abs().max())
            torch.testing.assert_close(
                gradient, expected[name], rtol=TOLERANCE, atol=TOLERANCE * scale, msg=name
            )
    ours, theirs = whole(new, -1), whole(old, LAST - 1)
    for name in ["encoders", *(f"llm-pp{stage:02d}" for stage in range(pipeline))]:
        assert ours[name].keys() == theirs[name].keys()
        for parameter, value in ours[name].items():
            torch.testing.assert_close(
                value, theirs[name][parameter], rtol=1e-3, atol=1e-4, msg=parameter
            )


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (4, 2)])
def test_no_value_of_the_optimizer_is_lost_on_the_way(
    undisturbed: Any, before: int, after: int
) -> None:
    """Loaded and saved again without a step: each parameter's state is the same bits."""
    old = undisturbed(1, before, 1)
    saved = whole(old, SAVED - 1)
    again = run_ranks(
        after, reload, plan_of(1, after, 1), pickle.dumps(saved), plan_of(1, before, 1)
    )
    joined: dict[str, Any] = {}
    for seen in again:
        joined |= seen
    theirs, ours = optimizer_values(saved), optimizer_values(joined)
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        if key.endswith("/step"):
            assert set(ours[key].tolist()) == set(value.tolist()) == {float(SAVED)}
        else:
            assert torch.equal(ours[key], value), key
    assert {joined[name]["step"] for name in joined if name.startswith("optimizer")} == {SAVED}


def reload(rank: int, plan: JobPlan, saved: bytes, saved_by: JobPlan) -> dict[str, Any]:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    engine.load(pickle.loads(saved).__getitem__, saved_by.layout)
    state = engine.state()
    engine.close()
    return state
