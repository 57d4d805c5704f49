"""Labels to levels, one cluster for each family."""

import pytest

from omni_planner.placement.levels import FAMILIES, Levels, detect
from omni_planner.placement.types import NoPlacement

ZONE = {"topology.kubernetes.io/region": "eu", "topology.kubernetes.io/zone": "eu-1"}


def found(answer: Levels | NoPlacement) -> Levels:
    assert isinstance(answer, Levels), answer
    return answer


def refused(answer: Levels | NoPlacement) -> NoPlacement:
    assert isinstance(answer, NoPlacement), answer
    return answer


def node(name: str, **labels: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": name, **ZONE, **labels}


@pytest.mark.parametrize(
    ("labels", "levels", "meaning_of_rack"),
    [
        ({"megascale-omni.dev/rack": "r7"}, ["rack"], "rack"),
        (
            {
                "fabric.topograph.run/tier-0": "leaf7",
                "fabric.topograph.run/tier-1": "spine1",
                "accelerator.topograph.run/domain": "nvl1",
            },
            ["tier-1", "tier-0", "nvlink"],
            "tier-0",
        ),
        (
            {
                "network.topology.nvidia.com/leaf": "l7",
                "network.topology.nvidia.com/spine": "s1",
                "network.topology.nvidia.com/core": "c1",
                "nvidia.com/gpu.clique": "uuid.0",
            },
            ["core", "spine", "leaf", "nvlink"],
            "leaf",
        ),
        (
            {
                "network.topology.nvidia.com/block": "b7",
                "network.topology.nvidia.com/spine": "s1",
                "network.topology.nvidia.com/datacenter": "d1",
                "network.topology.nvidia.com/accelerator": "nvl1",
            },
            ["datacenter", "spine", "block", "nvlink"],
            "block",
        ),
        (
            {
                "network.topology.kubernetes.io/block": "b7",
                "network.topology.kubernetes.io/spine": "s1",
            },
            ["spine", "block"],
            "block",
        ),
        (
            {
                "cloud.google.com/gce-topology-block": "b1",
                "cloud.google.com/gce-topology-subblock": "b1s7",
                "cloud.google.com/gce-topology-host": "h",
            },
            ["block", "subblock", "host"],
            "subblock",
        ),
        (
            {f"topology.k8s.aws/network-node-layer-{n}": f"nn-{n}" for n in (1, 2, 3)},
            ["layer-1", "layer-2", "layer-3"],
            "layer-3",
        ),
        (
            {f"topology.k8s.aws/network-node-layer-{n}": f"nn-{n}" for n in (1, 2, 3, 4)},
            ["layer-1", "layer-2", "layer-3", "layer-4"],
            "layer-4",
        ),
        (
            {
                "oci.oraclecloud.com/rdma.hpc_island_id": "i",
                "oci.oraclecloud.com/rdma.network_block_id": "n",
                "oci.oraclecloud.com/rdma.local_block_id": "l",
            },
            ["island", "network-block", "local-block"],
            "local-block",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_family_is_found_and_has_a_rack(
    labels: dict[str, str], levels: list[str], meaning_of_rack: str
) -> None:
    answer = found(detect([node("n1", **labels), node("n2", **labels)], ["rack"]))
    assert answer.names == ("region", "zone", *levels, "node")
    assert answer.level("rack") == meaning_of_rack
    assert answer.level(None) is None
    assert answer.paths[0][:2] == ("eu", "eu-1") and answer.paths[0][-1] == "n1"
    by_key = dict(zip(answer.keys, answer.paths[0], strict=True))
    assert by_key == node("n1", **labels)


def test_a_missing_label_leaves_its_place_in_the_path_empty() -> None:
    answer = found(detect([node("n1", **{"megascale-omni.dev/rack": "r1"}), node("n2")], ["rack"]))
    assert answer.paths == (("eu", "eu-1", "r1", "n1"), ("eu", "eu-1", "", "n2"))


def test_without_any_family_the_levels_of_every_cluster_remain() -> None:
    answer = found(detect([node("n1", **{"nvidia.com/gpu.clique": "c"})], ["zone", "clique"]))
    assert answer.names == ("region", "zone", "nvlink", "node")
    assert answer.level("clique") == "nvlink"
    bare = found(detect([{"kubernetes.io/hostname": "n1"}], []))
    assert bare.names == ("node",)


def test_the_family_with_the_wanted_level_wins_over_the_one_with_more_labels() -> None:
    labels = {f"topology.k8s.aws/network-node-layer-{n}": "x" for n in (1, 2, 3)}
    labels["network.topology.nvidia.com/spine"] = "s"
    assert "layer-1" in found(detect([node("n1", **labels)], [])).names
    assert "spine" in found(detect([node("n1", **labels)], ["spine"])).names


def test_of_two_layers_that_mean_rack_the_one_of_most_nodes_counts() -> None:
    three = {f"topology.k8s.aws/network-node-layer-{n}": "x" for n in (1, 2, 3)}
    four = three | {"topology.k8s.aws/network-node-layer-4": "y"}
    mixed = [node("n1", **three), node("n2", **three), node("n3", **four)]
    assert found(detect(mixed, ["rack"])).level("rack") == "layer-3"


def test_a_label_key_is_a_level_and_stands_where_its_domains_nest() -> None:
    nodes = [
        node(f"n{i}", **{"example.com/row": f"row{i // 4}", "example.com/cage": f"c{i // 2}"})
        for i in range(8)
    ]
    answer = found(detect(nodes, ["example.com/cage", "example.com/row"]))
    assert answer.names == ("region", "zone", "example.com/row", "example.com/cage", "node")
    assert answer.paths[5] == ("eu", "eu-1", "row1", "c2", "n5")
    assert answer.level("example.com/row") == "example.com/row"


def test_a_known_label_key_is_the_level_it_belongs_to() -> None:
    key = "cloud.google.com/gce-topology-subblock"
    answer = found(detect([node("n1", **{key: "s"})], [key]))
    assert answer.level(key) == "subblock"


def test_c36_an_unknown_word_is_refused_with_the_words_there_are() -> None:
    answer = refused(detect([node("n1", **{"megascale-omni.dev/rack": "r"})], ["zone", "rakc"]))
    assert answer.reason == "UnknownTopologyLevel"
    assert "'rakc'" in answer.message and "did you mean 'rack'?" in answer.message
    assert "region, zone, rack, node" in answer.message


@pytest.mark.parametrize("word", ["rack", "leaf", "example.com/rack"])
def test_c36_a_level_whose_labels_no_node_has_is_refused(word: str) -> None:
    answer = refused(detect([node("n1"), node("n2")], [word]))
    assert answer.reason == "TopologyLabelsMissing"
    assert f"{word!r}" in answer.message and "region, zone, node" in answer.message
    if word == "leaf":
        assert "network.topology.nvidia.com/leaf" in answer.message


def test_without_nodes_that_is_the_reason() -> None:
    answer = refused(detect([], ["rack"]))
    assert answer.reason == "NotEnoughNodes" and "podTemplate.nodeSelector" in answer.message


def test_no_two_levels_of_a_family_share_a_name_or_a_key() -> None:
    for family in FAMILIES:
        names = [level.name for level in family.levels]
        keys = [key for level in family.levels for key in level.keys]
        assert len(set(names)) == len(names) and len(set(keys)) == len(keys)
