"""One cluster of real nodes for all tests here."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.processes import last_lines
from tests.cluster.real.cluster import RealCluster
from tests.cluster.real.node import SERVICES


@pytest.fixture(scope="session")
def real() -> Iterator[RealCluster]:
    """Three nodes. A test heals what it broke."""
    with RealCluster() as cluster:
        yield cluster
        for node in cluster.nodes.values():  # pytest shows it where the last test fails
            for service in SERVICES:
                print(f"{node.name} {service}: {last_lines(node.log(service))}")


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
