"""All pods of an attempt or none, and never two attempts side by side."""

from typing import Any

import pytest

from omni_contract.names import ANNOTATION_ATTEMPT, ANNOTATION_INDEX, ANNOTATION_NODE, GATE
from omni_operator.api import Conflict, Raw
from omni_operator.kinds import NODE, POD
from tests.operator.world import GPU, World, job, node


def is_gated(pod: Raw) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def foreign_pod(name: str, on: str, gpus: int = 2) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "other"},
        "spec": {
            "nodeName": on,
            "containers": [{"name": "c", "resources": {"requests": {GPU: str(gpus)}}}],
        },
        "status": {"phase": "Running"},
    }


def test_gates_that_cannot_be_opened_are_not_tried_without_a_pause() -> None:
    """A webhook put its own in front."""
    with World() as world:
        refuses = Conflict(reason="Invalid", message="a test failed", code=422)
        world.cluster.refuses = lambda verb, kind, name: (
            refuses if (verb, kind) == ("patch", POD) else None
        )
        world.apply(job())
        with pytest.raises(Conflict):
            world.pass_s(5)


def test_gates_open_only_when_all_pods_exist() -> None:
    """The API server takes two pods and no more for a while: none may start."""
    with World() as world:
        world.cluster.quotas["default"] = {"pods": 2}
        world.apply(job())
        world.pass_s(3)
        assert world.condition("Placed") == ("False", "QuotaExceeded")
        assert "exceeded quota" in world.message("Placed")
        assert world.pods() == []
        world.cluster.quotas.clear()
        world.pass_s(40)
        assert world.status().phase == "Running"
        assert world.status().attempt == 1


def test_a_small_quota_holds_nobody_up() -> None:
    """What a job cannot use for lack of quota is another one's."""
    with World(nodes=4) as world:
        world.cluster.quotas["default"] = {"pods": 2}
        world.apply(job())
        world.pass_s(3)
        body = job("other")
        body["metadata"]["namespace"] = "rich"
        world.apply(body)
        world.pass_s(5)
        assert world.status("other").phase == "Running"


def test_c31_a_pod_that_never_ends_on_a_dead_node_blocks_nothing() -> None:
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=4)
        lost = str(world.pod(2)["spec"]["nodeName"])
        world.kill_node(lost)
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert world.status().attempt == 2
        assert world.status().incidents[-1].fault == "NodeLost"
        assert lost not in world.nodes_of().values()
        assert len(world.pods()) == 4


