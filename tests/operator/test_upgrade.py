"""Pods of one attempt run one version, whatever an operator that comes later is told."""

from typing import Any

from omni_contract.names import ANNOTATION_RESTART
from omni_contract.placement import JobPlacement
from omni_contract.spec_run import RestartAction
from omni_operator.kinds import CONFIG_MAP, JOB, POD
from omni_operator.render.names import ObjectNames
from omni_operator.render.objects import read_placement, render_placement
from omni_operator.settings import Settings
from omni_operator.watch.observe import read_job
from tests.fakes.fake_cluster import Killed
from tests.operator.failing import end, run
from tests.operator.world import World

OLD = Settings(image="trainer:1", data_image="data:1")
NEW = Settings(image="trainer:2", data_image="data:2")


def images(world: World) -> set[tuple[str, str]]:
    """Of trainer and data service of all pods."""
    return {
        (pod["spec"]["containers"][0]["image"], pod["spec"]["initContainers"][0]["image"])
        for pod in world.pods()
    }


def upgrade(world: World, settings: Settings = NEW) -> None:
    world.settings = settings
    world.restart()


def ask(raw: dict[str, Any]) -> None:
    raw["metadata"]["annotations"] = {ANNOTATION_RESTART: "1"}


def test_a_pod_that_is_replaced_gets_the_images_of_those_that_stay() -> None:
    with World(settings=OLD) as world:
        run(world)
        upgrade(world)
        for number in (2, 3):  # the second attempt has them from the first, the third from that
            before = set(world.nodes_of())
            end(world, 2)
            world.pass_s(5)
            status = world.status()
            assert (status.attempt, status.opened_by) == (number, RestartAction.REPLACE_POD)
            assert status.phase == "Running" and before & set(world.nodes_of())
            assert images(world) == {("trainer:1", "data:1")}
            assert status.placement is not None and status.placement.data_image == "data:1"
            world.beat(step=10 * number)


def test_a_group_that_is_restarted_beside_others_gets_theirs() -> None:
    with World(settings=OLD) as world:
        run(world)
        upgrade(world)
        world.cluster.remove(POD, world.pod_name(1))
        world.pass_s(5)
        assert world.status().opened_by is RestartAction.RESTART_GROUP
        assert len(world.pods()) == 4
        assert images(world) == {("trainer:1", "data:1")}


def test_all_pods_made_anew_get_the_images_of_now() -> None:
    with World(settings=OLD) as world:
        run(world)
        upgrade(world)
        world.edit("stamps", ask)
        world.pass_s(10)
        assert world.status().attempt == 2
        assert images(world) == {("trainer:2", "data:2")}


def test_so_do_those_of_a_job_that_was_suspended() -> None:
    with World(settings=OLD) as world:
        run(world)
        world.edit("stamps", lambda raw: raw["spec"].update(suspend=True))
        world.pass_s(60)
        upgrade(world)
        world.edit("stamps", lambda raw: raw["spec"].update(suspend=False))
        world.pass_s(10)
        assert images(world) == {("trainer:2", "data:2")}


def test_an_attempt_that_was_being_made_gets_the_images_it_began_with() -> None:
    """The operator falls after each write of a start, and its successor is another version."""
    num_deaths = 0
    for n in range(1, 12):
        with World(settings=OLD) as world:
            world.cluster.kill_after(n)
            try:
                run(world)
            except Killed:
                num_deaths += 1
                upgrade(world)
                world.pass_s(5)
            assert len(world.pods()) == 4 and len(images(world)) == 1, f"after write {n}"
    assert num_deaths == 11


def test_a_job_that_names_its_images_has_those() -> None:
    with World(settings=OLD) as world:
        run(world, podTemplate={"image": "mine:1"})
        upgrade(world)
        end(world, 2)
        world.pass_s(5)
        assert images(world) == {("mine:1", "data:1")}


def test_a_placement_of_an_operator_that_kept_no_images_goes_on_with_those_of_now() -> None:
    with World(settings=OLD) as world:
        run(world)
        forget_images(world)
        upgrade(world)
        end(world, 2)
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert images(world) == {("trainer:1", "data:1"), ("trainer:2", "data:2")}


def forget_images(world: World) -> None:
    """Make the placement one of an operator that did not write them."""
    job = read_job(world.cluster.find(JOB, "stamps"))
    name = ObjectNames.of(job).placement(1)
    placement = read_placement(world.cluster.find(CONFIG_MAP, name))
    assert (placement.image, placement.data_image) == ("trainer:1", "data:1")
    text = placement.model_dump(exclude={"image", "data_image"})
    old = render_placement(job, JobPlacement.model_validate(text))
    world.cluster.change(CONFIG_MAP, name, lambda raw: raw.update(binaryData=old["binaryData"]))
