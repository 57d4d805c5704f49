"""One S3 server for the whole test run, started when the first test needs it, and Ctrl-C."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A real S3 server on free loopback ports."""
    folder: Path = tmp_path_factory.mktemp("s3")
    with LocalS3(folder) as server:
        yield server


@pytest.fixture
def s3_env(s3_server: LocalS3) -> Iterator[dict[str, str]]:
    """The server in this process's environment (and so in that of its children)."""
    env = dict(s3_server.env)
    with mock.patch.dict(os.environ, env):
        yield env


@pytest.fixture(scope="session")
def _store(s3_server: LocalS3) -> Store:
    with mock.patch.dict(os.environ, dict(s3_server.env)):
        return Store.open(StorageSpec())


@pytest.fixture
def s3(_store: Store, s3_env: dict[str, str]) -> Store:
    """A store found by the AWS chain alone; opened once, as a client takes long to make."""
    return _store


# A shell's background jobs are started deaf to it, and so would be all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

_BUCKET = "tests"  # one for all: each bucket would take a volume of the server
_folders = iter(range(10**6))


@pytest.fixture
def bucket(s3: Store) -> str:
    """An empty place of this test's own, as an address: s3://tests/0."""
    s3.create_bucket(_BUCKET)
    return f"s3://{_BUCKET}/{next(_folders)}"
