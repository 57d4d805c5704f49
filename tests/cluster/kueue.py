"""The real Kueue beside a test cluster: a process with the objects and rights of its own chart.

Only what Kueue itself needs is installed: its webhooks for other kinds of job are left out, so that
tests without Kueue do not notice it.
"""

import base64
import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster import binaries
from tests.cluster.api import Object, wait_for
from tests.cluster.chart import helm
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import free_port, last_lines

NAMESPACE: Final = "kueue-system"
PROCESS: Final = "kueue"

_SECRET: Final = f"/api/v1/namespaces/{NAMESPACE}/secrets/kueue-webhook-server-cert"
_ACCOUNT: Final = "kueue-controller-manager"
_WEBHOOK_SERVICE: Final = "kueue-webhook-service"
_WEBHOOKS: Final = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_KINDS: Final = (
    "CustomResourceDefinition", "ServiceAccount", "Secret", "ClusterRole", "ClusterRoleBinding",
    "Role", "RoleBinding", "Service", *_WEBHOOKS,
)  # fmt: skip
_START_S: Final = 90.0
_API: Final = "/apis/kueue.x-k8s.io/v1beta2"


@contextlib.contextmanager
def running_kueue(control_plane: ControlPlane) -> Iterator[None]:
    """Run Kueue until the end of the block; everything of it is gone afterwards."""
    port = free_port()
    objects = [body for body in _render() if _is_needed(body)]
    for body in objects:
        _adapt(body, port)
    control_plane.create_namespace(NAMESPACE)
    parts = [[body for body in objects if body["kind"] not in _WEBHOOKS]]
    # While nobody answers them, the API server would refuse every Workload.
    parts.append([body for body in objects if body["kind"] in _WEBHOOKS])
    for part in parts:
        text = "\n".join(map(json.dumps, part))
        control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    try:
        _start(control_plane, port)
        yield
    finally:
        with contextlib.suppress(KeyError):  # stopped by a test that failed
            stop_kueue(control_plane)
        _remove(control_plane, objects)


def stop_kueue(control_plane: ControlPlane) -> None:
    """Let Kueue be down for a while."""
    control_plane.processes.stop(PROCESS, with_signal=signal.SIGKILL)


def start_kueue_again(control_plane: ControlPlane) -> None:
    """Bring it back."""
    control_plane.processes.start_again(PROCESS)


def create_flavor(
    control_plane: ControlPlane,
    name: str,
    *,
    labels: Mapping[str, str],
    tolerations: tuple[Object, ...] = (),
) -> None:
    """A ResourceFlavor of nodes with these labels."""
    spec: Object = {"nodeLabels": dict(labels), "tolerations": list(tolerations)}
    control_plane.api.create(
        f"{_API}/resourceflavors",
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "ResourceFlavor",
            "metadata": {"name": name},
            "spec": spec,
        },
    )


def create_queue(
    control_plane: ControlPlane, namespace: str, name: str, *, flavors: Mapping[str, int]
) -> None:
    """A LocalQueue and a ClusterQueue behind it, with a quota of GPUs for each flavor, in order;
    higher priorities preempt lower ones."""

    def quota(flavor: str, gpus: int) -> Object:
        most = {"cpu": "1000", "memory": "1000Gi", "nvidia.com/gpu": str(gpus)}
        resources = [{"name": key, "nominalQuota": value} for key, value in most.items()]
        return {"name": flavor, "resources": resources}

    api, cluster_queue = control_plane.api, f"{namespace}-{name}"
    api.create(
        f"{_API}/clusterqueues",
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "ClusterQueue",
            "metadata": {"name": cluster_queue},
            "spec": {
                "namespaceSelector": {},
                "preemption": {"withinClusterQueue": "LowerPriority"},
                "resourceGroups": [
                    {
                        "coveredResources": ["cpu", "memory", "nvidia.com/gpu"],
                        "flavors": [quota(flavor, gpus) for flavor, gpus in flavors.items()],
                    }
                ],
            },
        },
    )
    api.create(
        f"{_API}/namespaces/{namespace}/localqueues",
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "LocalQueue",
            "metadata": {"name": name},
            "spec": {"clusterQueue": cluster_queue},
        },
    )


def workloads_path(namespace: str) -> str:
    """Where the Workloads of a namespace are."""
    return f"{_API}/namespaces/{namespace}/workloads"


