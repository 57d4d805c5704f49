"""Jobs that wait for Kueue, whose answers the tests write; `tests/cluster` asks a real one."""

from typing import Any

import pytest

from omni_operator.api import ApiError, ApiUnavailable, Refused
from omni_operator.kinds import EVENT, NODE, WORKLOAD, Kind
from tests.operator.queues import WITH_KUEUE, Queues, start
from tests.operator.test_crashes import Mortal
from tests.operator.world import SETTINGS, World, job


def test_a_workload_asks_for_all_pods_of_a_job_at_once() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = Queues(world)
        template = {
            "priorityClassName": "urgent",
            "nodeSelector": {"pool": "x"},
            "tolerations": [{"key": "team", "operator": "Exists"}],
            "containers": [{"name": "logs", "image": "l", "resources": {"requests": {"cpu": 1}}}],
        }
        world.apply(job(queueName="team", resources={"spares": 1}, podTemplate=template))
        world.pass_s(2)
        raw = queues.workload()
        assert "finalizers" not in raw["metadata"]
        assert raw["metadata"]["ownerReferences"][0]["controller"] is True
        spec = raw["spec"]
        assert (spec["queueName"], spec["active"], spec["priority"]) == ("team", True, 1000)
        assert spec["priorityClassRef"] == {
            "group": "scheduling.k8s.io",
            "kind": "PriorityClass",
            "name": "urgent",
        }
        (pods,) = spec["podSets"]
        assert (pods["count"], "minCount" in pods) == (5, False)
        pod = pods["template"]["spec"]
        assert pod["nodeSelector"]["pool"] == "x"
        assert {"key": "team", "operator": "Exists"} in pod["tolerations"]
        assert pod["initContainers"][0]["restartPolicy"] == "Always"
        trainer, logs = pod["containers"]
        assert trainer["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        assert trainer["resources"]["requests"] == {"cpu": "1000m", "memory": "2Gi"}
        assert logs["resources"] == {"requests": {"cpu": 1}}


def test_a_job_waits_without_pods_and_tells_the_queues_words() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = Queues(world)
        world.apply(job(queueName="team"))
        world.pass_s(10)
        assert world.condition("Placed") == ("False", "QueueWaiting")
        assert "has not said anything" in world.message("Placed")
        queues.say("stamps", ("QuotaReserved", False, "Pending", "insufficient unused quota"))
        world.pass_s(10)
        assert world.message("Placed") == "queue 'team': insufficient unused quota"
        queues.say("stamps", ("QuotaReserved", True, "QuotaReserved", ""))
        queues.change(
            lambda raw: raw["status"].update(
                admissionChecks=[{"name": "budget", "state": "Pending", "message": "asked"}]
            )
        )
        world.pass_s(10)
        assert "admission checks are not ready: budget asked" in world.message("Placed")
        assert (world.pods(), world.status().attempt) == ([], 0)
        assert world.condition("Suspended") == ("", "")
        told = [(event["type"], event["reason"]) for event in world.cluster.objects(EVENT)]
        assert ("Normal", "QueueWaiting") in told


def test_a_job_that_waits_writes_nothing() -> None:
    with World(settings=WITH_KUEUE) as world:
        Queues(world)
        world.apply(job(queueName="team"))
        world.pass_s(10)
        world.cluster.writes.clear()
        world.pass_s(60)
        assert world.cluster.writes == []


def test_flavors_and_checks_bound_where_an_admitted_job_runs() -> None:
    with World(nodes=8, settings=WITH_KUEUE) as world:
        queues = Queues(world)
        taint = {"key": "reserved", "value": "b", "effect": "NoSchedule"}
        for name in ("n4", "n5", "n6", "n7"):

            def reserve(raw: dict[str, Any]) -> None:
                raw["metadata"]["labels"].update(pool="b", checked="yes")
                raw["spec"]["taints"] = [taint]

            world.cluster.change(NODE, name, reserve)
        tolerations = [{"key": "reserved", "operator": "Equal", "value": "b"}]
        queues.add_flavor("b", nodeLabels={"pool": "b"}, tolerations=tolerations)
        queues.add_flavor("any")
        world.apply(job(queueName="team"))
        world.pass_s(2)
        queues.change(
            lambda raw: raw.setdefault("status", {}).update(
                admissionChecks=[
                    {
                        "name": "budget",
                        "state": "Ready",
                        "podSetUpdates": [{"name": "main", "nodeSelector": {"checked": "yes"}}],
                    }
                ]
            )
        )
        queues.admit("b", "any")
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert set(world.nodes_of().values()) == {"n4", "n5", "n6", "n7"}
        for pod in world.pods():
            assert {"pool": "b", "checked": "yes"}.items() <= pod["spec"]["nodeSelector"].items()
            assert tolerations[0] in pod["spec"]["tolerations"]


def test_a_flavor_that_is_gone_is_named() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = Queues(world)
        world.apply(job(queueName="team"))
        world.pass_s(2)
        queues.admit("lost")
        world.pass_s(10)
        assert "ResourceFlavor lost, which was deleted" in world.message("Placed")
        assert world.pods() == []


def test_an_evicted_job_gives_its_quota_back_when_its_pods_are_gone_and_comes_back() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        queues.evict(message="preempted by uid 7")
        world.settle()
        assert world.condition("Placed") == ("False", "QueueEvicted")
        assert "preempted by uid 7" in world.message("Placed")
        assert all("deletionTimestamp" in pod["metadata"] for pod in world.pods())
        # They still save: Kueue may not give their room away.
        assert queues.told("QuotaReserved") == ("True", "QuotaReserved")
        world.pass_s(5)
        assert world.pods() == []
        assert queues.told("QuotaReserved") == ("False", "Pending")
        assert queues.told("Admitted") == ("False", "NoReservation")
        assert queues.told("Requeued") == ("True", "Preempted")
        assert queues.told("Evicted") == ("True", "Preempted")
        status = queues.workload()["status"]
        assert "admission" not in status
        assert status["accumulatedPastExecutionTimeSeconds"] >= 4
        assert (world.status().phase, world.status().incidents) == ("Pending", [])
        assert world.condition("Suspended") == ("", "")
        queues.admit()
        world.pass_s(5)
        status_now = world.status()
        assert (status_now.phase, status_now.attempt, status_now.restarts) == ("Running", 2, 0)


@pytest.mark.parametrize(
    ("reason", "keeps_turn"),
    [("Preempted", "True"), ("NodeFailures", "True"), ("PodsReadyTimeout", "False")],
)
def test_kueue_is_told_whether_a_job_may_be_admitted_again_at_once(
    reason: str, keeps_turn: str
) -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        queues.evict(reason)
        world.pass_s(5)
        assert queues.told("Requeued") == (keeps_turn, reason)


def test_time_without_quota_does_not_count() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world, activeDeadlineSeconds=60)
        queues.evict()
        world.pass_s(300)
        assert world.status().phase == "Pending"
        queues.admit()
        world.pass_s(10)
        assert world.status().phase == "Running"


