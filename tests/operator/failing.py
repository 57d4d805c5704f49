"""A job that runs, and what befalls its pods, for tests."""

from typing import Any

from omni_contract.records import PodEnd
from tests.operator.world import World, job


def run(world: World, step: int = 5, **spec: Any) -> None:
    """A job runs and has made steps."""
    world.apply(job(**spec))
    world.pass_s(5)
    world.beat(step=step)
    world.settle()


def end(world: World, index: int, code: int = 1, **fields: Any) -> None:
    """A supervisor ends and says why."""
    status = world.status()
    told = {"attempt": status.attempt, "generation": 0, "exit_code": code, "step": 5}
    message = PodEnd.model_validate(told | fields).model_dump_json()
    world.cluster.end_container(world.pod_name(index), exit_code=code, message=message)
