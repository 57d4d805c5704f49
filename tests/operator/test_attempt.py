"""What follows a fault, or the wish of somebody: which restart, and on which nodes."""

from typing import Any

from omni_contract.names import ANNOTATION_NODE, ANNOTATION_RESTART
from omni_contract.spec_run import FaultClass, RestartAction
from omni_operator.kinds import NODE, POD
from tests.operator.failing import end, run
from tests.operator.world import World, job, node


def test_a_failed_pod_is_replaced_and_the_others_stay() -> None:
    with World() as world:
        run(world)
        before = world.nodes_of()
        failed = world.pod_name(2)
        end(world, 2, fault=FaultClass.APP_ERROR, message="no such file")
        world.pass_s(5)
        status = world.status()
        assert status.phase == "Running"
        assert (status.attempt, status.opened_by) == (2, RestartAction.REPLACE_POD)
        assert (status.budget.user, status.budget.infrastructure, status.restarts) == (1, 0, 1)
        after = world.nodes_of()
        assert set(before) - set(after) == {failed}
        assert {name: after[name] for name in set(before) & set(after)} == {
            name: node for name, node in before.items() if name != failed
        }
        assert "no such file" in status.incidents[-1].message


def test_c39_a_pod_deleted_by_hand_takes_its_group_along() -> None:
    """Stages of one replica: nodes 0 and 2 of the plan, 1 and 3."""
    with World() as world:
        run(world)
        before = world.nodes_of()
        kept = {world.pod_name(0), world.pod_name(2)}
        world.cluster.remove(POD, world.pod_name(1))
        world.pass_s(5)
        assert world.status().opened_by is RestartAction.RESTART_GROUP
        assert world.status().phase == "Running"
        after = world.nodes_of()
        assert set(after) & set(before) == kept
        assert sorted(map(str, after.values())) == sorted(map(str, before.values()))


def test_pods_that_were_all_deleted_by_hand_are_one_fault() -> None:
    with World() as world:
        run(world)
        for name in list(world.nodes_of()):
            world.cluster.remove(POD, name)
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.status().attempt == 2
        assert world.status().restarts == 1


def test_the_first_failure_is_the_cause_and_pods_that_lost_a_peer_are_not() -> None:
    """The peers' end is told first, and the cause seconds later."""
    with World() as world:
        run(world)
        end(world, 0, 75, message="lost a peer")
        end(world, 1, 75, message="lost a peer")
        world.pass_s(3)
        assert world.status().attempt == 1
        end(world, 3, fault=FaultClass.OOM, message="no memory")
        world.pass_s(5)
        status = world.status()
        assert [incident.fault for incident in status.incidents] == [FaultClass.OOM]
        assert (status.attempt, status.phase) == (2, "Running")


def test_pods_that_lost_a_peer_wait_for_the_verdict_on_its_node() -> None:
    """Three supervisors end before the control plane says that the node of the fourth is gone."""
    with World() as world:
        run(world)
        lost = str(world.pod(3)["spec"]["nodeName"])
        for index in range(3):
            end(world, index, 75, message="lost a peer")
        world.pass_s(5)
        world.kill_node(lost)
        world.pass_s(60)
        status = world.status()
        assert [incident.fault for incident in status.incidents] == [FaultClass.NODE_LOST]
        assert (status.attempt, status.phase) == (2, "Running")


def test_pods_that_lost_a_peer_and_nobody_says_why_restart_the_job() -> None:
    with World() as world:
        run(world)
        end(world, 0, 75, message="lost a peer")
        world.pass_s(15)
        status = world.status()
        assert [incident.fault for incident in status.incidents] == [FaultClass.RENDEZVOUS]
        assert status.opened_by is RestartAction.RESTART_JOB


def test_thirty_seconds_after_its_node_fell_silent_a_job_that_stands_still_moves() -> None:
    with World() as world:
        run(world)
        world.pass_s(15)
        world.kill_node(str(world.pod(0)["spec"]["nodeName"]))
        world.pass_s(20)
        assert world.status().attempt == 1
        assert world.condition("Degraded") == ("True", "NodeNotReady")
        world.pass_s(15)
        assert (world.status().attempt, world.status().phase) == (2, "Running")
        assert world.condition("Degraded")[0] == "False"