def test_c31_nor_does_one_that_somebody_else_deleted() -> None:
    """It ends neither by itself nor by anybody's asking: it is taken out of the API."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=4)
        lost, old = str(world.pod(2)["spec"]["nodeName"]), world.pod_name(2)
        world.kill_node(lost)
        world.cluster.change(POD, old, _mark_deleted)
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert old not in world.nodes_of()
        assert lost not in world.nodes_of().values()


def test_c31_a_kubelet_that_is_unwell_but_answers_is_waited_for() -> None:
    """A pod that is taken out of the API may run on: that is only for nodes where nobody answers.
    The job does not wait for it either way."""
    with World() as world:
        world.apply(job())
        world.pass_s(5)
        world.beat(step=4)
        lost, old = str(world.pod(2)["spec"]["nodeName"]), world.pod_name(2)
        world.cluster.dead_nodes.add(lost)
        world.ready(lost, "False")
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert world.status().attempt == 2
        [left] = [pod for pod in world.pods() if pod["metadata"]["name"] == old]
        assert left["metadata"]["deletionTimestamp"]


def _mark_deleted(pod: dict[str, Any]) -> None:
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"


def test_c32_a_slot_stolen_after_the_gates_opened_withdraws_all() -> None:
    """The scheduler gave the node to somebody else: the others do not wait holding theirs."""
    with World() as world:
        world.apply(job())
        world.settle()
        assert not any(is_gated(pod) or pod["spec"].get("nodeName") for pod in world.pods())
        stolen = world.pod(3)["metadata"]["annotations"][ANNOTATION_NODE]
        world.cluster.put(foreign_pod("thief", stolen))
        world.cluster.now_s += (
            11  # a scheduler that finds no room says so at once; this one is mute
        )
        world.settle()
        assert world.status().attempt == 2
        assert world.status().incidents[-1].fault == "PendingTimeout"
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert stolen not in world.nodes_of().values()
        assert world.status().budget.infrastructure == 0


def test_c33_new_pods_wait_behind_their_gates_until_the_old_ones_are_gone() -> None:
    with World(nodes=4) as world:
        world.apply(job(restart={"rules": [{"when": {"class": ["AppError"]}, "do": "RestartJob"}]}))
        world.pass_s(5)
        world.beat(step=4)
        slow = str(world.pod(0)["spec"]["nodeName"])
        world.cluster.dead_nodes.add(slow)  # its kubelet is busy: the pod there ends late
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(30)
        pods = world.pods()
        assert len([pod for pod in pods if is_gated(pod)]) == 4
        old = [pod for pod in pods if not is_gated(pod)]
        assert [pod["spec"]["nodeName"] for pod in old] == [slow]
        assert world.condition("GangReady") == ("False", "WaitingForOldPods")
        world.cluster.dead_nodes.clear()
        world.pass_s(10)
        assert world.status().phase == "Running"
        assert {pod["metadata"]["annotations"][ANNOTATION_ATTEMPT] for pod in world.pods()} == {"2"}


def test_c37_rank_r_runs_where_the_plan_says() -> None:
    with World(nodes=9) as world:
        world.apply(job(nodes=8))
        world.pass_s(5)
        for pod in world.pods():
            meta = pod["metadata"]
            assert meta["name"].endswith(f"-1-{meta['annotations'][ANNOTATION_INDEX]}")
            assert pod["spec"]["nodeName"] == meta["annotations"][ANNOTATION_NODE]
        assert len({pod["spec"]["nodeName"] for pod in world.pods()}) == 8


def test_two_jobs_never_hold_half_each() -> None:
    """Six nodes, two jobs of four: one runs, the other waits and holds nothing."""
    with World(nodes=6) as world:
        world.apply(job("a"))
        world.apply(job("b"))
        world.pass_s(10)
        phases = {world.status(name).phase: name for name in "ab"}
        assert set(phases) == {"Running", "Pending"}
        assert world.pods(phases["Pending"]) == []
        assert world.condition("Placed", phases["Pending"]) == ("False", "NotEnoughNodes")
        world.complete(phases["Running"])
        world.pass_s(10)
        assert world.status(phases["Pending"]).phase == "Running"


def test_an_attempt_that_waits_for_room_gives_back_what_the_one_before_had() -> None:
    with World(nodes=4) as world:
        world.apply(job())
        world.pass_s(5)
        world.kill_node("n0")
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(60)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")
        world.apply(job("small", nodes=2))
        world.pass_s(5)
        assert world.status("small").phase == "Running"


def test_a_small_job_may_pass_a_large_one_that_waits() -> None:
    with World(nodes=6) as world:
        world.apply(job("large", nodes=8))
        world.pass_s(3)
        world.apply(job("small", nodes=2))
        world.pass_s(5)
        assert world.status("small").phase == "Running"
        assert world.status("large").phase == "Pending"


def test_room_that_is_freed_wakes_a_waiting_job_at_once() -> None:
    with World(nodes=3) as world:
        world.apply(job())
        world.pass_s(200)
        assert world.status().phase == "Pending"
        world.cluster.put(_new_node())
        world.pass_s(3)
        assert world.status().phase == "Running"


def _new_node() -> dict[str, Any]:
    body = node("n9")
    body["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    return body


def test_a_node_that_is_taken_by_others_before_the_gates_open_is_given_up() -> None:
    with World(nodes=5) as world:
        world.apply(job(nodes=4))
        world.pass_s(5)
        world.beat(step=2)
        slow = world.pod_name(0)
        world.cluster.dead_nodes.add(str(world.pod(0)["spec"]["nodeName"]))
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(5)
        assert world.condition("GangReady") == ("False", "WaitingForOldPods")
        planned = world.pod(2)["metadata"]["annotations"][ANNOTATION_NODE]
        world.cluster.put(foreign_pod("thief", planned))
        world.pass_s(5)
        assert world.status().attempt == 3
        assert world.status().incidents[-1].fault == "PendingTimeout"
        assert planned in world.status().incidents[-1].message
        world.cluster.dead_nodes.clear()
        world.pass_s(20)
        assert slow not in world.nodes_of()
        assert world.status().phase == "Running"
        assert planned not in world.nodes_of().values()
        assert world.status().restarts == 0


def test_a_node_that_has_just_come_back_is_waited_for() -> None:
    """Its taint goes after its condition; to give the slot up for that would move the job."""
    taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    with World(nodes=4) as world:
        world.apply(job())
        world.pass_s(5)
        slow = str(world.pod(0)["spec"]["nodeName"])
        world.cluster.dead_nodes.add(slow)
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(3)
        assert world.condition("GangReady") == ("False", "WaitingForOldPods")
        world.ready("n1", "Unknown")
        world.cluster.change(NODE, "n1", lambda raw: raw["spec"].update(taints=[taint]))
        world.pass_s(2)
        world.ready("n1")
        world.cluster.dead_nodes.clear()
        world.pass_s(5)
        assert world.condition("GangReady") == ("False", "NodeNotReady")
        world.cluster.change(NODE, "n1", lambda raw: raw["spec"].update(taints=[]))
        world.pass_s(15)
        assert (world.status().phase, world.status().attempt) == ("Running", 2)


def test_a_node_that_keeps_the_taint_of_one_that_is_down_is_given_up() -> None:
    taint = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    with World(nodes=5) as world:
        world.apply(job())
        world.pass_s(5)
        slow = str(world.pod(0)["spec"]["nodeName"])
        world.cluster.dead_nodes.add(slow)
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(3)
        world.ready("n1", "Unknown")
        world.cluster.change(NODE, "n1", lambda raw: raw["spec"].update(taints=[taint]))
        world.ready("n1")
        world.cluster.dead_nodes.clear()
        world.pass_s(90)
        assert (world.status().phase, world.status().attempt) == ("Running", 3)
        assert "n1" not in world.nodes_of().values()


def test_a_cordoned_node_is_not_used() -> None:
    with World(nodes=4) as world:
        world.cluster.change(NODE, "n1", lambda raw: raw["spec"].update(unschedulable=True))
        world.apply(job())
        world.pass_s(5)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")
        assert "1 cordoned" in world.message("Placed")


def test_gates_are_lifted_in_one_patch_each() -> None:
    """No pod costs more than its POST and one PATCH."""
    with World(nodes=9) as world:
        world.apply(job(nodes=8))
        world.pass_s(5)
        assert world.status().phase == "Running"
        writes = [write for write in world.cluster.writes if write[1] == POD.plural]
        assert sorted(verb for verb, _, _ in writes) == ["create"] * 8 + ["patch"] * 8
        assert all(GATE not in str(pod["spec"]) for pod in world.pods())
        assert not any(read[1] == POD.plural for read in world.cluster.reads)
