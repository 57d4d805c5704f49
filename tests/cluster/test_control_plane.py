"""The test cluster itself: it starts, breaks as told, and leaves nothing behind."""

import time

from tests.cluster.api import wait_for
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.pods import Pods


def pod(name: str) -> dict[str, object]:
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
                {"name": "trainer", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}
            ],
            "tolerations": [{"key": key, **soon} for key in keys],
        },
    }


def test_a_killed_node_holds_its_pod_terminating_until_it_is_back(nodes: Nodes, pods: Pods) -> None:
    nodes.add(Grid(racks=2, nodes=2))
    pods.create(pod("a"))
    pods.wait_until_running("a")
    node = pods.get("a")["spec"]["nodeName"]
    nodes.kill(node)
    nodes.wait_until_not_ready(node)
    wait_for(lambda: "deletionTimestamp" in pods.get("a")["metadata"], "pod Terminating")
    time.sleep(3)
    assert pods.exists("a")
    nodes.revive(node)
    pods.wait_until_gone("a")
