"""What real nodes are told and made of, without any: `tests/cluster/real` has them."""

import json
import sys
import tarfile
from pathlib import Path

import pytest

from tests.cluster.certificates import Certificate
from tests.cluster.processes import Processes
from tests.cluster.real import dev, requirements, settings
from tests.cluster.real.cgroups import CgroupError, hand_down, hierarchies, make_cgroups
from tests.cluster.real.images import TINY_IMAGE, share_images, write_tiny_image
from tests.cluster.real.machine import cut_off
from tests.cluster.real.network import MAX_NODES, Network, free_numbers

_V1 = ("cpu", "cpuset", "unified")


def test_each_cluster_takes_addresses_that_lead_nowhere_yet() -> None:
    assert free_numbers(["default", "10.160.0.0/24", "172.17.0.0/16", "10.161.3.4"])[0] == 162
    assert free_numbers(["10.0.0.0/8"]) == []


def test_a_node_reaches_the_pods_of_the_others_directly() -> None:
    network = Network(number=170, num_nodes=3)
    assert network.routes(2) == [
        ("10.170.129.0/24", "10.170.0.11"),
        ("10.170.131.0/24", "10.170.0.13"),
    ]
    assert len(network.routes()) == 3
    names = [network.bridge, network.link(MAX_NODES)]
    assert all(len(name) < 16 for name in names), "the kernel takes no longer names of links"


@pytest.mark.parametrize("num_nodes", [0, MAX_NODES + 1])
def test_a_network_has_room_for_its_nodes(num_nodes: int) -> None:
    with pytest.raises(ValueError, match=f"num_nodes: {num_nodes}; use 1 to {MAX_NODES}"):
        Network(number=170, num_nodes=num_nodes)


def test_only_the_api_server_is_cut_off() -> None:
    rules = cut_off("10.170.0.1", port=23456, own_port=10250)
    assert rules.count("tcp dport 23456 drop") == rules.count("tcp sport 10250 drop") == 2
    assert rules.count("10.170.0.1") == 4
    assert "hook output" in rules and "hook forward" in rules


def test_missing_packages_are_named_once() -> None:
    there = {"ip", "mount", "nsenter", "openssl", "setpriv", "unshare"}
    assert requirements.missing_packages(there.__contains__) == [
        "busybox-static",
        "conntrack",
        "containerd",
        "containernetworking-plugins",
        "iptables",
        "nftables",
        "runc",
    ]


