"""Compiled plans for the trainer's tests."""

from typing import Any

from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_planner.compile import compile_plan
from tests.contract.jobs import changed


def plan_of(
    uri: str, *, nodes: int = 1, name: str = "stamps", seed: int = 1, **checkpoint: Any
) -> JobPlan:
    """The demo job on `nodes` x 1 ranks in one stage, saving under `uri`."""
    job = changed("metadata.name", name)
    spec = job["spec"]
    spec["parallelism"] = {"llm": {"pipeline": 1}}
    spec["resources"] = {"nodes": nodes, "ranksPerNode": 1, "device": "cpu"}
    fields = {name.rstrip("_"): value for name, value in checkpoint.items()}
    spec["train"]["seed"] = seed
    spec["checkpoint"] = {"uri": uri, "every": 20, "keep": 2, **fields}
    return compile_plan(Job.read(job))