def test_kueue_is_told_of_ready_pods_their_recovery_and_the_end() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        assert queues.told("PodsReady") == ("True", "Started")
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.settle()
        assert queues.told("PodsReady") == ("False", "WaitForRecovery")
        world.pass_s(20)
        assert queues.told("PodsReady") == ("True", "Recovered")
        world.complete()
        world.pass_s(5)
        assert queues.told("Finished") == ("True", "Succeeded")
        world.cluster.writes.clear()
        world.pass_s(60)
        assert world.cluster.writes == []


def test_a_failed_job_is_finished_once_its_pods_hold_nothing() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world, restart={"limit": 0})
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.settle()
        assert world.status().phase == "Failed"
        assert queues.told("Finished") == ("", "")
        world.pass_s(5)
        assert queues.told("Finished") == ("True", "Failed")


def test_a_suspended_job_is_inactive_in_its_queue_until_it_resumes() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        world.edit("stamps", lambda raw: raw["spec"].update(suspend=True))
        world.settle()
        assert queues.workload()["spec"]["active"] is False
        queues.evict("Deactivated")
        world.pass_s(5)
        assert world.status().phase == "Suspended"
        assert queues.told("QuotaReserved") == ("False", "Pending")
        world.edit("stamps", lambda raw: raw["spec"].update(suspend=False))
        world.pass_s(5)
        assert queues.workload()["spec"]["active"] is True
        assert world.condition("Suspended") == ("False", "Resumed")
        assert world.condition("Placed") == ("False", "QueueWaiting")
        queues.admit()
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert "waits" not in world.message("Suspended"), "it runs"


