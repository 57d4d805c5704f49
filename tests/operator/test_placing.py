"""Which nodes an attempt gets."""

from typing import Any

from omni_contract.names import ANNOTATION_INDEX
from omni_operator.kinds import CONFIG_MAP, NODE, POD
from omni_operator.render.objects import read_placement
from tests.operator.world import World, job, node

RACK = "megascale-omni.dev/rack"


def racks_of(world: World, name: str = "stamps") -> dict[str, str]:
    """Rack by index."""
    racks = {raw["metadata"]["name"]: raw["metadata"]["labels"][RACK] for raw in nodes(world)}
    return {
        pod["metadata"]["annotations"][ANNOTATION_INDEX]: racks[pod["spec"]["nodeName"]]
        for pod in world.pods(name)
    }


def nodes(world: World) -> list[Any]:
    return list(world.cluster.objects(NODE))


def fill(world: World, on: str) -> None:
    """Somebody else takes a node."""
    world.cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"on-{on}", "namespace": "other"},
            "spec": {
                "nodeName": on,
                "containers": [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "1"}}}],
            },
            "status": {"phase": "Running"},
        }
    )


def two_racks(num_nodes: int) -> World:
    """Racks r0 and r1 with half of the nodes each, and n0 to n.. in turn."""
    world = World(nodes=0)
    for i in range(num_nodes):
        world.cluster.put(node(f"n{i}", rack=f"r{i % 2}"))
        world.ready(f"n{i}")
    return world


def test_c36_groups_stay_in_their_rack_also_after_a_replacement() -> None:
    with two_racks(10) as world:
        world.apply(job(topology={"reorderGroupWithin": "rack"}))
        world.pass_s(5)
        racks = racks_of(world)
        assert racks["0"] == racks["2"]
        assert racks["1"] == racks["3"]
        world.beat(step=3)
        world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert racks_of(world) == racks
        assert world.condition("TopologySatisfied") == ("True", "Satisfied")


def test_c36_where_the_rack_is_full_the_job_waits_rather_than_leave_it() -> None:
    with two_racks(4) as world:
        world.apply(job(topology={"reorderGroupWithin": "rack"}))
        world.pass_s(5)
        world.beat(step=3)
        lost = str(world.pod(1)["spec"]["nodeName"])
        world.kill_node(lost)
        world.cluster.put(node("far", rack="r9"))
        world.ready("far")
        world.pass_s(60)
        assert world.condition("Placed")[0] == "False"
        assert world.status().phase == "Restarting"
        world.revive_node(lost)
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert world.condition("TopologySatisfied") == ("True", "Satisfied")


def test_relaxed_it_says_so() -> None:
    with two_racks(4) as world:
        topology = {"reorderGroupWithin": "rack", "onUnsatisfied": "Relax"}
        world.apply(job(topology=topology))
        world.pass_s(5)
        world.beat(step=3)
        world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
        world.cluster.put(node("far", rack="r9"))
        world.ready("far")
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert world.condition("TopologySatisfied") == ("False", "Relaxed")


def test_c36_an_unknown_level_is_said_and_not_skipped() -> None:
    with World() as world:
        world.apply(job(topology={"reorderGroupWithin": "rakc"}))
        world.pass_s(5)
        assert world.condition("Placed") == ("False", "UnknownTopologyLevel")
        assert "did you mean 'rack'" in world.message("Placed")
        assert world.pods() == []


def test_a_level_may_have_a_name_of_the_users_own() -> None:
    with World(nodes=0) as world:
        for i in range(8):
            body = node(f"n{i}")
            body["metadata"]["labels"]["example.com/shelf"] = f"s{i % 2}"
            world.cluster.put(body)
            world.ready(f"n{i}")
        topology = {"reorderGroupWithin": "shelf", "levels": {"shelf": "example.com/shelf"}}
        world.apply(job(topology=topology))
        world.pass_s(5)
        placement = read_placement(
            world.cluster.find(CONFIG_MAP, f"stamps-{uid(world)}-placement-1")
        )
        assert placement.group_within == "example.com/shelf"
        assert placement.spans == (1, 1)


