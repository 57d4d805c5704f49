"""The operator on the chart's own rights, held against the API server's audit log."""

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from omni_contract.names import LABEL_JOB
from tests.cluster.api import Api, ApiError, Object, wait_for
from tests.cluster.chart import Installed, install_chart, render_chart, uninstall_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.job_kind import jobs_path
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.pods import Pods
from tests.cluster.processes import free_port
from tests.cluster.rights import Right, refusals, rights_granted, rights_used
from tests.contract.jobs import DEMO

ONLY_IN_DOUBT: Final = {
    Right(group="", resource="pods", verb="get"),
    Right(group="megascale-omni.dev", resource="multimodaltrainingjobs", verb="get"),
    Right(group="", resource="events", verb="patch"),
}
"""Used where two writers met, or the same was told twice; whether that happens here is chance."""
ONLY_TO_GRANT: Final = {Right(group="coordination.k8s.io", resource="leases", verb="patch")}


@pytest.fixture
def operator(
    control_plane: ControlPlane, namespace: str, request: pytest.FixtureRequest
) -> Iterator[Installed]:
    """The operator as a process, with the rights and arguments that the chart gives it."""
    values = {"watchNamespace": namespace} if request.param == "of one namespace" else {}
    installed = install_chart(control_plane, namespace, values)
    module = [sys.executable, "-m", "omni_operator.main"]
    control_plane.processes.start(
        f"operator-{namespace}",
        [*module, *installed.arguments, f"--port={free_port()}"],
        env={"KUBECONFIG": str(installed.kubeconfig)},
    )
    yield installed
    print(control_plane.processes.log(f"operator-{namespace}").read_text())
    control_plane.processes.stop(f"operator-{namespace}")
    uninstall_chart(control_plane, installed)


@pytest.mark.parametrize("operator", ["of all namespaces", "of one namespace"], indirect=True)
def test_from_the_first_pod_to_the_last_nothing_is_refused_and_no_right_is_idle(
    control_plane: ControlPlane, operator: Installed, nodes: Nodes, pods: Pods, namespace: str
) -> None:
    nodes.add(Grid(nodes=4, gpus=2, name="rights"))
    raw = copy.deepcopy(DEMO)
    raw["spec"]["resources"]["device"] = "auto"
    raw["spec"]["ttlSecondsAfterFinished"] = 1
    api, path = control_plane.api, f"{jobs_path(namespace)}/{DEMO['metadata']['name']}"
    api.create(jobs_path(namespace), raw)

    def status() -> Object:
        found: Object = api.get(path).get("status", {})
        return found

    def phase(wanted: str) -> Callable[[], bool]:
        return lambda: status().get("phase") == wanted

    def ranked() -> list[Object]:
        living = pods.list(f"{LABEL_JOB}={raw['metadata']['name']}")
        return [pod for pod in living if "deletionTimestamp" not in pod["metadata"]]

    # One round with all that an operator asks for: place, start, replace, suspend, resume, end.
    wait_for(phase("Running"), "the job running", 60)
    attempt = status()["attempt"]
    pods.end_container(ranked()[1]["metadata"]["name"], exit_code=1)
    wait_for(lambda: status()["attempt"] > attempt and phase("Running")(), "a new pod running", 60)
    api.patch(path, {"spec": {"suspend": True}})
    wait_for(phase("Suspended"), "the job suspended", 60)
    api.patch(path, {"spec": {"suspend": False}})
    wait_for(phase("Running"), "the job resumed", 60)
    for pod in ranked():
        pods.end_container(pod["metadata"]["name"], exit_code=0)
    wait_for(lambda: not api.exists(path), "the job deleted after its time to live", 60)

    user = f"system:serviceaccount:{namespace}:{operator.service_account}"
    assert refusals(control_plane.audit_log, user) == []
    roles = [body for body in render_chart(namespace=namespace) if _is_of_the_operator(body)]
    idle = rights_granted(roles) - rights_used(control_plane.audit_log, user)
    assert sorted(map(str, idle - ONLY_IN_DOUBT)) == sorted(map(str, ONLY_TO_GRANT))


def test_a_missing_right_shows_as_a_refusal(control_plane: ControlPlane, namespace: str) -> None:
    """The check above can fail."""
    nobody = Api(control_plane.kubeconfig_for(namespace, "default"))
    try:
        with pytest.raises(ApiError, match="forbidden"):
            nobody.get("/api/v1/secrets")
    finally:
        nobody.close()
    user = f"system:serviceaccount:{namespace}:default"
    assert refusals(control_plane.audit_log, user) == ["list /api/v1/secrets"]
    assert rights_used(control_plane.audit_log, user) == frozenset()


def _is_of_the_operator(body: Object) -> bool:
    labels = body["metadata"].get("labels", {})
    is_for_users = any(key.startswith("rbac.authorization.k8s.io/aggregate") for key in labels)
    return body["kind"] in ("Role", "ClusterRole") and not is_for_users
