"""Every carrier of a fault is classified by records alone; one cause is found among many faults."""

import time
from dataclasses import replace
from typing import Any

import pytest

from omni_contract.faults import FAULTS
from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER, Exit
from omni_contract.records import History, PodEnd
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import JobStatus
from omni_operator.faults.detect import (
    describe,
    find,
    find_cause,
    gave_up,
    is_alive,
    next_look_s,
    waiting,
)
from omni_operator.faults.nodes import is_node_lost, wants_pods_off
from omni_operator.state import PodFault
from omni_operator.watch.observe import read_pod
from omni_planner.restart import decide_restart
from tests.cluster.fault_matrix import ROWS, Row
from tests.operator.looking import Scene, running_job

F = FaultClass
OF_RECORDS = [row for row in ROWS if row.act not in ("stop_heartbeat", "part", "fill_node")]
"""The other two are seen in no record of a pod: `attempt` finds them."""
ATTEMPT = 3
HIT = 2
OF_ANOTHER_EXIT = PodEnd(attempt=1, generation=0, exit_code=1, fault=F.HANG).model_dump_json()


def inflict(scene: Scene, row: Row, index: int) -> None:
    """The carrier of a row strikes one pod or its node."""
    arguments = dict(row.arguments)
    if row.end is not None:
        arguments["message"] = row.message(attempt=scene.placement.attempt)
    kind, _, act = row.act.partition(".")
    if kind == "pods":
        getattr(scene.pods, act)(scene.name(index), **arguments)
    elif act == "kill":
        scene.change_node(index, ready="Unknown", ready_since_s=time.time())
    elif act == "delete_object":
        del scene.nodes[scene.placement.pods[index].node]
    elif act == "cordon":
        scene.change_node(index, is_cordoned=True)
    else:
        scene.taint_node(index, **arguments)


def classes(faults: list[PodFault]) -> dict[int | None, FaultClass]:
    return {fault.index: fault.fault for fault in faults}


def fault(index: int | None, kind: FaultClass, time_s: float = 0) -> PodFault:
    return PodFault(
        fault=kind, pod=f"p{index}", index=index, node=f"n{index}", time_s=time_s, message=""
    )


def test_every_class_has_a_row_that_follows_the_table() -> None:
    assert {row.fault for row in ROWS} == set(FaultClass)
    assert len({row.case for row in ROWS}) == len(ROWS)
    for row in ROWS:
        known = FAULTS[row.fault]
        # One that took no pod is left out for a time, too.
        assert row.excludes_node or not known.excludes_node, row.case
        if row.action is not RestartAction.FAIL_JOB:
            assert row.counter == known.budget, row.case
            assert row.phase == "Running", row.case
        else:
            assert (row.counter, row.phase) == ("none", "Failed"), row.case


@pytest.mark.parametrize("row", OF_RECORDS, ids=lambda row: row.case)
def test_a_carrier_gives_its_class_to_its_pod_alone(row: Row) -> None:
    scene = running_job(attempt=ATTEMPT)
    inflict(scene, row, HIT)
    observed = scene.look(after_s=1000)  # beyond every limit
    found = find(observed, scene.plan.spec)
    assert classes(found) == {HIT: row.fault}
    assert found[0].pod == scene.name(HIT) and found[0].node == "node-2"
    assert found[0].time_s <= observed.now_s
    assert describe(found[0]).startswith(f"pod {scene.name(HIT)} on node node-2: ")
    decision = decide_restart(
        found[0].fault,
        step=1,
        history=History(),
        spec=scene.plan.spec.restart,
        where="by_operator",
    )
    if gave_up(found[0]) or (row.fault is F.HANG and not is_alive(observed.pods[HIT])):
        return  # decided by the end of the pod, not by its class
    assert decision.action is row.action


@pytest.mark.parametrize("row", OF_RECORDS, ids=lambda row: row.case)
def test_a_pod_that_was_hit_cannot_live_on(row: Row) -> None:
    scene = running_job()
    inflict(scene, row, HIT)
    observed = scene.look(after_s=1000)
    stays = row.act.startswith("nodes.") or row.act == "pods.wait_in_container"
    assert is_alive(observed.pods[HIT]) is stays
    assert all(is_alive(pod) for pod in observed.pods if pod.name != scene.name(HIT))


