"""JobSet, the peer: the real controller beside the control plane, with the objects and rights of
its own chart, and a JobSet of the same pods as ours."""

import base64
import contextlib
import json
import shutil
from collections.abc import Iterator
from typing import Final

import yaml

from tests.cluster import binaries
from tests.cluster.api import Object, wait_for
from tests.cluster.chart import helm
from tests.cluster.control_plane import ControlPlane
from tests.cluster.processes import free_port, last_lines

LABEL_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
"""On every pod: the JobSet."""
LABEL_RESTART: Final = "jobset.sigs.k8s.io/restart-attempt"
"""On every pod: how often the JobSet was restarted before."""

_NAMESPACE: Final = "jobset-system"
_PROCESS: Final = "jobset"
_ACCOUNT: Final = "jobset-controller"
_WEBHOOKS: Final = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
_KINDS: Final = (
    "CustomResourceDefinition", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role",
    "RoleBinding",
)  # fmt: skip
_START_S: Final = 60.0


@contextlib.contextmanager
def running_jobset(control_plane: ControlPlane) -> Iterator[None]:
    """Run JobSet until the end of the block."""
    chart = binaries.module_dir("jobset", "sigs.k8s.io/jobset") / "charts" / "jobset"
    text = helm("template", "jobset", str(chart), f"--namespace={_NAMESPACE}", "--include-crds")
    objects = [body for body in yaml.safe_load_all(text) if body]
    control_plane.create_namespace(_NAMESPACE)
    _apply(control_plane, [body for body in objects if body["kind"] in _KINDS])
    port = free_port()
    _start(control_plane, port)
    hooks = [body for body in objects if body["kind"] in _WEBHOOKS]
    for body in hooks:
        _adapt(control_plane, body, port)
    _apply(control_plane, hooks)
    try:
        yield
    finally:
        for body in hooks:  # nobody answers them any more
            control_plane.kubectl("delete", body["kind"], body["metadata"]["name"])
        control_plane.processes.stop(_PROCESS)


def jobset_of(name: str, namespace: str, pod: Object, *, num_pods: int) -> Object:
    """A JobSet of one Job with so many pods, each with the spec of `pod`. One pod that fails starts
    all of them again: that is what training jobs need of it."""
    spec = {**pod["spec"], "restartPolicy": "Never"}
    for key in ("nodeSelector", "hostname", "subdomain", "schedulingGates", "serviceAccountName"):
        spec.pop(key, None)
    job = {
        "parallelism": num_pods,
        "completions": num_pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": spec},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "failurePolicy": {"maxRestarts": 100},
            "replicatedJobs": [{"name": "trainer", "replicas": 1, "template": {"spec": job}}],
        },
    }


def jobsets_path(namespace: str) -> str:
    """Where the JobSets of a namespace are."""
    return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"


def _apply(control_plane: ControlPlane, objects: list[Object]) -> None:
    text = "\n".join(json.dumps(body) for body in objects)
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=text)


def _adapt(control_plane: ControlPlane, body: Object, port: int) -> None:
    """Lead the API server to a process on loopback."""
    authority = base64.b64encode(control_plane.ca_certificate.read_bytes()).decode()
    for hook in body["webhooks"]:
        path = hook["clientConfig"]["service"]["path"]
        hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": authority}
        if any("pods" in rule["resources"] for rule in hook["rules"]):
            only = {"key": LABEL_NAME, "operator": "Exists"}  # as its own kustomization has it
            hook["objectSelector"] = {"matchExpressions": [only]}


def _start(control_plane: ControlPlane, port: int) -> None:
    processes = control_plane.processes
    folder = processes.folder / "jobset-certificates"
    folder.mkdir()
    issued = control_plane.issue_certificate("jobset", hosts=("IP:127.0.0.1",))
    for path, name in (
        (issued.certificate, "tls.crt"),
        (issued.key, "tls.key"),
        (control_plane.ca_certificate, "ca.crt"),
    ):
        shutil.copy(path, folder / name)
    config = processes.folder / "jobset.json"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
                "kind": "Configuration",
                "health": {"healthProbeBindAddress": f"127.0.0.1:{free_port()}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(folder)},
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "clientConnection": {"qps": 500, "burst": 500},
            }
        )
    )
    processes.start(
        _PROCESS,
        [binaries.path("jobset"), f"--config={config}", "--zap-log-level=info"],
        env={"KUBECONFIG": str(control_plane.kubeconfig_for(_NAMESPACE, _ACCOUNT))},
    )

    def is_served() -> bool:
        processes.check(_PROCESS)
        return "Serving webhook server" in processes.log(_PROCESS).read_text()

    try:
        wait_for(is_served, "JobSet serving its webhooks", _START_S)
    except AssertionError as exc:
        raise AssertionError(f"{exc}; {last_lines(processes.log(_PROCESS))}") from exc
