"""One cluster of real nodes for all tests here."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.cluster.chart import ROOT
from tests.cluster.cluster import Cluster
from tests.cluster.real.cluster import RealCluster

_LOGS: Final = ROOT / "out" / "test-real"


@pytest.fixture(scope="session")
def real() -> Iterator[RealCluster]:
    """Three nodes, whose logs are kept. A test heals what it broke."""
    with RealCluster() as cluster:
        yield cluster
        cluster.save_logs(_LOGS)


@pytest.fixture(scope="session")
def cluster(real: RealCluster) -> Cluster:
    """Its API server, for the fixtures of the folder above."""
    return real.control_plane


@pytest.fixture
def namespace(cluster: Cluster, namespace: str) -> str:
    """A namespace of this test's own that takes restricted pods only."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})
    return namespace
