"""Parameter counts against the real modules; those of the encoders stand in tests/cli/test_plan."""

import pytest

from omni_contract.plan import JobPlan
from omni_planner.size import stage_sizes
from omni_trainer.device import Device
from omni_trainer.train import Engine
from tests.trainer.inputs import tiny_plan
from tests.trainer.ranks import run_ranks


def llm_parameters(rank: int, plan: JobPlan) -> int:
    engine = Engine.build(plan, rank, Device.open("cpu"))
    saved = engine.state()[f"llm-pp{plan.layout.coords(rank).pp_rank:02d}"]
    engine.close()
    return sum(tensor.numel() for tensor in saved.values())


@pytest.mark.parametrize("pipeline", [1, 2])
def test_llm_parameters_are_counted_exactly(pipeline: int) -> None:
    plan = tiny_plan(pipeline=pipeline)
    counted = [size.llm_parameters for size in stage_sizes(plan)]
    assert run_ranks(pipeline, llm_parameters, plan) == counted