def test_while_steps_are_made_a_silent_node_only_degrades() -> None:
    with World() as world:
        run(world)
        world.kill_node(str(world.pod(0)["spec"]["nodeName"]))
        for step in range(6, 30):
            world.beat(step=step)
            world.pass_s(10)
        assert world.status().attempt == 1
        assert world.condition("Degraded") == ("True", "NodeNotReady")
        world.revive_node(str(world.pod(0)["spec"]["nodeName"]))
        world.pass_s(2)
        assert world.condition("Degraded")[0] == "False"


def test_nodes_lost_together_cost_one_restart() -> None:
    with World(nodes=8) as world:
        run(world)
        for index in (0, 1, 3):
            world.kill_node(str(world.pod(index)["spec"]["nodeName"]))
            world.pass_s(2)
        world.pass_s(60)
        assert (world.status().attempt, world.status().phase) == (2, "Running")
        assert world.status().restarts == 1


def test_a_cordoned_node_is_left_only_when_there_is_another() -> None:
    with World(nodes=4) as world:
        run(world)
        left = str(world.pod(1)["spec"]["nodeName"])
        world.cluster.change(NODE, left, lambda raw: raw["spec"].update(unschedulable=True))
        world.pass_s(60)
        assert world.status().attempt == 1
        assert world.condition("Degraded") == ("True", "NodeTainted")
        world.cluster.put(node("n9"))
        world.ready("n9")
        world.pass_s(5)
        assert (world.status().attempt, world.status().phase) == (2, "Running")
        assert world.status().incidents[-1].fault is FaultClass.NODE_TAINTED
        assert left not in world.nodes_of().values()


def test_a_node_with_a_broken_gpu_is_left_out_for_a_time() -> None:
    with World(nodes=5) as world:
        run(world, restart={"excludeNodeSeconds": 1000})
        bad = str(world.pod(1)["spec"]["nodeName"])
        end(world, 1, fault=FaultClass.GPU_HARDWARE, message="fell off the bus")
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert bad not in world.nodes_of().values()
        assert [node.name for node in world.status().excluded_nodes] == [bad]
        good = str(world.pod(0)["spec"]["nodeName"])
        world.beat(step=9)
        world.kill_node(good)
        world.pass_s(60)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")
        assert "left out after a fault" in world.message("Placed")
        world.pass_s(1000)
        assert world.status().phase == "Running"
        assert bad in world.nodes_of().values()


def test_a_mistake_in_the_job_ends_it_with_its_words() -> None:
    with World() as world:
        run(world)
        end(world, 1, 2, message="s3://omni/pictures: no such bucket")
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "StartError")
        assert "no such bucket" in world.message("Failed")


def test_a_restart_asked_for_with_more_words_than_a_status_holds_is_done_once() -> None:
    with World() as world:
        run(world)
        asked = {ANNOTATION_RESTART: "because " * 100}
        world.edit("stamps", lambda raw: raw["metadata"].update(annotations=asked))
        world.pass_s(20)
        assert (world.status().attempt, world.status().phase) == (2, "Running")


def test_pods_that_do_not_run_in_time_are_withdrawn_unpaid() -> None:
    with World() as world:
        world.cluster.dead_nodes.add("n2")  # its kubelet starts nothing
        world.apply(job(restart={"readyAfterSeconds": 100}))
        world.pass_s(95)
        assert world.condition("Running")[0] == "False"
        assert world.status().phase == "Starting"
        world.pass_s(20)
        status = world.status()
        assert status.incidents[-1].fault is FaultClass.PENDING_TIMEOUT
        assert "readyAfterSeconds 100" in status.incidents[-1].message
        assert (status.attempt, status.restarts) == (2, 0)


