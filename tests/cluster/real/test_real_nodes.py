"""Pods really run on real nodes and find each other, and nodes break and come back as told."""

import subprocess
import time

import pytest

from tests.cluster.api import ApiError, Object, wait_for
from tests.cluster.nodes import GPU, LABEL_LEAF
from tests.cluster.pods import Pods
from tests.cluster.real.cluster import RealCluster
from tests.cluster.real.images import TINY_IMAGE
from tests.cluster.real.node import CONTAINERD, KUBELET, RealNode

_POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
_PORT = 8080
_SERVE = f"echo $HOSTNAME > /tmp/index.html; exec httpd -f -p {_PORT} -h /tmp"


def container(name: str, script: str, **more: object) -> Object:
    return {
        "name": name,
        "image": TINY_IMAGE,
        "command": ["sh", "-c", script],
        "securityContext": _SECURITY,
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        **more,
    }


def pod(name: str, script: str, *, node: str = "", sidecar: str = "", gpus: int = 0) -> Object:
    asked = {"resources": {"limits": {GPU: str(gpus)}}} if gpus else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "peers"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "hostname": name,
            "subdomain": "peers",
            "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
            "securityContext": _POD_SECURITY,
            "initContainers": (
                [container("data", sidecar, restartPolicy="Always")] if sidecar else []
            ),
            "containers": [container("trainer", script, **asked)],
            "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}],
        },
    }


def said(real: RealCluster, namespace: str, name: str, host: str) -> str:
    """What a host says to this pod; nothing where it does not answer."""
    # Its own -T makes BusyBox 1.35's wget crash.
    get = ("timeout", "5", "wget", "-q", "-O", "-", f"http://{host}:{_PORT}")
    in_pod = ("exec", name, f"--namespace={namespace}", "--")
    try:
        return real.control_plane.kubectl(*in_pod, *get, timeout_s=15).strip()
    except (RuntimeError, subprocess.TimeoutExpired) as exc:
        print(exc)
        return ""


@pytest.fixture
def peers(real: RealCluster, namespace: str, pods: Pods) -> dict[str, RealNode]:
    """Web servers a, b, c that say their names, each on a node of its own, and their services."""
    on = dict(zip("abc", real.nodes.values(), strict=True))
    spec = {"selector": {"app": "peers"}, "ports": [{"port": _PORT}]}
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True}
    for name, more in {"peers": headless, "any": {}}.items():
        body = {"metadata": {"name": name}, "spec": {**spec, **more}}
        real.control_plane.api.create(f"/api/v1/namespaces/{namespace}/services", body)
    for name, node in on.items():
        pods.create(pod(name, _SERVE, node=node.name))
    pods.wait_until_running(*on)
    return on


def test_nodes_have_gpus_and_topology(real: RealCluster) -> None:
    nodes = real.control_plane.api.list("/api/v1/nodes")
    assert [node["metadata"]["name"] for node in nodes] == list(real.nodes)
    for node in nodes:
        assert node["status"]["allocatable"][GPU] == "8"
        assert LABEL_LEAF in node["metadata"]["labels"]
        assert node["status"]["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://")


def test_a_restricted_pod_with_a_sidecar_runs_to_its_end(
    real: RealCluster, namespace: str, pods: Pods
) -> None:
    sidecar = "echo ready > /tmp/data; exec sleep infinity"
    script = "until [ -e /tmp/data ]; do sleep 1; done; cat /tmp/data; id -u; touch /x; exit 7"
    pods.create(pod("job", script, sidecar=sidecar, gpus=8))
    wait_for(lambda: pods.get("job")["status"]["phase"] == "Failed", "the job's end", 60)
    (ended,) = pods.get("job")["status"]["containerStatuses"]
    assert ended["state"]["terminated"]["exitCode"] == 7
    log = real.control_plane.kubectl("logs", "job", f"--namespace={namespace}", "-c", "trainer")
    assert log.splitlines() == ["ready", "65532", "touch: /x: Read-only file system"]


def test_a_pod_with_more_rights_is_refused(pods: Pods) -> None:
    body = pod("job", "id")
    body["spec"]["securityContext"] = {}
    with pytest.raises(ApiError, match='violates PodSecurity "restricted'):
        pods.create(body)


@pytest.mark.usefixtures("peers")
def test_pods_find_each_other_by_name_and_by_service(real: RealCluster, namespace: str) -> None:
    wait_for(lambda: said(real, namespace, "a", "b.peers") == "b", "an answer by name")
    full = f"b.peers.{namespace}.svc.cluster.local"
    assert said(real, namespace, "c", full) == "b"
    wait_for(lambda: said(real, namespace, "a", "any") in {*"abc"}, "an answer of the service")


def test_a_node_that_is_cut_off_is_lost_and_comes_back(
    real: RealCluster, namespace: str, peers: dict[str, RealNode]
) -> None:
    node = peers["b"]
    wait_for(lambda: said(real, namespace, "a", "b.peers") == "b", "an answer before")
    real.partition(node.name)
    start = time.monotonic()
    assert said(real, namespace, "a", "b.peers") == ""
    node.wait_until_not_ready()
    print(f"NotReady after {time.monotonic() - start:.1f} s")
    real.heal(node.name)
    start = time.monotonic()
    node.wait_until_ready()
    print(f"Ready {time.monotonic() - start:.1f} s after it is back")
    wait_for(lambda: said(real, namespace, "a", "b.peers") == "b", "an answer after")


def test_a_node_without_api_server_still_serves_its_peers(
    real: RealCluster, namespace: str, peers: dict[str, RealNode]
) -> None:
    node = peers["b"]
    real.partition(node.name, api_only=True)
    try:
        node.wait_until_not_ready()
        wait_for(lambda: said(real, namespace, "a", "b.peers") == "b", "an answer meanwhile")
        # Nor is there a way from the API server to the node.
        assert said(real, namespace, "b", "a.peers") == ""
    finally:
        real.heal(node.name)
    node.wait_until_ready()
    assert said(real, namespace, "b", "a.peers") == "a"


@pytest.mark.parametrize("service", [KUBELET, CONTAINERD])
def test_containers_outlive_what_started_them(
    service: str, real: RealCluster, namespace: str, pods: Pods, peers: dict[str, RealNode]
) -> None:
    node = peers["b"]
    (before,) = pods.get("b")["status"]["containerStatuses"]
    node.kill(service)
    node.wait_until_not_ready()
    assert said(real, namespace, "a", "b.peers") == "b"
    node.start_again(service)
    node.wait_until_ready()
    allocatable = real.control_plane.api.get(f"/api/v1/nodes/{node.name}")["status"]["allocatable"]
    assert allocatable[GPU] == "8"
    pods.wait_until_running("b", timeout_s=60)
    (after,) = pods.get("b")["status"]["containerStatuses"]
    assert after["containerID"] == before["containerID"] and after["restartCount"] == 0
    assert said(real, namespace, "b", "a.peers") == "a"
