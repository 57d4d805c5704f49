"""`kubectl mmtj logs` of a job without pods, against a real API server.

Simulated pods run nothing: what is read in them is tested with the reader's own program.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from omni_contract.names import LABEL_LOG_READER
from omni_operator.kinds import POD
from omni_operator.render.log_reader import render_log_reader, with_log_reader
from omni_operator.render.objects import render_objects, render_placement
from omni_operator.watch.observe import read_job
from tests.cli.job_objects import running_status
from tests.cluster.api import Object, wait_for
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind, jobs_path
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.pods import Pods
from tests.cluster.test_plugin import Plugin
from tests.cluster.test_render import RICH, create
from tests.contract.jobs import DEMO, changed
from tests.operator.rendering import SETTINGS, place_on, plan_of, with_template

RBAC: Final = "/apis/rbac.authorization.k8s.io/v1/namespaces"


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> str:
    install_job_kind(cluster)
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    return namespace


@pytest.fixture
def plugin(cluster: Cluster, restricted: str, tmp_path: Path) -> Iterator[Plugin]:
    yield Plugin(cluster, restricted, tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        with_template({}),
        with_template(RICH),
        changed("spec.storage", {"credentialsSecret": "omni-s3"}),
    ],
    ids=["gpu", "overrides", "credentials"],
)
def test_the_pod_passes_restricted_and_holds_no_unknown_field(
    raw: dict[str, Any], cluster: Cluster, restricted: str
) -> None:
    job = read_job(cluster.api.create(jobs_path(restricted), raw))
    plan = plan_of(raw)
    pod = render_log_reader(job, plan, place_on(job, plan), SETTINGS)
    query = {"fieldValidation": "Strict", "dryRun": "All"}
    spec = cluster.api.request("POST", POD.path(restricted), pod, query=query)["spec"]
    assert not [v for v in spec["volumes"] if v["name"].startswith("kube-api-access")]


def over(plugin: Plugin) -> None:
    """A job that had pods, with what its operator left."""
    job = read_job(plugin.create_job())
    plugin.set_status(running_status())
    plan = plan_of(DEMO)
    placement = place_on(job, plan, attempt=2)
    bare = render_placement(job, placement)
    create(plugin.cluster.api, render_objects(job, plan).plan)
    create(plugin.cluster.api, with_log_reader(bare, job, plan, placement, SETTINGS))


def test_the_pod_runs_and_goes_again_even_where_nothing_can_be_read_in_it(
    plugin: Plugin, nodes: Nodes, pods: Pods
) -> None:
    nodes.add(Grid(name="reader"))
    over(plugin)
    said = plugin.run("logs", "--attempt=1", "--node=1", code=2)
    assert "no pod of job stamps runs: one is made to read its logs" in said
    assert "does not start" not in said  # it ran, but no kubelet was there to ask
    wait_for(lambda: not pods.list(LABEL_LOG_READER), "the pod to be gone")


def test_who_may_not_make_pods_is_told_which_right_that_takes(plugin: Plugin) -> None:
    over(plugin)
    api, namespace = plugin.cluster.api, plugin.namespace
    name = {"metadata": {"name": "looks"}}
    looks: Object = {
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "configmaps"], "verbs": ["get", "list"]},
            {
                "apiGroups": ["megascale-omni.dev"],
                "resources": ["multimodaltrainingjobs"],
                "verbs": ["get", "list"],
            },
        ]
    }
    bound: Object = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "looks"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    }
    api.create(f"{RBAC}/{namespace}/roles", name | looks)
    api.create(f"{RBAC}/{namespace}/rolebindings", name | bound)
    kubeconfig = plugin.cluster.kubeconfig_for(namespace, "default")
    said = plugin.run("logs", f"--kubeconfig={kubeconfig}", code=2)
    assert 'cannot create resource "pods"' in said and "Ask who runs the cluster" in said
    assert not api.list(POD.path(namespace))
