"""The test cluster itself: it starts, breaks as told, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.api import Api, ApiError, Object, wait_for
from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.nodes import GPU, LABEL_LEAF, Grid, Nodes
from tests.cluster.pods import Pods
from tests.cluster.processes import ENV_MARK

_OWNER = """
import time
from tests.cluster.control_plane import ControlPlane
start = time.monotonic()
with ControlPlane() as control_plane:
    print(control_plane.processes.folder, time.monotonic() - start, flush=True)
    time.sleep(120)
"""


def pod(name: str, *, gpus: int = 8) -> Object:
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    keys = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "initContainers": [{"name": "data", "image": "data", "restartPolicy": "Always"}],
            "containers": [
                {"name": "trainer", "image": "trainer", "resources": {"limits": {GPU: gpus}}}
            ],
            "tolerations": [{"key": key, **soon} for key in keys],
        },
    }


def marked(folder: Path) -> list[psutil.Process]:
    """The processes that this control plane started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(ENV_MARK) == str(folder):
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def test_an_owner_that_was_killed_leaves_no_process_and_no_file() -> None:
    """A crash of the tests, too, must not fill the machine with API servers."""
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        words = owner.stdout.readline().split()
        folder = Path(words[0])
        print(f"ready after {float(words[1]):.1f} s")
        names = {process.name() for process in marked(folder)}
        owner.kill()
    assert {"etcd", "kube-apiserver", "kube-scheduler", "kwok"} <= names
    assert wait_for(lambda: not marked(folder), "all processes gone", 10)
    assert wait_for(lambda: not folder.exists(), "the folder gone", 10)


def test_what_is_started_beside_the_control_plane_ends_with_it(tmp_path: Path) -> None:
    with ControlPlane(Options(audit=False, state_dir=tmp_path)) as control_plane:
        processes = control_plane.processes
        assert processes.folder.parent == tmp_path and (processes.folder / "etcd").is_dir()
        pid = processes.start("sleeper", ["sleep", "1000"])
        assert psutil.pid_exists(pid)
        assert not control_plane.audit_log.exists()
    assert not processes.folder.exists()
    assert not psutil.pid_exists(pid)
    assert not marked(processes.folder)


def test_a_grace_below_two_heartbeats_is_refused() -> None:
    with pytest.raises(ValueError, match="node_monitor_grace_s: 3 is less than two heartbeats"):
        Options(heartbeat_s=2, node_monitor_grace_s=3)


def test_a_service_account_has_its_own_rights_and_is_audited(
    control_plane: ControlPlane, namespace: str
) -> None:
    control_plane.kubectl("create", "serviceaccount", "reader", "-n", namespace)
    api = Api(control_plane.kubeconfig_for(namespace, "reader"))
    with pytest.raises(ApiError) as refused:
        api.list("/api/v1/pods")
    api.close()
    assert refused.value.status == 403
    user = f"system:serviceaccount:{namespace}:reader"
    events = [json.loads(line) for line in control_plane.audit_log.read_text().splitlines()]
    mine = [event for event in events if event["user"].get("username") == user]
    assert [(one["verb"], one["responseStatus"]["code"]) for one in mine] == [("list", 403)]


def test_pods_run_on_nodes_with_topology_and_gpus(
    control_plane: ControlPlane, nodes: Nodes, pods: Pods, namespace: str
) -> None:
    names = nodes.add(Grid(racks=2, nodes=2, gpus=8, name="grid"))
    assert names == ["grid-z0-b0-r0-n0", "grid-z0-b0-r0-n1", "grid-z0-b0-r1-n0", "grid-z0-b0-r1-n1"]
    for name in "abcd":
        pods.create(pod(name))
    pods.wait_until_running(*"abcd")
    assert {pods.get(name)["spec"]["nodeName"] for name in "abcd"} == set(names)
    sidecar = pods.get("a")["status"]["initContainerStatuses"][0]
    assert sidecar["started"] and "running" in sidecar["state"]
    shown = control_plane.kubectl("get", "nodes", "--no-headers", f"--label-columns={LABEL_LEAF}")
    leaves = [line.split()[-1] for line in shown.splitlines()]
    assert leaves == ["grid-z0-b0-r0"] * 2 + ["grid-z0-b0-r1"] * 2
    said = control_plane.kubectl("logs", "a", "--container=trainer", f"--namespace={namespace}")
    assert "This pod is simulated" in said
    pods.create(pod("e", gpus=1))
    wait_for(
        lambda: f"Insufficient {GPU}" in json.dumps(pods.get("e")["status"]), "the full cluster"
    )


def test_a_killed_node_holds_its_pod_terminating_until_it_is_back(nodes: Nodes, pods: Pods) -> None:
    nodes.add(Grid(racks=2, nodes=2))
    pods.create(pod("a"))
    pods.create(pod("b") | {"spec": pod("b")["spec"] | {"tolerations": [{"operator": "Exists"}]}})
    pods.wait_until_running("a", "b")
    node, other = (pods.get(name)["spec"]["nodeName"] for name in "ab")
    start = time.monotonic()
    nodes.kill(node, other)
    nodes.wait_until_not_ready(node, other)
    print(f"not ready after {time.monotonic() - start:.1f} s")
    wait_for(lambda: "deletionTimestamp" in pods.get("a")["metadata"], "pod Terminating")
    time.sleep(3)
    assert pods.exists("a")
    nodes.revive(node, other)
    pods.wait_until_gone("a")
    pods.wait_until_running("b")  # it tolerated the loss, and is ready again