def uid(world: World) -> str:
    return str(world.pods()[0]["metadata"]["ownerReferences"][0]["uid"])[:5]


def test_fail_gives_up_where_there_is_no_room() -> None:
    with World(nodes=3) as world:
        world.apply(job(topology={"onUnsatisfied": "Fail"}))
        world.pass_s(5)
        assert world.condition("Failed") == ("True", "NotEnoughNodes")
        assert "onUnsatisfied is Fail" in world.message("Failed")


def test_shrink_goes_on_with_fewer_nodes_and_the_same_global_batch() -> None:
    """Of 7 nodes 4 are the most that divide 16 sequences into microbatches."""
    with World(nodes=7) as world:
        world.apply(job(nodes=8, topology={"onUnsatisfied": "Shrink"}))
        world.pass_s(5)
        status = world.status()
        assert (status.phase, status.num_nodes) == ("Running", 4)
        assert world.condition("Degraded") == ("True", "Shrunk")
        assert "4 of 8 nodes" in world.message("Degraded")
        world.cluster.put(node("n9"))
        world.ready("n9")
        world.pass_s(100)
        assert world.status().num_nodes == 4  # it does not grow by itself
        world.edit("stamps", lambda raw: raw["metadata"].update(
            annotations={"megascale-omni.dev/restart": "1"}))  # fmt: skip
        world.pass_s(10)
        assert (world.status().phase, world.status().num_nodes) == ("Running", 8)
        assert world.condition("Degraded")[0] == "False"


def test_a_job_that_loses_a_node_for_good_shrinks() -> None:
    with World(nodes=4) as world:
        world.apply(job(topology={"onUnsatisfied": "Shrink"}))
        world.pass_s(5)
        world.beat(step=3)
        world.kill_node("n1")
        world.pass_s(60)
        status = world.status()
        assert (status.phase, status.num_nodes, status.restarts) == ("Running", 2, 1)
        assert len(world.pods()) == 2


def test_a_spare_takes_the_place_of_a_lost_pod_without_a_new_one() -> None:
    with World(nodes=5) as world:
        world.apply(job(resources={"spares": 1}))
        world.pass_s(5)
        assert len(world.pods()) == 5
        (spare,) = [
            pod["metadata"]["name"]
            for pod in world.pods()
            if not pod["metadata"]["annotations"][ANNOTATION_INDEX]
        ]
        world.beat(step=3)
        world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
        world.pass_s(60)
        assert world.status().phase == "Running"
        assert world.pod_name(1) == spare
        created = [w for w in world.cluster.writes if w[:2] == ("create", "pods")]
        assert len(created) == 5


def test_a_job_that_ran_restarts_without_a_spare_where_there_is_none() -> None:
    with World(nodes=5) as world:
        world.apply(job(resources={"spares": 1}))
        world.pass_s(5)
        world.beat(step=3)
        world.kill_node(str(world.pod(1)["spec"]["nodeName"]))
        world.pass_s(60)
        assert (world.status().phase, world.status().attempt) == ("Running", 2)
        world.edit(
            "stamps",
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": "1"}),
        )
        world.pass_s(10)
        assert (world.status().phase, world.status().attempt) == ("Running", 3)
        assert len(world.pods()) == 4


def test_a_start_waits_for_its_spares() -> None:
    with World(nodes=4) as world:
        world.apply(job(resources={"spares": 1}))
        world.pass_s(20)
        assert world.condition("Placed") == ("False", "NotEnoughNodes")
        assert "needs 5 nodes and 4 can take a pod" in world.message("Placed")


def test_a_lost_spare_costs_no_restart() -> None:
    with World(nodes=6) as world:
        world.apply(job(resources={"spares": 1}))
        world.pass_s(5)
        (spare,) = [
            pod["metadata"]["name"]
            for pod in world.pods()
            if not pod["metadata"]["annotations"][ANNOTATION_INDEX]
        ]
        world.cluster.remove(POD, spare)
        world.pass_s(30)
        assert world.status().attempt == 1
        assert world.condition("Degraded") == ("True", "SpareLost")


