"""What follows a fault: which restart, what it counts, when the job is given up."""

from typing import Any

import pytest

from omni_contract.names import ANNOTATION_NODE, ANNOTATION_RESTART
from omni_contract.records import History, PodEnd
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import Incident, JobStatus, RestartBudget
from omni_operator.decisions.attempt import backoff_s, previous_action
from omni_operator.kinds import NODE, POD
from tests.operator.world import World, job, node


def run(world: World, step: int = 5, **spec: Any) -> None:
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


def test_a_drain_that_is_faster_than_steps_costs_a_job_nothing() -> None:
    with World(nodes=12) as world:
        run(world, restart={"limit": 0, "infrastructureLimit": 1, "noProgressLimit": 1})
        for _ in range(5):
            left = str(world.pod(1)["spec"]["nodeName"])
            world.cluster.change(NODE, left, lambda raw: raw["spec"].update(unschedulable=True))
            world.pass_s(5)
            assert world.status().opened_by is RestartAction.REPLACE_POD
        assert (world.status().attempt, world.status().phase) == (6, "Running")
        assert world.status().restarts == 0
        end(world, 2, fault=FaultClass.OOM)
        world.pass_s(5)
        assert (world.status().restarts, world.status().phase) == (1, "Running")


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


def test_the_same_fault_without_a_step_gets_the_next_dearer_restart() -> None:
    with World() as world:
        run(world, restart={"limit": 9, "noProgressLimit": 9})
        opened = []
        for _ in range(4):
            end(world, 2, fault=FaultClass.APP_ERROR)
            world.pass_s(5)
            world.beat(step=5)
            world.settle()
            opened.append(world.status().opened_by)
        assert opened == [
            RestartAction.REPLACE_POD,
            RestartAction.RESTART_GROUP,
            RestartAction.RESTART_JOB,
            RestartAction.RESTART_JOB,
        ]
        world.beat(step=6)
        world.settle()
        end(world, 2, fault=FaultClass.APP_ERROR, step=6)
        world.pass_s(5)
        assert world.status().opened_by is RestartAction.REPLACE_POD


def incident(fault: FaultClass, action: RestartAction) -> Incident:
    return Incident(
        time="2026-01-01T00:00:00Z", fault=fault, action=action, attempt=1, generation=0, message=""
    )


def test_what_was_done_before_the_last_step_escalates_nothing() -> None:
    app = incident(FaultClass.APP_ERROR, RestartAction.RESTART_GROUP)
    lost = incident(FaultClass.NODE_LOST, RestartAction.REPLACE_POD)
    slot = incident(FaultClass.PENDING_TIMEOUT, RestartAction.RESTART_JOB)

    def previous(*incidents: Incident, without: int, step: int = 10) -> RestartAction | None:
        budget = RestartBudget(highest_step=10, without_progress=without)
        status = JobStatus(incidents=list(incidents), budget=budget)
        return previous_action(status, FaultClass.APP_ERROR, step=step)

    assert previous(app, without=1) is RestartAction.RESTART_GROUP
    assert previous(app, without=1, step=11) is None
    assert previous(app, lost, without=2) is RestartAction.RESTART_GROUP
    assert previous(app, lost, without=1) is None
    assert previous(app, lost, slot, without=2) is RestartAction.RESTART_GROUP
    assert previous(without=0) is None


def test_without_a_new_step_a_job_is_given_up() -> None:
    with World() as world:
        run(world, restart={"noProgressLimit": 2})
        for _ in range(3):
            world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
            world.pass_s(45)
            for name in ("n0", "n1", "n2", "n3", "n4", "n5"):
                world.revive_node(name)
        assert world.condition("Failed") == ("True", "NoProgress")
        assert "reached no new step" in world.message("Failed")
        assert world.status().incidents[-1].action is RestartAction.FAIL_JOB


def test_supervisors_that_gave_up_have_the_last_word() -> None:
    with World() as world:
        run(world)
        spent = History(user_restarts=3, restarts_without_progress=1, highest_step=5)
        end(world, 0, 77, fault=FaultClass.APP_ERROR, history=spent, message="gave up")
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "UserLimit")
        assert world.status().budget.user == 3


def test_a_mistake_in_the_job_ends_it_with_its_words() -> None:
    with World() as world:
        run(world)
        end(world, 1, 2, message="s3://omni/pictures: no such bucket")
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "StartError")
        assert "no such bucket" in world.message("Failed")


def test_restarts_in_place_are_taken_over_and_counted_once() -> None:
    with World() as world:
        run(world)
        spent = History(user_restarts=1, restarts_without_progress=1, highest_step=5)
        for _ in range(3):
            world.beat(
                step=5,
                generation=1,
                history=spent,
                last_fault=FaultClass.APP_ERROR,
                last_message="rank 3 ended with exit code 1",
            )
            world.pass_s(15)
        status = world.status()
        assert (status.attempt, status.generation, status.restarts) == (1, 1, 1)
        assert [i.action for i in status.incidents] == [RestartAction.RESTART_IN_PLACE]
        end(world, 3, fault=FaultClass.APP_ERROR, generation=1, history=spent)
        world.pass_s(5)
        status = world.status()
        assert (status.attempt, status.budget.user, status.restarts) == (2, 2, 2)
        assert status.opened_by is RestartAction.REPLACE_POD


def test_a_restart_asked_for_with_more_words_than_a_status_holds_is_done_once() -> None:
    with World() as world:
        run(world)
        asked = {ANNOTATION_RESTART: "because " * 100}
        world.edit("stamps", lambda raw: raw["metadata"].update(annotations=asked))
        world.pass_s(20)
        assert (world.status().attempt, world.status().phase) == (2, "Running")


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


def ask(world: World, value: str) -> None:
    world.edit(
        "stamps", lambda raw: raw["metadata"].update(annotations={ANNOTATION_RESTART: value})
    )


@pytest.mark.parametrize(("withdrawn", "waits_s"), [(0, 0), (1, 0), (2, 5), (3, 10), (9, 300)])
def test_each_withdrawal_in_a_row_waits_longer(withdrawn: int, waits_s: float) -> None:
    slot = incident(FaultClass.PENDING_TIMEOUT, RestartAction.RESTART_JOB)
    row = [slot.model_copy(update={"attempt": 5 + n}) for n in range(withdrawn)]
    other = incident(FaultClass.OOM, RestartAction.REPLACE_POD)
    incidents = [slot, other, *row]
    assert backoff_s(JobStatus(attempt=5 + withdrawn, incidents=incidents)) == waits_s
    # The next attempt ran, and somebody asked for another one.
    assert backoff_s(JobStatus(attempt=6 + withdrawn, incidents=incidents)) == 0


def test_a_restart_of_the_job_takes_the_nodes_it_had() -> None:
    with World(nodes=8) as world:
        run(world)
        before = sorted(map(str, world.nodes_of().values()))
        ask(world, "1")
        world.pass_s(10)
        assert sorted(map(str, world.nodes_of().values())) == before