def test_a_running_job_has_no_fault() -> None:
    scene = running_job()
    assert find(scene.look(), scene.plan.spec) == []


def test_without_a_placement_there_is_nothing_to_look_at() -> None:
    scene = running_job()
    assert find(replace(scene.look(), placement=None), scene.plan.spec) == []


def test_the_words_of_the_supervisor_and_its_end_are_kept() -> None:
    scene = running_job()
    end = PodEnd(attempt=1, generation=2, exit_code=1, fault=F.APP_ERROR, message="out of luck")
    scene.pods.end_container(scene.name(0), exit_code=1, message=end.model_dump_json())
    (found,) = find(scene.look(), scene.plan.spec)
    assert found.end == end
    assert found.exit_code == 1
    assert found.message == "trainer ended with exit code 1: out of luck"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Traceback ...\nValueError: no", "Traceback ... ValueError: no"),
        ('{"attempt": 1, "gener', '{"attempt": 1, "gener'),
        ("null", "null"),
        ('{"exit_code": "many"}', '{"exit_code": "many"}'),
        # Written when the program meant to end with 1; then it was killed.
        (
            PodEnd(attempt=1, generation=0, exit_code=1, fault=F.HANG).model_dump_json(),
            '{"attempt"',
        ),
    ],
    ids=["log", "half", "null", "other-json", "of-another-exit"],
)
def test_a_message_that_is_no_end_is_told_and_classifies_nothing(message: str, said: str) -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(0), exit_code=9, message=message)
    (found,) = find(scene.look(), scene.plan.spec)
    assert found.fault is F.APP_ERROR
    assert found.end is None
    assert said in found.message


def test_of_a_long_message_the_end_is_told() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(0), exit_code=9, message=f"{'x ' * 2000}the cause")
    (found,) = find(scene.look(), scene.plan.spec)
    assert found.message.endswith("the cause")
    assert len(found.message) < 1100


def test_the_trainer_counts_before_its_pod_has_failed() -> None:
    """Its sidecar may take long to go."""
    scene = running_job()
    pod = scene.raw[scene.name(1)]
    trainer = pod["status"]["containerStatuses"][0]
    trainer["state"] = {"terminated": {"exitCode": 1, "reason": "Error"}}
    assert classes(find(scene.look(), scene.plan.spec)) == {1: F.APP_ERROR}


def test_a_trainer_that_is_done_is_no_fault_though_its_sidecar_is_killed() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(1), exit_code=0, sidecar_exit_code=143)
    assert find(scene.look(), scene.plan.spec) == []


def test_a_pod_that_is_done_stays_done_whatever_befalls_its_node() -> None:
    """Its sidecars are still on their way out."""
    scene = running_job()
    trainer = scene.raw[scene.name(1)]["status"]["containerStatuses"][0]
    trainer["state"] = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    scene.change_node(1, is_cordoned=True, ready="Unknown", ready_since_s=0)
    assert find(scene.look(), scene.plan.spec) == []


def test_a_left_behind_pod_of_an_older_attempt_is_only_a_cascade() -> None:
    scene = running_job(attempt=ATTEMPT)
    end = PodEnd(attempt=ATTEMPT - 1, generation=0, exit_code=Exit.STALE)
    scene.pods.end_container(scene.name(1), exit_code=76, message=end.model_dump_json())
    scene.pods.end_container(scene.name(2), exit_code=76, message="garbage")
    assert classes(find(scene.look(), scene.plan.spec)) == {1: F.RENDEZVOUS, 2: F.RENDEZVOUS}


def test_a_container_of_the_users_counts_where_nothing_of_ours_failed() -> None:
    scene = running_job()
    pod = scene.raw[scene.name(1)]
    extra = {"name": "proxy", "image": "proxy", "ready": True, "restartCount": 0}
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    pod["status"]["containerStatuses"].append(extra | {"state": running})
    scene.pods.end_container(scene.name(1), container="proxy", exit_code=5)
    assert find(scene.look(), scene.plan.spec) == []
    scene.pods.end_container(scene.name(1), exit_code=0)
    (found,) = find(scene.look(), scene.plan.spec)
    assert (found.fault, found.message) == (F.APP_ERROR, "proxy ended with exit code 5")