def test_selectors_and_taints_bound_the_nodes() -> None:
    with World(nodes=8) as world:
        for name in ("n0", "n1", "n2", "n3", "n4"):
            world.cluster.change(NODE, name, lambda raw: raw["metadata"]["labels"].update(pool="a"))
        taint = {"key": "team", "value": "b", "effect": "NoSchedule"}
        world.cluster.change(NODE, "n0", lambda raw: raw["spec"].update(taints=[taint]))
        world.apply(job(podTemplate={"nodeSelector": {"pool": "a"}}))
        world.pass_s(5)
        assert set(world.nodes_of().values()) == {"n1", "n2", "n3", "n4"}
        world.apply(job("other", podTemplate={"nodeSelector": {"pool": "a"}}, nodes=2))
        world.pass_s(5)
        message = world.message("Placed", "other")
        assert "1 with a taint" in message
        assert "3 without the labels" in message
        assert "4 in use by others" in message


def test_nodes_that_never_have_the_resource_are_not_said_to_be_in_use() -> None:
    with World(nodes=4) as world:
        world.apply(job(resources={"gpuResource": "amd.com/gpu"}))
        world.pass_s(5)
        assert "4 with fewer than 2 amd.com/gpu in all" in world.message("Placed")


def test_a_tolerated_taint_and_the_gpu_taint_bound_nothing() -> None:
    with World(nodes=4) as world:
        taints = [
            {"key": "team", "value": "b", "effect": "NoSchedule"},
            {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        ]
        world.cluster.change(NODE, "n0", lambda raw: raw["spec"].update(taints=taints))
        world.apply(job(podTemplate={"tolerations": [{"key": "team", "value": "b"}]}))
        world.pass_s(5)
        assert world.status().phase == "Running"


def test_nodes_without_all_that_the_containers_ask_for_are_left_out() -> None:
    with World(nodes=5) as world:
        for name in ("n1", "n2", "n3", "n4"):
            world.cluster.change(
                NODE, name, lambda raw: raw["status"]["allocatable"].update({"rdma/hca": "8"})
            )
        trainer = {"name": "trainer", "resources": {"limits": {"rdma/hca": "8"}}}
        world.apply(job(podTemplate={"containers": [trainer]}))
        world.pass_s(5)
        assert set(world.nodes_of().values()) == {"n1", "n2", "n3", "n4"}


def test_a_node_where_others_hold_gpus_is_left_out() -> None:
    with World(nodes=5) as world:
        fill(world, "n0")
        world.apply(job())
        world.pass_s(5)
        assert world.status().phase == "Running"
        assert "n0" not in world.nodes_of().values()


def test_jobs_without_gpus_share_nodes_but_spread_where_they_can() -> None:
    with World(nodes=4) as world:
        body = job(nodes=2, resources={"device": "cpu"})
        world.apply(body)
        world.pass_s(5)
        world.apply({**body, "metadata": {**body["metadata"], "name": "second"}})
        world.pass_s(5)
        first, second = set(world.nodes_of().values()), set(world.nodes_of("second").values())
        assert len(first | second) == 4
        for name in ("third", "fourth"):
            world.apply({**body, "metadata": {**body["metadata"], "name": name}})
            world.pass_s(5)
            assert world.status(name).phase == "Running"


def test_a_replaced_group_leaves_only_nodes_that_cannot_be_used() -> None:
    with World(nodes=8) as world:
        rule = {"when": {"class": ["NodeLost"]}, "do": "RestartGroup"}
        world.apply(job(restart={"rules": [rule]}))
        world.pass_s(5)
        world.beat(step=3)
        before = {index: str(world.pod(index)["spec"]["nodeName"]) for index in range(4)}
        old = {index: world.pod_name(index) for index in range(4)}
        world.kill_node(before[1])
        world.pass_s(60)
        assert world.status().phase == "Running"
        after = {index: str(world.pod(index)["spec"]["nodeName"]) for index in range(4)}
        assert after[1] != before[1]
        assert {i: after[i] for i in (0, 2, 3)} == {i: before[i] for i in (0, 2, 3)}
        assert [world.pod_name(i) == old[i] for i in range(4)] == [True, False, True, False]
