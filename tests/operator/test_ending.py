"""How jobs come to rest, and that they stay there."""

import pytest

from omni_operator.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, SERVICE
from tests.fakes.fake_cluster import Killed
from tests.operator.world import World, job


def suspend(world: World, value: bool) -> None:
    world.edit("stamps", lambda raw: raw["spec"].update(suspend=value))


def test_c34_a_job_that_is_over_is_never_run_again() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=123, phase="done")
        world.complete()
        world.pass_s(5)
        before = world.status()
        assert before.phase == "Completed"
        world.restart()
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "again"}),
        )
        suspend(world, True)
        world.pass_s(30)
        suspend(world, False)
        world.pass_s(700)
        assert world.pods() == []
        after = world.status()
        assert (after.phase, after.attempt) == ("Completed", before.attempt)
        assert after.completion_time == before.completion_time


@pytest.mark.parametrize(("keep", "left"), [(None, 1), ("Failed", 1), ("None", 0), ("All", 1)])
def test_a_failed_job_holds_no_gpu(keep: str | None, left: int) -> None:
    """Pods that failed may be looked at; those that ran are ended."""
    with World() as world:
        world.apply(job(keepPods=keep, restart={"limit": 0}))
        world.pass_s(5)
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(10)
        assert world.status().phase == "Failed"
        assert world.condition("Failed") == ("True", "UserLimit")
        assert len(world.pods()) == left
        assert all(pod["status"]["phase"] == "Failed" for pod in world.pods())
        writes = len(world.cluster.writes)
        world.pass_s(500)
        assert len(world.cluster.writes) == writes


def break_spec(world: World) -> None:
    """As an operator sees it that takes less than the one before it."""
    world.edit("stamps", lambda raw: raw["spec"].update(keepPods="Perhaps"))


def test_a_failed_job_holds_no_gpu_though_its_spec_is_invalid_by_now() -> None:
    with World() as world:
        world.apply(job(restart={"limit": 0}))
        world.pass_s(5)
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.deliver()
        world.look()
        assert (world.status().phase, len(world.pods())) == ("Failed", 4)
        break_spec(world)
        world.restart()
        world.pass_s(10)
        assert [pod["status"]["phase"] for pod in world.pods()] == ["Failed"]
        assert world.condition("Accepted") == ("False", "InvalidSpec")


def test_a_job_whose_spec_is_invalid_by_now_lives_as_long_as_it_was_to() -> None:
    with World() as world:
        world.apply(job(ttlSecondsAfterFinished=30))
        world.pass_s(5)
        world.complete()
        world.pass_s(5)
        break_spec(world)
        world.restart()
        world.pass_s(40)
        assert world.cluster.names(JOB) == []


def test_keep_pods_all_keeps_those_that_ended_well() -> None:
    with World() as world:
        world.apply(job(keepPods="All"))
        world.pass_s(5)
        world.complete()
        world.pass_s(5)
        assert world.status().phase == "Completed"
        assert len(world.pods()) == 4


def test_after_its_time_to_live_the_job_goes_with_all_it_has() -> None:
    with World() as world:
        world.apply(job(ttlSecondsAfterFinished=100))
        world.pass_s(5)
        world.complete()
        world.pass_s(90)
        assert world.cluster.names(JOB) == ["stamps"]
        world.pass_s(20)
        for kind in (JOB, POD, CONFIG_MAP, SERVICE, LEASE):
            assert world.cluster.names(kind) == []


def test_c38_a_job_is_deleted_whole_while_no_operator_runs() -> None:
    """Nothing holds it: no finalizer, and every object names it as its owner."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        assert "finalizers" not in world.cluster.find(JOB, "stamps")["metadata"]
        world.cluster.remove(JOB, "stamps")
        for kind in (POD, CONFIG_MAP, SERVICE, LEASE):
            assert world.cluster.names(kind) == []
        world.pass_s(5)
        assert world.cluster.names(POD) == []


def test_nothing_is_made_for_a_job_that_is_being_deleted() -> None:
    """Foreground deletion leaves the job until its pods are gone."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.edit(
            "stamps", lambda raw: raw["metadata"].update(deletionTimestamp="2027-01-15T08:00:00Z")
        )
        world.cluster.remove(POD, world.pod_name(1))
        world.pass_s(30)
        assert len(world.pods()) == 3
        assert world.status().attempt == 1


