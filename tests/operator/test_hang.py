"""Jobs whose pods all run and that stand still: hangs, and supervisors that lost each other."""

from typing import Any

from omni_contract.records import History
from omni_contract.spec_run import FaultClass, RestartAction
from tests.operator.failing import run
from tests.operator.world import World, job


def test_a_hang_that_nobody_in_the_pods_sees_restarts_them_in_place() -> None:
    with World() as world:
        run(world, restart={"hangAfterSeconds": 100})
        before = world.nodes_of()
        world.pass_s(150)
        assert world.status().attempt == 1
        world.pass_s(30)
        status = world.status()
        assert status.opened_by is RestartAction.RESTART_IN_PLACE
        assert status.incidents[-1].fault is FaultClass.HANG
        assert status.incidents[-1].pod is None
        assert world.nodes_of() == before
        assert status.phase == "Running"
        world.beat(step=5)
        world.pass_s(200)
        assert world.status().opened_by is RestartAction.RESTART_JOB  # whose pod hangs is not known
        assert not set(world.nodes_of()) & set(before)


def test_a_job_that_never_says_a_word_hangs() -> None:
    with World() as world:
        world.apply(job(restart={"startAfterSeconds": 200}))
        world.pass_s(250)
        assert world.status().attempt == 1
        world.pass_s(30)
        assert world.status().incidents[-1].fault is FaultClass.HANG
        assert "no heartbeat came" in world.status().incidents[-1].message


def test_a_clock_that_is_set_back_hides_neither_progress_nor_its_end() -> None:
    with World() as world:

        def set_back(*, lives_s: int) -> None:
            world.cluster.now_s -= 3600
            for _ in range(lives_s // 10):
                world.wake(world.view.keys())
                world.pass_s(10)

        run(world, restart={"hangAfterSeconds": 100})
        world.pass_s(20)
        world.beat(step=50)
        set_back(lives_s=50)
        assert world.status().progress.step == 50
        set_back(lives_s=180)
        assert world.status().incidents[-1].fault is FaultClass.HANG


def test_nothing_is_lost_or_hung_while_the_watches_are_silent() -> None:
    with World() as world:
        run(world, restart={"hangAfterSeconds": 60})
        world.view.watch_is_healthy = False
        world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
        world.pass_s(600)
        assert world.status().attempt == 1


def part(world: World, **fields: Any) -> None:
    """Rank 0's pod says that the supervisors lost each other."""
    told = {"last_fault": FaultClass.RENDEZVOUS, "last_message": "node 3 left"}
    world.beat(**({"step": 5} | told | fields))


def test_supervisors_that_lost_each_other_and_wait_get_a_new_attempt() -> None:
    with World() as world:
        run(world)
        before = world.nodes_of()
        world.pass_s(15)
        part(world)
        world.pass_s(10)
        assert world.status().attempt == 1
        world.pass_s(20)
        status = world.status()
        assert (status.attempt, status.opened_by) == (2, RestartAction.RESTART_JOB)
        assert status.incidents[-1].fault is FaultClass.RENDEZVOUS
        assert "node 3 left" in status.incidents[-1].message
        assert status.budget.infrastructure == 1
        assert not set(world.nodes_of()) & set(before)
        world.pass_s(60)
        assert world.status().attempt == 2, "the heartbeat of an older attempt says nothing"


def test_what_took_supervisors_apart_is_told_before_that_they_parted() -> None:
    with World() as world:
        run(world)
        world.pass_s(15)
        part(world)
        world.pass_s(2)
        world.kill_node(str(world.pod(3)["spec"]["nodeName"]))
        world.pass_s(60)
        status = world.status()
        assert [incident.fault for incident in status.incidents] == [FaultClass.NODE_LOST]
        assert (status.attempt, status.phase) == (2, "Running")


def test_supervisors_that_met_again_in_place_have_not_parted() -> None:
    with World() as world:
        run(world)
        spent = History(infrastructure_restarts=1, restarts_without_progress=1, highest_step=5)
        part(world, generation=1, phase="starting", history=spent)
        world.pass_s(60)
        assert (world.status().attempt, world.status().generation) == (1, 1)
        part(world, generation=1, history=spent, last_message="node 1 left")
        world.pass_s(30)
        assert world.status().attempt == 2, "they parted once more"
