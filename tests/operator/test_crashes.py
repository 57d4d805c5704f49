"""The operator ended after each single write, and started again with nothing remembered."""

import re
from collections.abc import Callable
from typing import Any

from omni_contract.names import ANNOTATION_RESTART
from omni_operator.kinds import CONFIG_MAP, POD
from omni_operator.render.objects import read_placement
from tests.fakes.fake_cluster import Killed
from tests.operator.world import World, job


class Mortal:
    """Plays a story and restarts the operator whenever it is killed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.deaths = 0

    def until(self, is_so: Callable[[World], bool], *, within_s: float = 600) -> None:
        """Let time pass until something is so."""
        end_s = self.world.cluster.now_s + within_s
        while not is_so(self.world):
            assert self.world.cluster.now_s < end_s, self.world.status()
            try:
                self.world.pass_s(1)
            except Killed:
                self.deaths += 1
                self.world.restart()


def tell_story(world: World) -> int:
    """A start, a lost node, a replaced pod, the end."""
    mortal = Mortal(world)
    world.apply(job(nodes=2))
    mortal.until(lambda w: w.status().phase == "Running")
    world.beat(step=5)
    world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
    mortal.until(lambda w: w.status().attempt == 2 and w.status().phase == "Running")
    world.beat(step=9, phase="done")
    world.complete()
    mortal.until(lambda w: w.status().phase == "Completed" and not w.pods())
    return mortal.deaths


def outcome(world: World) -> dict[str, Any]:
    """What must not depend on when the operator died: all but times."""
    status = world.status().model_dump(
        exclude={"opened_at", "completion_time", "start_time", "goodput", "active_seconds"}
    )
    for condition in status["conditions"]:
        del condition["last_transition_time"]
        condition["message"] = _timeless(condition["message"])
    for incident in status["incidents"]:
        del incident["time"], incident["seconds"]
        incident["message"] = _timeless(incident["message"])
    del status["progress"]["update_time"]
    placements = [
        read_placement(raw)
        for raw in world.cluster.objects(CONFIG_MAP)
        if "-placement-" in raw["metadata"]["name"]
    ]
    return {"status": status, "placements": placements, "names": world.cluster.names(CONFIG_MAP)}


def _timeless(message: str) -> str:
    return re.sub(r"\d+ s\b", "some s", message)


def count_writes(story: Callable[[World], int], *, nodes: int) -> tuple[int, dict[str, Any]]:
    with World(nodes=nodes) as world:
        story(world)
        return len(world.cluster.writes), outcome(world)


def test_c40_ended_after_any_write_the_outcome_is_the_same() -> None:
    """NodeLost is counted once, whatever was written when the operator fell."""
    num_writes, expected = count_writes(tell_story, nodes=4)
    assert expected["status"]["budget"]["infrastructure"] == 1
    assert expected["status"]["attempt"] == 2
    for n in range(1, num_writes + 1):
        with World(nodes=4) as world:
            world.cluster.kill_after(n)
            assert tell_story(world) == 1, f"write {n} of {num_writes}"
            assert outcome(world) == expected, f"ended after write {n} of {num_writes}"


def tell_of_people(world: World) -> int:
    """A pod deleted by hand, a restart that is asked for, a suspension, the end."""
    mortal = Mortal(world)
    world.apply(job(nodes=2))
    mortal.until(lambda w: w.status().phase == "Running")
    world.beat(step=5)
    world.cluster.remove(POD, world.pod_name(1))
    mortal.until(lambda w: w.status().attempt == 2 and w.status().phase == "Running")
    world.edit("stamps", _ask)
    mortal.until(lambda w: w.status().attempt == 3 and w.status().phase == "Running")
    world.edit("stamps", lambda raw: raw["spec"].update(suspend=True))
    mortal.until(lambda w: w.status().phase == "Suspended")
    world.edit("stamps", lambda raw: raw["spec"].update(suspend=False))
    mortal.until(lambda w: w.status().attempt == 4 and w.status().phase == "Running")
    world.beat(step=9, phase="done")
    world.complete()
    mortal.until(lambda w: w.status().phase == "Completed" and not w.pods())
    return mortal.deaths


def _ask(raw: dict[str, Any]) -> None:
    raw["metadata"]["annotations"] = {ANNOTATION_RESTART: "1"}


def test_c40_also_between_what_people_ask_for() -> None:
    num_writes, expected = count_writes(tell_of_people, nodes=3)
    assert expected["status"]["restarts"] == 1
    assert expected["status"]["attempt"] == 4
    for n in range(1, num_writes + 1):
        with World(nodes=3) as world:
            world.cluster.kill_after(n)
            assert tell_of_people(world) == 1, f"write {n} of {num_writes}"
            assert outcome(world) == expected, f"ended after write {n} of {num_writes}"