def test_a_suspended_job_holds_nothing_and_goes_on_uncounted() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=8)
        world.pass_s(35)
        suspend(world, True)
        world.settle()
        assert world.condition("Suspended") == ("False", "Suspending")
        assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods())
        world.pass_s(15)
        assert world.status().phase == "Suspended"
        assert world.pods() == []
        ran_s = world.status().active_seconds
        assert 30 < ran_s < 60
        writes = len(world.cluster.writes)
        world.pass_s(1000)
        assert len(world.cluster.writes) == writes
        assert world.status().active_seconds == ran_s
        suspend(world, False)
        world.pass_s(5)
        status = world.status()
        assert status.phase == "Running"
        assert (status.attempt, status.opened_by, status.restarts) == (2, None, 0)
        assert status.progress.step == 8


def test_the_operators_own_deletions_are_no_fault_whenever_it_is_ended() -> None:
    """Killed right after the first pod was deleted, and resumed before it is back."""
    for writes in range(1, 6):
        with World() as world:
            world.apply(job())
            world.pass_s(5)
            suspend(world, True)
            world.cluster.kill_after(writes)
            with pytest.raises(Killed):
                world.settle()
            suspend(world, False)
            world.restart()
            world.pass_s(10)
            status = world.status()
            assert (status.phase, status.restarts, status.incidents) == ("Running", 0, [])


def test_a_suspended_jobs_nodes_are_free_for_others() -> None:
    with World(nodes=4) as world:
        world.apply(job())
        world.pass_s(5)
        suspend(world, True)
        world.pass_s(5)
        world.apply(job("other"))
        world.pass_s(5)
        assert world.status("other").phase == "Running"
        suspend(world, False)
        world.pass_s(5)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")


def test_a_job_born_suspended_waits_without_an_attempt() -> None:
    with World() as world:
        world.apply(job(suspend=True))
        world.pass_s(5)
        assert world.status().phase == "Suspended"
        assert world.status().attempt == 0
        suspend(world, False)
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.status().attempt == 1


def test_resumed_while_pods_still_end_a_new_attempt_waits_for_them() -> None:
    with World(nodes=4) as world:
        world.apply(job())
        world.pass_s(5)
        world.cluster.dead_nodes.add("n0")  # a kubelet that takes its time
        suspend(world, True)
        world.pass_s(5)
        assert world.condition("Suspended") == ("False", "Suspending")
        suspend(world, False)
        world.pass_s(5)
        assert world.condition("Suspended") == ("False", "Resumed")
        assert world.condition("GangReady") == ("False", "WaitingForOldPods")
        world.cluster.dead_nodes.clear()
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert (world.status().attempt, world.status().restarts) == (2, 0)


def test_a_job_that_runs_too_long_fails() -> None:
    with World() as world:
        world.apply(job(activeDeadlineSeconds=100))
        world.pass_s(60)
        assert world.status().phase == "Running"
        suspend(world, True)
        world.pass_s(500)
        suspend(world, False)
        world.pass_s(30)
        assert world.status().phase == "Running"
        world.pass_s(30)
        assert world.condition("Failed") == ("True", "DeadlineExceeded")
        assert world.pods() == []


def test_done_ranks_on_a_node_that_then_dies_have_done_their_work() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=123, phase="done")
        lost = world.pod(3)
        for index in range(3):
            world.cluster.end_container(world.pod_name(index), exit_code=0)
        world.kill_node(str(lost["spec"]["nodeName"]))
        world.pass_s(60)
        assert world.status().phase == "Completed"
        assert world.status().attempt == 1


def test_after_the_last_step_a_pod_and_its_node_may_be_gone() -> None:
    """Nothing is to be placed any more while the other pods write their last words."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=123, phase="done")
        node, name = str(world.pod(3)["spec"]["nodeName"]), world.pod_name(3)
        world.cluster.end_container(name, exit_code=0)
        world.cluster.remove(POD, name)
        world.cluster.remove(NODE, node)
        world.pass_s(30)
        assert world.status().attempt == 1
        for index in range(3):
            world.cluster.end_container(world.pod_name(index), exit_code=0)
        world.pass_s(5)
        assert world.status().phase == "Completed"
