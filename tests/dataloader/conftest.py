"""Sources in S3 and what an undisturbed run over them serves: made once for all service tests."""

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store
from tests.dataloader.serving import NUM_STEPS, Undisturbed, join_all, plan_of, take
from tests.fakes.sidecar_client import services
from tests.fakes.sources import FakeSources, make_sources


@pytest.fixture(scope="session")
def shared_store(s3_server: LocalS3) -> Iterator[Store]:
    """A store that outlives single tests."""
    with mock.patch.dict(os.environ, s3_server.env):
        store = Store.open(StorageSpec())
    store.create_bucket("serve")
    yield store


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> FakeSources:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def uri(shared_store: Store, fakes: FakeSources) -> str:
    """Address of sources without a fault."""
    fakes.upload(shared_store, "s3://serve/good")
    return "s3://serve/good"


@pytest.fixture(scope="session")
def undisturbed(
    shared_store: Store, uri: str, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """What every rank gets in each step, and the state after each step."""
    plan = plan_of(uri)
    with services(plan, tmp_path_factory.mktemp("undisturbed"), shared_store) as paths:
        clients = join_all(paths, plan)
        steps, states = [], []
        for step in range(1, NUM_STEPS + 1):
            steps.append(take(clients, step))
            states.append(clients[0].snapshot(step))
            assert clients[3].snapshot(step) == states[-1]  # the same on every node
    return Undisturbed(steps=steps, states=states)
