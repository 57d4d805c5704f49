"""One control plane for the whole test run, and a namespace and nodes for each test."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.cluster import binaries
from tests.cluster.cluster import Cluster
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import Nodes
from tests.cluster.pods import Pods

ENV_KUBECONFIG: Final = "OMNI_TEST_KUBECONFIG"
"""Kubeconfig of a real cluster to test on. Tests that need simulated nodes are skipped there."""

# The stories assert, but are not in test modules.
pytest.register_assert_rewrite("tests.cluster.lifecycle")

_numbers = iter(range(10**6))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster of this run: a control plane of its own, or the real one the user names."""
    kubeconfig = os.environ.get(ENV_KUBECONFIG)
    if kubeconfig:
        folder = tmp_path_factory.mktemp("cluster")
        with Cluster(Path(kubeconfig).absolute(), binaries.path("kubectl"), folder) as real:
            yield real
    else:
        with ControlPlane() as control_plane:
            yield control_plane


@pytest.fixture(scope="session")
def control_plane(cluster: Cluster) -> ControlPlane:
    """The cluster, for tests that break its nodes or restart its API server."""
    if not isinstance(cluster, ControlPlane):
        pytest.skip(f"{ENV_KUBECONFIG} names a real cluster, whose nodes are not simulated")
    return cluster


@pytest.fixture
def namespace(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test's own, deleted after it without waiting for its end."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    name = f"{words[:40].strip('-')}-{os.getpid()}-{next(_numbers)}"
    cluster.create_namespace(name)
    yield name
    cluster.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[Nodes]:
    """No simulated nodes yet; those that the test adds are gone after it."""
    with Nodes(control_plane) as added:
        yield added


@pytest.fixture
def pods(cluster: Cluster, namespace: str) -> Pods:
    """The pods of this test's namespace."""
    return Pods(cluster.api, namespace)
