"""The Helm chart as tests use it: rendered, and its rights installed without its Deployment.

The operator under test is a process of the test, not a pod, but has the chart's own rights.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.cluster import binaries
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "charts" / "megascale-omni"
RELEASE: Final = "omni"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What the chart set up."""

    namespace: str
    """Of the release."""
    service_account: str
    """Of the operator."""
    arguments: Sequence[str]
    """That the Deployment gives to `python -m omni_operator.main`."""
    kubeconfig: Path
    """With the rights of the service account."""


def helm(*arguments: str) -> str:
    """Run helm and return what it printed; raises RuntimeError where it fails."""
    done = subprocess.run(
        [binaries.path("helm"), *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise RuntimeError((done.stderr + done.stdout).strip())
    return done.stdout


def set_values(values: Mapping[str, Any]) -> list[str]:
    """Arguments that lay these values over those of the chart."""
    return [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]


def render_chart(
    *,
    namespace: str,
    values: Mapping[str, Any] | None = None,
    with_crds: bool = False,
    with_tests: bool = False,
) -> list[Object]:
    """All objects that an install of the chart makes, with these values over its own;
    `with_tests` also what `helm test` does."""
    asked = ["--include-crds"] if with_crds else []
    asked += [] if with_tests else ["--no-hooks"]
    given = set_values(values or {})
    text = helm("template", RELEASE, str(CHART), f"--namespace={namespace}", *asked, *given)
    return [body for body in yaml.safe_load_all(text) if body]


def install_chart(
    cluster: Cluster, namespace: str, values: Mapping[str, Any] | None = None
) -> Installed:
    """Install the CRD, the service account and the roles of a release in this namespace."""
    install_job_kind(cluster)
    objects = render_chart(namespace=namespace, values=values)
    (deployment,) = [body for body in objects if body["kind"] == "Deployment"]
    rest = [body for body in objects if body["kind"] not in ("Deployment", "PodDisruptionBudget")]
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(rest))
    pod = deployment["spec"]["template"]["spec"]
    account = pod["serviceAccountName"]
    return Installed(
        namespace=namespace,
        service_account=account,
        arguments=tuple(pod["containers"][0]["args"]),
        kubeconfig=cluster.kubeconfig_for(namespace, account),
    )


def uninstall_chart(cluster: Cluster, installed: Installed) -> None:
    """Delete what lies outside the release's namespace, but the CRD, which jobs may still use."""
    for kind in ("clusterrolebinding", "clusterrole", "priorityclass"):
        selector = f"app.kubernetes.io/instance={RELEASE}"
        names = cluster.kubectl("get", kind, "-l", selector, "-o", "name").split()
        mine = [name for name in names if f"/{installed.namespace}-" in name]
        if mine:
            cluster.kubectl("delete", *mine)
