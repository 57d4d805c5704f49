"""What the tests of the command line share."""

from pathlib import Path

import pytest

from tests.cli.job_objects import FakeKubectl


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    fake = FakeKubectl.install(tmp_path)
    for name, value in fake.environ.items():
        monkeypatch.setenv(name, value)
    return fake
