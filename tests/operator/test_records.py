"""The ConfigMaps of a job: those that nobody can read, and those that are of no use any more."""

import pytest

from omni_contract.names import ANNOTATION_RESTART as RESTART
from omni_operator.api import Refused
from omni_operator.kinds import CONFIG_MAP
from omni_operator.state import JobKey
from tests.operator.world import World, job


def test_a_placement_that_nobody_can_read_stops_no_other_job() -> None:
    with World() as world:
        for name in ("first", "second"):
            world.apply(job(name, nodes=2))
        world.pass_s(5)
        (spoilt,) = [n for n in world.cluster.names(CONFIG_MAP) if n.startswith("first-")
                     and "-placement-" in n]  # fmt: skip
        world.cluster.change(CONFIG_MAP, spoilt, lambda raw: raw.update(binaryData={}))
        world.restart()
        second = JobKey(namespace="default", name="second")
        assert world.reconcile(second) is not None
        first = JobKey(namespace="default", name="first")
        assert world.reconcile(first) == 60
        assert world.condition("Degraded", "first") == ("True", "RecordUnreadable")
        assert f"ConfigMap {spoilt}: no key of binaryData" in world.message("Degraded", "first")


@pytest.mark.parametrize("kind", ["plan", "placement"])
def test_a_job_of_which_something_cannot_be_read_says_so_and_how_to_go_on(kind: str) -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        (spoilt,) = [name for name in world.cluster.names(CONFIG_MAP) if f"-{kind}-" in name]
        world.cluster.change(CONFIG_MAP, spoilt, lambda raw: raw.update(binaryData={}))
        world.restart()
        world.pass_s(5)
        assert world.condition("Degraded") == ("True", "RecordUnreadable")
        writes = len(world.cluster.writes)
        world.pass_s(150)
        assert len(world.cluster.writes) == writes, "it says so once"
        world.cluster.remove(CONFIG_MAP, spoilt)
        world.edit("stamps", lambda raw: raw["metadata"].update(annotations={RESTART: "now"}))
        world.pass_s(90)
        assert world.status().phase == "Running"
        assert world.condition("Degraded") == ("False", "Healthy")


def test_a_job_that_is_over_and_of_which_nothing_can_be_read_says_what_to_mend() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.complete()
        world.pass_s(5)
        assert world.status().phase == "Completed"
        (plan,) = [name for name in world.cluster.names(CONFIG_MAP) if "-plan-" in name]
        world.cluster.change(CONFIG_MAP, plan, lambda raw: raw.update(binaryData={}))
        world.edit("stamps", lambda raw: raw["spec"]["resources"].update(nodes=-1))
        world.restart()
        world.pass_s(5)
        assert world.condition("Accepted") == ("False", "InvalidSpec")


def placements(world: World) -> list[str]:
    """Attempts of which a placement is kept."""
    names = [name for name in world.cluster.names(CONFIG_MAP) if "-placement-" in name]
    return [name.rpartition("-")[2] for name in names]


def test_placements_of_attempts_long_over_are_deleted() -> None:
    with World() as world:
        world.apply(job(restart={"limit": 10, "noProgressLimit": 10}))
        world.pass_s(5)
        world.beat(step=1)
        for step in range(2, 6):
            assert placements(world) == [str(n) for n in range(max(1, step - 2), step)]
            world.cluster.end_container(world.pod_name(1), exit_code=1)
            world.pass_s(5)
            world.beat(step=step)
            world.pass_s(5)
        assert placements(world) == ["4", "5"]


def test_an_operator_that_could_not_delete_placements_leaves_them_to_the_next() -> None:
    with World() as world:
        no = Refused(reason="Forbidden", message="no right to delete", code=403)
        world.cluster.refuses = lambda verb, kind, name: (
            no if (verb, kind) == ("delete", CONFIG_MAP) else None
        )
        world.apply(job(restart={"limit": 10, "noProgressLimit": 10}))
        for step in range(1, 4):
            world.pass_s(5)
            world.beat(step=step)
            world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(5)
        assert (world.status().phase, placements(world)) == ("Running", ["1", "2", "3", "4"])
        world.cluster.refuses = lambda verb, kind, name: None
        world.restart()
        world.pass_s(5)
        assert placements(world) == ["3", "4"]
