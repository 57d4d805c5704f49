"""The job kind in a test cluster, without an operator: what the API server alone does with jobs."""

from pathlib import Path
from typing import Final

from omni_contract.names import GROUP, PLURAL, VERSION
from tests.cluster.api import Object, wait_for
from tests.cluster.cluster import Cluster

CRD_FILE: Final = Path(__file__).resolve().parents[2] / "manifests" / "crd.yaml"

_CRD: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"


def install_job_kind(cluster: Cluster) -> None:
    """Apply the CRD of this checkout and wait until jobs can be created. Repeating it is cheap."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRD_FILE}")

    def is_served() -> bool:
        conditions = cluster.api.get(_CRD)["status"]["conditions"] or []
        return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)

    wait_for(is_served, "the job kind served", every_s=0.05)
    wait_for(lambda: cluster.api.exists(f"/apis/{GROUP}/{VERSION}/{PLURAL}"), "jobs listed")


def jobs_path(namespace: str) -> str:
    """Where the jobs of a namespace are."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"


def set_status(cluster: Cluster, namespace: str, name: str, status: Object) -> None:
    """Write a status as the operator does."""
    cluster.api.patch(f"{jobs_path(namespace)}/{name}/status", {"status": status})