def test_what_kueue_makes_inactive_stays_so_and_says_the_way_out() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        queues.change(lambda raw: raw["spec"].update(active=False))
        queues.evict("Deactivated", message="tried too often")
        world.pass_s(30)
        assert queues.workload()["spec"]["active"] is False
        assert "tried too often" in world.message("Placed")
        assert "suspend and resume the job" in world.message("Placed")
        for suspend in (True, False):
            world.edit("stamps", lambda raw, suspend=suspend: raw["spec"].update(suspend=suspend))  # type: ignore[misc]
            world.pass_s(5)
        assert queues.workload()["spec"]["active"] is False


def test_a_job_suspended_from_the_start_asks_for_nothing() -> None:
    with World(settings=WITH_KUEUE) as world:
        Queues(world)
        world.apply(job(queueName="team", suspend=True))
        world.pass_s(5)
        assert world.cluster.objects(WORKLOAD) == []


def test_a_waiting_job_may_change_its_queue_and_its_pods() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = Queues(world)
        world.apply(job(queueName="team"))
        world.pass_s(2)

        def change(raw: dict[str, Any]) -> None:
            raw["spec"] |= {"queueName": "other", "podTemplate": {"priorityClassName": "urgent"}}
            raw["spec"]["resources"]["spares"] = 2

        world.edit("stamps", change)
        world.pass_s(5)
        spec = queues.workload()["spec"]
        assert (spec["queueName"], spec["priority"]) == ("other", 1000)
        assert spec["podSets"][0]["count"] == 6


def test_a_change_of_an_admitted_job_waits_for_its_next_turn() -> None:
    """Kueue refuses it while quota is held."""
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        world.edit("stamps", lambda raw: raw["spec"].update(queueName="other"))
        world.pass_s(5)
        assert queues.workload()["spec"]["queueName"] == "team"
        assert world.status().phase == "Running"
        queues.evict()
        world.pass_s(5)
        assert queues.workload()["spec"]["queueName"] == "other"


def test_a_job_taken_out_of_its_queue_runs_without_one() -> None:
    with World(settings=WITH_KUEUE) as world:
        Queues(world)
        world.apply(job(queueName="team"))
        world.pass_s(5)
        world.edit("stamps", lambda raw: raw["spec"].pop("queueName"))
        world.pass_s(10)
        assert world.status().phase == "Running"
        assert world.cluster.objects(WORKLOAD) == []


def test_a_deleted_workload_ends_the_pods_before_quota_is_asked_for_again() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        before = queues.workload()["metadata"]
        world.cluster.remove(WORKLOAD, before["name"])
        world.settle()
        assert world.condition("Placed") == ("False", "QueueWaiting")
        assert world.cluster.objects(WORKLOAD) == []
        world.pass_s(10)
        assert world.pods() == []
        assert queues.workload()["metadata"]["uid"] != before["uid"]


def test_without_kueue_a_job_with_a_queue_waits_and_says_why() -> None:
    with World() as world:
        world.apply(job(queueName="team"))
        world.pass_s(10)
        assert world.condition("Placed") == ("False", "NoQueueSystem")
        assert "--with-kueue" in world.message("Placed")
        assert (world.pods(), world.cluster.objects(WORKLOAD)) == ([], [])


def test_a_job_that_runs_goes_on_when_kueue_is_switched_off_and_waits_after_a_suspension() -> None:
    with World(settings=WITH_KUEUE) as world:
        start(world)
        world.settings = SETTINGS
        world.restart()
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(20)
        assert (world.status().phase, world.status().attempt) == ("Running", 2)
        for suspend in (True, False):
            world.edit("stamps", lambda raw, suspend=suspend: raw["spec"].update(suspend=suspend))  # type: ignore[misc]
            world.pass_s(5)
        assert world.condition("Placed") == ("False", "NoQueueSystem")
        assert world.pods() == []