def holds(workload: Object, type_: str) -> bool:
    """Whether a condition of a Workload is True."""
    conditions = workload.get("status", {}).get("conditions", ())
    return any(one["type"] == type_ and one["status"] == "True" for one in conditions)


def _render() -> list[Object]:
    chart = binaries.module_dir("kueue", "sigs.k8s.io/kueue") / "charts" / "kueue"
    text = helm("template", "kueue", str(chart), f"--namespace={NAMESPACE}")
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # its CRDs are 2 MB
    return [body for body in yaml.load_all(text, Loader=loader) if body]


def _is_needed(body: Object) -> bool:
    is_other_service = body["kind"] == "Service" and body["metadata"]["name"] != _WEBHOOK_SERVICE
    is_for_visibility = "visibility" in body["metadata"]["name"]
    return body["kind"] in _KINDS and not is_other_service and not is_for_visibility


def _adapt(body: Object, port: int) -> None:
    """Lead the API server to a process on loopback by the service's name, which stands in the
    certificate."""
    if body["kind"] == "Service":
        body["spec"] = {"type": "ExternalName", "externalName": "localhost"}
    elif body["kind"] == "CustomResourceDefinition":
        conversion = body["spec"].get("conversion", {}).get("webhook", {})
        if conversion:
            conversion["clientConfig"]["service"]["port"] = port
    elif body["kind"] in _WEBHOOKS:
        body["webhooks"] = [
            hook
            for hook in body["webhooks"]
            if all(rule["apiGroups"] == ["kueue.x-k8s.io"] for rule in hook["rules"])
        ]
        for hook in body["webhooks"]:
            hook["clientConfig"]["service"]["port"] = port


def _start(control_plane: ControlPlane, port: int) -> None:
    processes = control_plane.processes
    folder = processes.folder / "kueue-certificates"
    folder.mkdir()
    config = processes.folder / "kueue.json"
    config.write_text(json.dumps(_configuration(port, free_port(), folder)))
    processes.start(
        PROCESS,
        [binaries.path("kueue"), f"--config={config}", "--zap-log-level=2"],
        env={"KUBECONFIG": str(control_plane.kubeconfig_for(NAMESPACE, _ACCOUNT))},
    )
    # It makes its certificates and waits for the kubelet to mount their secret.
    secret = wait_for(lambda: _read_secret(control_plane), "Kueue's certificates", _START_S)
    for name, content in secret.items():
        (folder / name).write_bytes(base64.b64decode(content))

    def is_served() -> bool:
        processes.check(PROCESS)
        return "Serving webhook server" in processes.log(PROCESS).read_text()

    try:
        wait_for(is_served, "Kueue serving its webhooks", _START_S)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; {last_lines(processes.log(PROCESS))}") from exc


def _read_secret(control_plane: ControlPlane) -> Mapping[str, str]:
    control_plane.processes.check(PROCESS)
    data: Mapping[str, str] = control_plane.api.get(_SECRET).get("data") or {}
    return data if "tls.crt" in data else {}


def _configuration(port: int, probe_port: int, folder: Path) -> Object:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{probe_port}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": _WEBHOOK_SERVICE,
            "webhookSecretName": "kueue-webhook-server-cert",
        },
        "integrations": {
            "frameworks": ["batch/job"],
            "externalFrameworks": ["MultimodalTrainingJob.v1alpha1.megascale-omni.dev"],
        },
        "featureGates": {"VisibilityOnDemand": False},
    }


def _remove(control_plane: ControlPlane, objects: list[Object]) -> None:
    def remove(bodies: list[Object]) -> None:
        text = "\n".join(map(json.dumps, bodies))
        control_plane.kubectl("delete", "--wait=false", "-f", "-", stdin=text)

    webhooks = [body for body in objects if body["kind"] in _WEBHOOKS]
    remove(webhooks)  # nobody answers them any more
    for plural in ("clusterqueues", "resourceflavors"):  # nor takes its finalizer off these
        for body in control_plane.api.list(f"{_API}/{plural}"):
            path = f"{_API}/{plural}/{body['metadata']['name']}"
            control_plane.api.patch(path, {"metadata": {"finalizers": None}})
    remove([body for body in objects if body not in webhooks])
    control_plane.api.delete(f"/api/v1/namespaces/{NAMESPACE}")