def crashing_data(scene: Scene, *, exit_code: int, restarts: int) -> None:
    data = scene.raw[scene.name(0)]["status"]["initContainerStatuses"][0]
    data["lastState"] = {"terminated": {"exitCode": exit_code, "reason": "Error"}}
    data["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    data["restartCount"] = restarts


def test_a_data_service_that_dies_again_and_again() -> None:
    scene = running_job()
    crashing_data(scene, exit_code=137, restarts=2)
    assert find(scene.look(after_s=5000), scene.plan.spec) == []
    assert next_look_s(scene.look(), scene.plan.spec) is None
    assert waiting(read_pod(scene.raw[scene.name(0)])) == (
        "CrashLoopBackOff",
        "container data ended 2 times, last with exit code 137 (SIGKILL)",
    )
    crashing_data(scene, exit_code=137, restarts=3)
    assert classes(find(scene.look(), scene.plan.spec)) == {0: F.DATA_SERVICE}


def test_a_data_service_that_says_the_job_is_wrong() -> None:
    scene = running_job()
    crashing_data(scene, exit_code=Exit.USER, restarts=1)
    (found,) = find(scene.look(), scene.plan.spec)
    assert (found.fault, found.exit_code) == (F.START_ERROR, Exit.USER)


@pytest.mark.parametrize(
    ("reason", "limit_s"),
    [("ImagePullBackOff", 900), ("ErrImagePull", 900), ("CreateContainerConfigError", 60)],
)
def test_a_wait_becomes_a_fault_when_it_lasts(reason: str, limit_s: float) -> None:
    """Counted from the release of the gang, not from the pod's creation."""
    scene = running_job()
    spec = scene.plan.spec
    scene.pods.wait_in_container(scene.name(0), container=TRAINER_CONTAINER, reason=reason)
    waited_s = time.time() - scene.began_s
    before = scene.look(after_s=limit_s - waited_s - 2)
    assert find(before, spec) == []
    left_s = next_look_s(before, spec)
    assert left_s is not None and 0 < left_s <= 3
    assert classes(find(scene.look(after_s=limit_s - waited_s + 1), spec)) == {0: F.START_ERROR}


def test_before_the_release_nothing_is_missed() -> None:
    """A pod that is not there yet is made; a gated one has not begun."""
    scene = running_job(is_released=False)
    del scene.raw[scene.name(1)]
    scene.pods.delete(scene.name(2))
    scene.change_node(3, is_cordoned=True)
    assert find(scene.look(), scene.plan.spec) == []
    assert next_look_s(scene.look(), scene.plan.spec) is None


def test_a_pod_that_lives_on_is_not_missed_before_the_release() -> None:
    """A pod of the attempt before that somebody deletes meanwhile is made anew, not counted."""
    scene = running_job()
    scene.job = replace(scene.job, status=JobStatus(attempt=1))
    scene.pods.delete(scene.name(1))
    assert find(scene.look(), scene.plan.spec) == []
    scene.pods.end_container(scene.name(2), exit_code=1)
    assert classes(find(scene.look(), scene.plan.spec)) == {2: F.APP_ERROR}


def test_c39_a_pod_that_is_gone_or_going_is_missed() -> None:
    scene = running_job()
    del scene.raw[scene.name(1)]
    scene.pods.delete(scene.name(2))
    found = find(scene.look(), scene.plan.spec)
    assert classes(found) == {1: F.POD_DELETED, 2: F.POD_DELETED}
    deleted = next(fault for fault in found if fault.index == 2)
    assert abs(deleted.time_s - time.time()) < 2  # when it was asked for, not when its grace ends


def test_a_pod_that_is_collected_with_its_node_was_lost_with_it() -> None:
    """Also while its steps, made until just now, do not count as standing still."""
    scene = running_job()
    scene.beat(step=20)
    del scene.raw[scene.name(1)]
    del scene.nodes[scene.placement.all_pods[1].node]
    (fault,) = find(scene.look(), scene.plan.spec)
    assert (fault.fault, fault.index) == (F.NODE_LOST, 1)
    assert fault.message == "the node is gone from the API, and the pod with it"


def test_after_the_last_step_no_pod_is_missed() -> None:
    scene = running_job()
    scene.beat(step=20, phase="done")
    del scene.raw[scene.name(1)]
    assert find(scene.look(), scene.plan.spec) == []
    scene.beat(step=20, phase="done", attempt=0)
    assert classes(find(scene.look(), scene.plan.spec)) == {1: F.POD_DELETED}


def test_a_pod_deleted_after_it_failed_has_failed_by_itself() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(0), exit_code=1)
    ended = scene.raw[scene.name(0)]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended["finishedAt"] = "2026-01-01T00:00:00Z"
    scene.pods.delete(scene.name(0))
    assert classes(find(scene.look(), scene.plan.spec)) == {0: F.APP_ERROR}
    ended["finishedAt"] = "2100-01-01T00:00:00Z"
    assert classes(find(scene.look(), scene.plan.spec)) == {0: F.POD_DELETED}