def test_nodes_outlive_a_restart_of_the_api_server(
    control_plane: ControlPlane, nodes: Nodes, pods: Pods
) -> None:
    names = nodes.add(Grid(nodes=4))
    for kind in (signal.SIGTERM, signal.SIGKILL):
        control_plane.restart_api_server(with_signal=kind)
        time.sleep(control_plane.options.node_monitor_grace_s + 2)
        assert all(nodes.is_ready(name) for name in names)
    pods.create(pod("a"))
    pods.wait_until_running("a")


def test_frozen_nodes_neither_start_nor_end_pods(nodes: Nodes, pods: Pods) -> None:
    (node,) = nodes.add(Grid())
    nodes.freeze_pods(node)
    pods.create(pod("a"))
    wait_for(lambda: pods.get("a")["spec"].get("nodeName") == node, "the pod bound")
    words = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "trainer"'}
    pods.wait_in_container("a", container="trainer", **words)
    time.sleep(2)
    status = pods.get("a")["status"]
    assert status["phase"] == "Pending" and nodes.is_ready(node)
    assert status["containerStatuses"][0]["state"] == {"waiting": words}
    nodes.thaw_pods(node)
    pods.wait_until_running("a")


def test_containers_end_as_a_kubelet_says_it(nodes: Nodes, pods: Pods) -> None:
    nodes.add(Grid(nodes=2))
    for name in "abcd":
        pods.create(pod(name, gpus=4))
    pods.wait_until_running(*"abcd")
    pods.end_container("a", exit_code=137, reason="OOMKilled", message="killed")
    ended = pods.get("a")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (137, "OOMKilled", "killed")
    assert pods.get("a")["status"]["phase"] == "Failed"
    sidecar = pods.get("a")["status"]["initContainerStatuses"][0]["state"]["terminated"]
    assert sidecar["reason"] == "Completed"
    pods.end_container("b", exit_code=0)
    assert pods.get("b")["status"]["phase"] == "Succeeded"
    pods.restart_sidecar("c", container="data", exit_code=137)
    sidecar = pods.get("c")["status"]["initContainerStatuses"][0]
    assert (sidecar["restartCount"], sidecar["ready"]) == (1, True)
    assert sidecar["lastState"]["terminated"]["exitCode"] == 137
    assert pods.get("c")["status"]["phase"] == "Running"
    pods.fail("d", reason="Evicted", message="low on memory", disruption=True)
    status = pods.get("d")["status"]
    assert (status["phase"], status["reason"]) == ("Failed", "Evicted")
    conditions = {one["type"]: one for one in status["conditions"]}
    assert conditions["DisruptionTarget"]["reason"] == "TerminationByKubelet"


def test_deleted_pods_go_at_once_slowly_or_not_at_all(nodes: Nodes, pods: Pods) -> None:
    nodes.add(Grid())
    for name in "abcd":
        pods.create(pod(name, gpus=1))
    pods.wait_until_running(*"abcd")
    pods.terminate_slowly("b", 4)
    pods.stick("c")
    pods.evict("a")
    pods.delete("b", "c")
    pods.disrupt("d", reason="PreemptionByScheduler")
    pods.wait_until_gone("a", "d", timeout_s=3)
    assert pods.exists("b")
    pods.wait_until_gone("b", timeout_s=10)
    assert "deletionTimestamp" in pods.get("c")["metadata"]
    pods.unstick("c")
    pods.wait_until_gone("c", timeout_s=5)


def test_nodes_flap_are_tainted_cordoned_and_lose_a_gpu(
    control_plane: ControlPlane, nodes: Nodes
) -> None:
    (name,) = nodes.add(Grid())
    nodes.flap(name, times=1)
    nodes.taint(name, "bad", value="yes", effect="NoExecute")
    nodes.cordon(name)
    nodes.set_gpus(name, capacity=8, allocatable=7)
    nodes.set_condition(name, "GpuHealthy", "False", "XidError", "Xid 79")
    node = control_plane.api.get(f"/api/v1/nodes/{name}")
    taints = {(one["key"], one.get("value", ""), one["effect"]) for one in node["spec"]["taints"]}
    assert ("bad", "yes", "NoExecute") in taints
    assert node["spec"]["unschedulable"]
    status = node["status"]
    assert (status["capacity"][GPU], status["allocatable"][GPU]) == ("8", "7")
    assert any(one["reason"] == "XidError" for one in status["conditions"])
    nodes.untaint(name, "bad", effect="NoExecute")
    nodes.uncordon(name)
    spec = control_plane.api.get(f"/api/v1/nodes/{name}")["spec"]
    assert not spec.get("unschedulable")
    assert "bad" not in [one["key"] for one in spec.get("taints", [])]


def test_a_removed_node_takes_its_pods_along(nodes: Nodes, pods: Pods) -> None:
    first, second = nodes.add(Grid(nodes=2))
    pods.create(pod("a"))
    pods.create(pod("b"))
    pods.wait_until_running("a", "b")
    gone, kept = ("a", "b") if pods.get("a")["spec"]["nodeName"] == first else ("b", "a")
    nodes.remove(first)
    pods.wait_until_gone(gone, timeout_s=2)
    assert pods.exists(kept) and nodes.names == [second]


def test_a_missing_binary_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OMNI_CLUSTER_BIN", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="etcd: .*not built; run `make cluster-bin`"):
        ControlPlane().__enter__()
    assert not os.listdir(tmp_path)