def test_a_pod_is_replaced_that_runs_on_with_a_dead_data_service() -> None:
    with World() as world:
        run(world)
        bad, before = world.pod_name(1), set(world.nodes_of())

        def back_off(raw: dict[str, Any]) -> None:
            (data,) = raw["status"]["initContainerStatuses"]
            data |= {
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
            }

        world.cluster.change(POD, bad, back_off)
        world.pass_s(5)
        status = world.status()
        assert status.incidents[-1].fault is FaultClass.DATA_SERVICE
        assert (status.opened_by, status.phase) == (RestartAction.REPLACE_POD, "Running")
        assert before - set(world.nodes_of()) == {bad}


def test_a_pod_that_gets_no_node_for_another_reason_than_gpus_goes_elsewhere() -> None:
    """The scheduler says that memory is short, of which placement knows nothing."""
    with World(nodes=5) as world:
        world.apply(job())
        world.settle()
        full = str(world.pod(3)["metadata"]["annotations"][ANNOTATION_NODE])
        stuck = world.pod_name(3)
        world.cluster.dead_nodes.add(full)
        said = "0/5 nodes are available: 1 Insufficient memory"

        def pend(raw: dict[str, Any]) -> None:
            raw["status"]["conditions"] = [
                {
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": said,
                }
            ]

        world.cluster.change(POD, stuck, pend)
        world.pass_s(25)
        assert world.status().attempt == 1
        world.pass_s(15)
        status = world.status()
        assert (status.attempt, status.phase, status.restarts) == (2, "Running", 0)
        assert said in status.incidents[-1].message
        assert [node.name for node in status.excluded_nodes] == [full]
        assert full not in world.nodes_of().values()


def test_a_kubelet_that_takes_no_pod_is_avoided() -> None:
    with World(nodes=5) as world:
        run(world)
        full, name = str(world.pod(1)["spec"]["nodeName"]), world.pod_name(1)

        def refuse(raw: dict[str, Any]) -> None:
            raw["status"] |= {"phase": "Failed", "reason": "OutOfcpu", "message": "no cpu"}

        world.cluster.change(POD, name, refuse)
        world.pass_s(5)
        assert world.status().incidents[-1].fault is FaultClass.PENDING_TIMEOUT
        assert full not in world.nodes_of().values()
        assert world.status().phase == "Running"


def test_a_status_that_somebody_cut_short_stops_nothing() -> None:
    with World() as world:
        run(world)

        def cut(raw: dict[str, Any]) -> None:
            for field in ("planHash", "numNodes", "openedAt", "openedBy"):
                raw["status"].pop(field, None)

        world.edit("stamps", cut)
        world.restart()
        world.pass_s(5)
        end(world, 1, fault=FaultClass.OOM)
        world.pass_s(15)
        assert world.status().phase == "Running"
        assert world.status().attempt == 2


def ask(world: World, value: str) -> None:
    world.edit(
        "stamps", lambda raw: raw["metadata"].update(annotations={ANNOTATION_RESTART: value})
    )


def test_a_restart_that_is_asked_for_happens_once_and_costs_nothing() -> None:
    with World() as world:
        run(world)
        before = set(world.nodes_of())
        ask(world, "1")
        world.pass_s(10)
        status = world.status()
        assert (status.attempt, status.opened_by, status.restarts) == (
            2, RestartAction.RESTART_JOB, 0,
        )  # fmt: skip
        assert not before & set(world.nodes_of())
        world.restart()
        world.pass_s(700)
        assert world.status().attempt == 2
        ask(world, "2")
        world.pass_s(10)
        assert world.status().attempt == 3


def test_an_annotation_from_before_the_start_asks_for_nothing() -> None:
    with World() as world:
        body = job()
        body["metadata"]["annotations"] = {ANNOTATION_RESTART: "1"}
        world.apply(body)
        world.pass_s(30)
        assert world.status().attempt == 1


def test_a_restart_of_the_job_takes_the_nodes_it_had() -> None:
    with World(nodes=8) as world:
        run(world)
        before = sorted(map(str, world.nodes_of().values()))
        ask(world, "1")
        world.pass_s(10)
        assert sorted(map(str, world.nodes_of().values())) == before
