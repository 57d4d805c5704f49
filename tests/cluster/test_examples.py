"""The API server takes every job in manifests/examples, and the pods it makes, as they stand."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_contract.jobfile import read_job
from omni_contract.records import History
from omni_contract.spec import Job
from omni_operator.kinds import POD
from omni_operator.render.pod import render_pod
from omni_planner.compile import compile_plan
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind
from tests.contract.jobs import EXAMPLES
from tests.operator.rendering import SETTINGS, job_state, place_on

FILES = sorted(EXAMPLES.glob("*.yaml"))
NAMESPACE = "examples"


@pytest.fixture(scope="module")
def restricted(cluster: Cluster) -> Iterator[str]:
    """A namespace with the strictest pod security."""
    install_job_kind(cluster)
    cluster.create_namespace(NAMESPACE)
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{NAMESPACE}", {"metadata": {"labels": label}})
    yield NAMESPACE
    cluster.api.delete(f"/api/v1/namespaces/{NAMESPACE}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_passes_a_dry_run(cluster: Cluster, restricted: str, path: Path) -> None:
    said = cluster.kubectl(
        "apply",
        "--dry-run=server",
        "--validate=strict",
        "--output=json",
        f"--namespace={restricted}",
        f"--filename={path}",
    )
    assert compile_plan(Job.read(json.loads(said))).hash == compile_plan(read_job(path)).hash


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_pods_of_an_example_pass_a_dry_run_under_restricted(
    cluster: Cluster, restricted: str, path: Path
) -> None:
    file = read_job(path)
    raw = file.model_dump(by_alias=True, mode="json", exclude_none=True)
    job, plan = job_state(raw, namespace=restricted), compile_plan(file)
    placement = place_on(job, plan)
    pod = render_pod(job, plan, placement, 0, SETTINGS, History())
    pod["spec"]["serviceAccountName"] = "default"  # Its own one is made before it.
    made = cluster.api.request(
        "POST", POD.path(restricted), pod, query={"dryRun": "All", "fieldValidation": "Strict"}
    )
    assert made["spec"]["schedulingGates"]
