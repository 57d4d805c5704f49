"""Configuration of KWOK, the kubelet of simulated nodes: its own stages, made to break.

A node is alive by two independent things: its Lease, renewed by a stage of ours as a real kubelet
does it, and KWOK's care for its pods. `nodes.py` takes either away by a label.
"""

from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster.certificates import Certificate

LABEL_CARED: Final = "cluster.test/pods-cared-for"
"""On a node: its pods start, become ready and go away. Without it they stay as they are."""
LABEL_BEATING: Final = "cluster.test/beating"
"""On a node's Lease: it is renewed."""
ANNOTATION_TERMINATES_AFTER: Final = "cluster.test/terminates-after"
"""On a pod: how long it takes to go away once it is deleted, such as 20s; KWOK's clock starts anew
at every change of the pod."""

ANNOTATION_STARTS_AFTER: Final = "cluster.test/starts-after"
"""On a pod: how long its containers take to start once it is bound, such as 20s."""

_PARALLELISM: Final = 16
_OPTIONS: Final = {
    "manageNodesWithLabelSelector": LABEL_CARED,
    "cidr": "10.128.0.0/9",  # of the pods; the default has room for 254
    "nodeLeaseDurationSeconds": 0,  # KWOK's own would go on for a node it cares for no more
    "enableDebuggingHandlers": True,  # it serves logs
    # Zero unless set, and zero workers do nothing.
    "nodeLeaseParallelism": _PARALLELISM,
    "nodePlayStageParallelism": _PARALLELISM,
    "podPlayStageParallelism": _PARALLELISM,
    "podsOnNodeSyncParallelism": 1,
}
_STAGES: Final = (
    "node/fast/node-initialize.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-delete.yaml",
)
_DELAYS: Final = {
    "pod-ready": ANNOTATION_STARTS_AFTER,
    "pod-delete": ANNOTATION_TERMINATES_AFTER,
}


def write_config(
    path: Path, module: Path, *, heartbeat_s: float, port: int, serving: Certificate, log: Path
) -> Path:
    """KWOK's configuration file; `module` is the folder of its Go module, which has the stages.

    It listens on loopback as the kubelet of every node; `log` is what each container said.
    """
    options = _OPTIONS | {
        "serverAddress": f"127.0.0.1:{port}",
        "nodeIP": "127.0.0.1",
        "nodePort": port,
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
    }
    logs = {"logs": [{"logsFile": str(log)}]}
    documents = [
        _document("config.kwok.x-k8s.io/v1alpha1", "KwokConfiguration", "kwok", options=options),
        _document("kwok.x-k8s.io/v1alpha1", "ClusterLogs", "all-pods", spec=logs),
        _renewal(heartbeat_s),
    ]
    for name in _STAGES:
        stage = yaml.safe_load((module / "kustomize" / "stage" / name).read_text())
        if annotation := _DELAYS.get(stage["metadata"]["name"]):
            stage["spec"]["delay"] = {
                "durationMilliseconds": 0,
                "durationFrom": {"expressionFrom": f'.metadata.annotations["{annotation}"]'},
            }
        documents.append(stage)
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


def _document(version: str, kind: str, name: str, **rest: object) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}


def _renewal(heartbeat_s: float) -> dict[str, Any]:
    now = '{{ now | date "2006-01-02T15:04:05.000000Z07:00" }}'
    renew = {"root": "spec", "type": "merge", "template": f'renewTime: "{now}"'}
    spec = {
        "resourceRef": {"apiGroup": "coordination.k8s.io/v1", "kind": "Lease"},
        "selector": {"matchLabels": {LABEL_BEATING: "true"}},
        "delay": {"durationMilliseconds": int(heartbeat_s * 1000)},
        "steps": [{"patch": renew}],
    }
    return _document("kwok.x-k8s.io/v1alpha1", "Stage", "node-lease-renew", spec=spec)