def test_with_kueue_a_job_without_a_queue_runs_at_once() -> None:
    with World(settings=WITH_KUEUE) as world:
        world.apply(job())
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.cluster.objects(WORKLOAD) == []


def test_a_waiting_job_holds_no_room_that_others_could_use() -> None:
    with World(nodes=4, settings=WITH_KUEUE) as world:
        queues = start(world)
        queues.evict()
        world.pass_s(5)
        world.apply(job("other"))
        world.pass_s(5)
        assert world.status("other").phase == "Running"


def test_an_operator_started_anew_goes_on_where_kueue_was() -> None:
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        world.restart()
        world.pass_s(10)
        assert (world.status().phase, world.status().attempt) == ("Running", 1)
        queues.evict()
        world.restart()
        world.pass_s(10)
        assert queues.told("QuotaReserved") == ("False", "Pending")


def test_what_the_api_server_says_against_a_workload_is_told() -> None:
    with World(settings=WITH_KUEUE) as world:
        Queues(world)
        no = Refused(reason="Invalid", message="spec.podSets is not allowed", code=422)
        world.cluster.refuses = lambda verb, kind, name: no if kind == WORKLOAD else None
        world.apply(job(queueName="team"))
        world.pass_s(10)
        assert world.message("Placed") == "queue 'team': spec.podSets is not allowed"
        world.cluster.refuses = lambda verb, kind, name: None
        world.pass_s(40)
        assert "has not said anything" in world.message("Placed")


def test_a_priority_class_that_is_missing_is_told() -> None:
    with World(settings=WITH_KUEUE) as world:
        Queues(world)
        world.apply(job(queueName="team", podTemplate={"priorityClassName": "none"}))
        world.pass_s(10)
        assert "there is no PriorityClass 'none'" in world.message("Placed")
        assert "podTemplate.priorityClassName" in world.message("Placed")


def test_while_no_workload_can_be_written_jobs_run_and_recover() -> None:
    """Kueue's webhooks answer for Workloads: while Kueue is down, nobody can write one."""
    with World(settings=WITH_KUEUE) as world:
        queues = start(world)
        tries = []

        def refuse(verb: str, kind: Kind, name: str) -> ApiError | None:
            if kind != WORKLOAD or verb == "get":
                return None
            tries.append(verb)
            return ApiUnavailable(reason="InternalError", message="no webhook", code=500)

        world.cluster.refuses = refuse
        world.cluster.end_container(world.pod_name(1), exit_code=1)
        world.pass_s(20)
        assert (world.status().phase, world.status().attempt) == ("Running", 2)
        assert len(tries) == 1
        world.complete()
        world.pass_s(1)
        assert world.status().phase == "Completed"
        world.cluster.refuses = lambda verb, kind, name: None
        world.pass_s(40)
        assert queues.told("Finished") == ("True", "Succeeded")


def tell_story(world: World) -> int:
    """A job is admitted, evicted, admitted again and ends."""
    mortal, queues = Mortal(world), Queues(world)
    world.apply(job(queueName="team"))
    for attempt in (1, 2):
        mortal.until(lambda w: bool(w.cluster.objects(WORKLOAD)))
        queues.admit()
        mortal.until(lambda w, a=attempt: (w.status().phase, w.status().attempt) == ("Running", a))  # type: ignore[misc]
        if attempt == 1:
            queues.evict()
            mortal.until(lambda _: queues.told("QuotaReserved") == ("False", "Pending"))
            assert world.pods() == []
    world.complete()
    mortal.until(lambda _: queues.told("Finished") == ("True", "Succeeded"))
    assert len(world.cluster.objects(WORKLOAD)) == 1
    assert (world.status().restarts, world.status().incidents) == (0, [])
    return mortal.deaths


def test_ended_after_any_write_a_queued_job_comes_to_the_same_end() -> None:
    with World(settings=WITH_KUEUE) as world:
        tell_story(world)
        num_writes = len(world.cluster.writes)
    assert num_writes > 20
    for number in range(1, num_writes):
        with World(settings=WITH_KUEUE) as world:
            world.cluster.kill_after(number)
            assert tell_story(world) == 1, number