def test_a_pod_that_failed_before_a_container_ran_was_put_off_by_the_kubelet() -> None:
    """Kubelets have more reasons than anybody lists."""
    scene = running_job()
    scene.raw[scene.name(1)]["status"] = {"phase": "Failed", "reason": "SysctlForbidden"}
    scene.raw[scene.name(2)]["status"] = {"phase": "Failed"}
    found = find(scene.look(), scene.plan.spec)
    assert classes(found) == {1: F.EVICTED, 2: F.EVICTED}
    assert [fault.message for fault in found] == [
        "SysctlForbidden",
        "it failed before a container ran",
    ]


def test_a_pod_that_is_about_to_be_evicted_cannot_live_on() -> None:
    scene = running_job()
    scene.pods.evict(scene.name(1))
    del scene.raw[scene.name(1)]["metadata"]["deletionTimestamp"]
    observed = scene.look()
    assert classes(find(observed, scene.plan.spec)) == {1: F.EVICTED}
    assert not is_alive(observed.pods[1])


def test_a_spare_has_faults_without_an_index() -> None:
    scene = running_job()
    scene.pods.end_container(scene.name(4), exit_code=1)
    assert classes(find(scene.look(), scene.plan.spec)) == {None: F.APP_ERROR}


def test_a_node_that_is_being_deleted_is_left() -> None:
    scene = running_job()
    scene.change_node(1, is_deleting=True)
    (found,) = find(scene.look(), scene.plan.spec)
    assert (found.fault, found.message) == (F.NODE_TAINTED, "the node is being deleted")


def test_a_failure_of_its_own_is_not_blamed_on_a_cordon() -> None:
    scene = running_job()
    scene.change_node(0, is_cordoned=True)
    scene.change_node(1, is_cordoned=True)
    scene.pods.end_container(scene.name(0), exit_code=1)
    scene.pods.evict(scene.name(1))
    found = classes(find(scene.look(), scene.plan.spec))
    assert found == {0: F.APP_ERROR, 1: F.NODE_TAINTED}


def test_a_taint_that_the_job_tolerates_is_none() -> None:
    scene = running_job()
    scene.taint_node(0, "example.com/repair", value="soon", effect="NoExecute")
    spec = scene.plan.spec
    assert classes(find(scene.look(), spec)) == {0: F.NODE_TAINTED}
    for toleration in (
        {"key": "example.com/repair", "operator": "Exists"},
        {"key": "example.com/repair", "value": "soon", "effect": "NoExecute"},
        {"operator": "Exists"},
    ):
        assert find(scene.look(), tolerating(spec, toleration)) == []
    for toleration in (
        {"key": "example.com/repair", "value": "never"},
        {"key": "example.com/repair", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "example.com/other", "operator": "Exists"},
    ):
        assert find(scene.look(), tolerating(spec, toleration)) != []


def tolerating(spec: Any, toleration: dict[str, str]) -> Any:
    template = spec.pod_template.model_copy(update={"tolerations": [toleration]})
    return spec.model_copy(update={"pod_template": template})


@pytest.mark.parametrize("key", ["not-ready", "unreachable"])
def test_c31_the_taints_of_a_silent_node_are_no_reason_to_leave_it(key: str) -> None:
    """The operator decides when a node is lost, by its own limit."""
    scene = running_job()
    scene.taint_node(0, f"node.kubernetes.io/{key}", effect="NoExecute")
    assert wants_pods_off("node-0", scene.look(), scene.plan.spec) is None