def test_who_is_not_root_is_told_so() -> None:
    with pytest.raises(requirements.MissingRequirement, match="need root .* with sudo"):
        requirements.require(Path("/srv"), user_id=1000)


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--install"], "--install: its pods need images; name their folder by --archives"),
        (["--archives=."], "`make images ARCHIVE=.` makes some"),
    ],
)
def test_an_install_by_hand_needs_images(
    arguments: list[str],
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        dev.main(arguments)
    assert ended.value.code == 2
    assert refusal in capsys.readouterr().err


def test_a_folder_of_programs_must_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNI_CLUSTER_BIN", str(tmp_path))
    for program in (
        "etcd",
        "kubectl",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
    ):
        (tmp_path / program).touch()
    refusal = f"not built: coredns, kubelet, kube-proxy; put them into {tmp_path}"
    with pytest.raises(requirements.MissingRequirement, match=refusal):
        requirements.require_programs()
    for program in ("coredns", "kubelet", "kube-proxy"):
        (tmp_path / program).touch()
    requirements.require_programs()


def test_who_has_built_nothing_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMNI_CLUSTER_BIN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(requirements.MissingRequirement, match="run `make cluster-bin REAL=1`"):
        requirements.require_programs()


def test_a_folder_that_nodes_would_not_see_is_refused() -> None:
    requirements.require_visible(Path("/srv/x"))
    with pytest.raises(requirements.MissingRequirement, match="/var/tmp/x: a node has a /var of"):
        requirements.require_visible(Path("/var/tmp/x"))


def test_a_kubelet_keeps_what_no_registry_could_give_again() -> None:
    serving = Certificate(certificate=Path("/a.crt"), key=Path("/a.key"))
    document = settings.KubeletSettings(
        address="10.170.0.11",
        dns="10.170.0.1",
        cgroup="/omni170/a",
        ca_certificate=Path("/ca.crt"),
        serving=serving,
    ).document()
    assert document["imageGCHighThresholdPercent"] == 100
    assert document["nodeLeaseDurationSeconds"] // 4 * 2 <= settings.GRACE_S
    assert (document["cgroupRoot"], document["clusterDNS"]) == ("/omni170/a", ["10.170.0.1"])


def test_pods_of_a_node_have_its_subnet() -> None:
    (bridge,) = json.loads(settings.pod_network("10.170.129.0/24"))["plugins"]
    assert bridge["ipam"]["ranges"] == [[{"subnet": "10.170.129.0/24"}]]


def test_the_tiny_image_is_an_archive_of_blobs_that_are_what_they_say(tmp_path: Path) -> None:
    archive = write_tiny_image(tmp_path / "tiny.tar", Path(sys.executable))
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    (listed,) = json.loads(files["index.json"])["manifests"]
    assert listed["annotations"]["io.containerd.image.name"] == TINY_IMAGE
    manifest = json.loads(files[f"blobs/{listed['digest'].replace(':', '/')}"])
    for blob in (manifest["config"], *manifest["layers"]):
        assert len(files[f"blobs/{blob['digest'].replace(':', '/')}"]) == blob["size"]


def test_nodes_share_images_but_not_databases(tmp_path: Path) -> None:
    root = tmp_path / "a" / "containerd"
    (root / "snapshots").mkdir(parents=True)
    (root / "snapshots" / "torch.so").write_text("large")
    (root / "metadata.db").write_text("of a")
    others = [tmp_path / name / "containerd" for name in "bc"]
    share_images(root, others)
    for other in others:
        assert (other / "snapshots" / "torch.so").samefile(root / "snapshots" / "torch.so")
        assert not (other / "metadata.db").samefile(root / "metadata.db")
        assert (other / "metadata.db").read_text() == "of a"


def make_v1(root: Path) -> None:
    for name in _V1:
        (root / name).mkdir(parents=True)
        (root / name / "cgroup.procs").touch()
    (root / "unified" / "cgroup.controllers").touch()
    (root / "cpuset" / "cpuset.cpus").write_text("0-1\n")


def test_cgroup_v1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    make_v1(tmp_path)
    assert [top.name for top in hierarchies(tmp_path)] == sorted(_V1)


def test_cgroup_v2_has_one_tree(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    assert hierarchies(tmp_path) == [tmp_path]


def test_a_new_cgroup_gets_what_it_has_not_by_itself(tmp_path: Path) -> None:
    make_v1(tmp_path)
    v1 = tmp_path / "cpuset" / "omni170"
    v1.mkdir()
    (v1 / "cpuset.cpus").touch()
    hand_down(v1)
    assert (v1 / "cpuset.cpus").read_text() == "0-1\n"
    v2 = tmp_path / "v2" / "omni170"
    v2.mkdir(parents=True)
    (v2.parent / "cgroup.controllers").write_text("cpu hugetlb memory pids\n")
    hand_down(v2)
    assert (v2.parent / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_what_the_machine_hands_down_is_as_before_in_the_end(tmp_path: Path) -> None:
    handed_down = tmp_path / "cgroup.subtree_control"
    (tmp_path / "cgroup.controllers").write_text("cpu hugetlb memory pids\n")
    handed_down.write_text("cpu\n")
    with Processes() as processes:
        make_cgroups(processes, "omni170", ["a"], tmp_path)
        assert handed_down.read_text() == "+memory +pids"
    assert handed_down.read_text() == "-memory -pids\n"
    assert not (tmp_path / "omni170").exists()


def test_without_cgroups_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CgroupError, match="no cgroups are mounted here"):
        hierarchies(tmp_path)


def test_cgroups_of_nodes_are_gone_with_the_processes(tmp_path: Path) -> None:
    root, state = tmp_path / "cgroup", tmp_path / "state"
    make_v1(root)
    state.mkdir()
    with Processes(state) as processes:
        assert processes.folder.parent == state
        make_cgroups(processes, "omni170", ["a", "b"], root)
        assert all((root / name / "omni170" / "b").is_dir() for name in _V1)
    assert not any((root / name / "omni170").exists() for name in _V1)
    assert not list(state.iterdir())


def test_what_is_busy_at_the_end_is_tried_again_and_last_comes_first(tmp_path: Path) -> None:
    lines, flag = tmp_path / "lines", tmp_path / "flag"
    with Processes() as processes:
        processes.run_at_end("sh", "-c", f"echo first >> {lines}")
        busy = f"[ -e {flag} ] || {{ touch {flag}; exit 1; }}; echo last >> {lines}"
        processes.run_at_end("sh", "-c", busy)
    assert lines.read_text().split() == ["last", "first"]