def test_c31_a_node_is_lost_after_its_time_without_a_step() -> None:
    scene = running_job(restart={"nodeLostAfterSeconds": 30})
    spec = scene.plan.spec
    scene.change_node(0, ready="Unknown", ready_since_s=time.time())
    scene.beat(step=5, stands_s=10, step_s=100)
    early = scene.look(after_s=25)
    assert not is_node_lost("node-0", early, spec)
    left_s = next_look_s(early, spec)
    assert left_s is not None and 3 < left_s <= 5.1
    assert is_node_lost("node-0", scene.look(after_s=31), spec)
    assert next_look_s(scene.look(after_s=31), spec) is None


def test_a_node_whose_pods_make_steps_is_not_lost() -> None:
    scene = running_job(restart={"nodeLostAfterSeconds": 30})
    spec = scene.plan.spec
    scene.change_node(0, ready="Unknown", ready_since_s=time.time() - 300)
    scene.beat(step=5, stands_s=0, step_s=40)
    assert not is_node_lost("node-0", scene.look(after_s=29), spec)
    # Steps were made after it fell silent, and one takes 40 s.
    assert not is_node_lost("node-0", scene.look(after_s=79), spec)
    assert is_node_lost("node-0", scene.look(after_s=81), spec)


def test_a_heartbeat_that_is_read_late_saves_no_dead_node() -> None:
    """It is read seconds after the node went silent, and never changes again."""
    scene = running_job(restart={"nodeLostAfterSeconds": 5})
    scene.change_node(0, ready="Unknown", ready_since_s=time.time() - 3)
    scene.beat(step=5, stands_s=0, step_s=1)
    assert is_node_lost("node-0", scene.look(after_s=6), scene.plan.spec)


def test_the_steps_of_another_attempt_prove_nothing() -> None:
    scene = running_job(attempt=ATTEMPT)
    scene.change_node(0, ready="False", ready_since_s=time.time() - 100)
    scene.beat(step=5, stands_s=0, attempt=ATTEMPT - 1)
    assert is_node_lost("node-0", scene.look(after_s=0), scene.plan.spec)


def test_nothing_is_lost_while_the_operator_itself_is_blind() -> None:
    scene = running_job()
    del scene.nodes["node-0"]
    scene.change_node(1, ready="Unknown", ready_since_s=time.time() - 1000)
    scene.watch_is_healthy = False
    assert find(scene.look(), scene.plan.spec) == []
    scene.watch_is_healthy = True
    assert set(classes(find(scene.look(), scene.plan.spec)).values()) == {F.NODE_LOST}


def test_many_lost_nodes_have_one_cause() -> None:
    scene = running_job()
    since = time.time() - 100
    for index in (3, 1, 2):
        scene.change_node(index, ready="Unknown", ready_since_s=since)
    found = find(scene.look(), scene.plan.spec)
    assert classes(found) == dict.fromkeys((1, 2, 3), F.NODE_LOST)
    assert find_cause(found).index == 1


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ([fault(0, F.RENDEZVOUS, 1), fault(1, F.APP_ERROR, 9)], 1),
        ([fault(0, F.APP_ERROR, 5), fault(1, F.OOM, 3)], 1),
        ([fault(1, F.OOM, 3), fault(0, F.APP_ERROR, 3)], 0),
        ([fault(0, F.UNKNOWN, 1), fault(1, F.NODE_LOST, 40)], 1),
        ([fault(0, F.NODE_TAINTED, 1), fault(1, F.POD_DELETED, 40)], 1),
        ([fault(0, F.RENDEZVOUS, 1), fault(1, F.NODE_TAINTED, 9)], 1),
        ([fault(0, F.RENDEZVOUS, 9), fault(1, F.RENDEZVOUS, 1)], 1),
        ([fault(None, F.NODE_LOST, 1), fault(1, F.RENDEZVOUS, 9)], 1),
    ],
    ids=[
        "cascades-last",
        "first-by-time",
        "ties-by-index",
        "a-lost-node-takes-others-down",
        "a-cordon-ends-nothing",
        "a-cordon-before-a-cascade",
        "only-cascades",
        "spares-last",
    ],
)
def test_the_cause_is_the_first_true_failure(faults: list[PodFault], cause: int) -> None:
    assert find_cause(faults).index == cause


def test_the_sidecar_waits_by_its_own_name() -> None:
    scene = running_job()
    scene.pods.wait_in_container(
        scene.name(0), container=DATA_CONTAINER, reason="ErrImagePull", message="no such image"
    )
    assert waiting(read_pod(scene.raw[scene.name(0)])) == ("ErrImagePull", "no such image")
