"""The progress Lease is renewed at a server that checks as the API server does."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_contract.names import ANNOTATION_PROGRESS
from omni_contract.records import History, JobHeartbeat
from omni_contract.spec_run import FaultClass
from omni_trainer.supervisor.heartbeat import RunReader
from omni_trainer.supervisor.lease import RENEW_S, LeaseApi, LeaseKeeper
from tests.cluster.certificates import Certificate
from tests.fakes.lease_server import LeaseServer, make_certificate
from tests.trainer.test_heartbeat import Folder


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "token").write_text("first\n")
    return folder


@pytest.fixture(scope="module")
def certificate(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("ca"), secrets)


class Kept:
    """A keeper of a run folder, and the server that it talks to."""

    def __init__(self, folder: Folder, server: LeaseServer, secrets: Path) -> None:
        self.folder = folder
        self.server = server
        api = LeaseApi.of(
            "team/tiny-progress", host="127.0.0.1", port=str(server.port), token_dir=secrets
        )
        self.keeper = LeaseKeeper(api, RunReader(folder.path), holder="tiny-0")

    def beat(self) -> JobHeartbeat:
        """The heartbeat in the Lease."""
        raw = self.server.lease["metadata"]["annotations"][ANNOTATION_PROGRESS]
        return JobHeartbeat.model_validate_json(raw)

    def wait_for(self, number: int, within_s: float = 10) -> float:
        """Wait for so many renewals; seconds it took."""
        begin = time.monotonic()
        while len(self.server.patches) < number:
            assert time.monotonic() - begin < within_s, self.server.requests
            time.sleep(0.01)
        return time.monotonic() - begin


@pytest.fixture
def kept(tmp_path: Path, certificate: Certificate, secrets: Path) -> Iterator[Kept]:
    (secrets / "token").write_text("first\n")
    with LeaseServer(certificate).serving() as server:
        found = Kept(Folder(tmp_path), server, secrets)
        yield found
        found.keeper.stop()


def test_a_change_of_phase_is_told_at_once_and_progress_every_few_seconds(kept: Kept) -> None:
    kept.keeper.start()
    time.sleep(0.5)
    assert not kept.server.requests  # not rank 0's pod yet
    kept.keeper.follow(3, History(user_restarts=1))
    kept.wait_for(1)
    assert (kept.beat().attempt, kept.beat().phase) == (3, "starting")
    assert kept.beat().history == History(user_restarts=1)
    kept.folder.progress("training", 1, attempt=3)
    assert kept.wait_for(2) < RENEW_S / 2
    kept.folder.progress("training", 2, attempt=3)
    assert RENEW_S / 2 < kept.wait_for(3) < RENEW_S + 3
    assert kept.beat().step == 2
    spec = kept.server.lease["spec"]
    assert spec["holderIdentity"] == "tiny-0"
    assert spec["renewTime"].endswith("Z") and len(spec["renewTime"]) == 27
    assert [method for method, _ in kept.server.requests] == ["GET", "PATCH", "PATCH", "PATCH"]


def test_the_end_is_told_though_the_last_renewal_was_just_now(kept: Kept) -> None:
    kept.keeper.follow(1, History())
    kept.keeper.start()
    kept.wait_for(1)
    kept.folder.progress("done", 12)
    kept.keeper.stop()
    assert (kept.beat().phase, kept.beat().step) == ("done", 12)


def test_supervisors_that_lost_each_other_are_told_of(kept: Kept) -> None:
    kept.keeper.follow(1, History())
    kept.keeper.start()
    kept.wait_for(1)
    kept.keeper.tell_over(1, "the supervisor of node 1 is silent")
    kept.wait_for(2, RENEW_S / 2)
    assert kept.beat().last_fault is FaultClass.RENDEZVOUS
    assert kept.beat().last_message == "the supervisor of node 1 is silent"
    kept.keeper.follow(2, History())
    kept.wait_for(3, RENEW_S / 2)
    assert (kept.beat().attempt, kept.beat().last_fault) == (2, None)


def test_tokens_go_on_from_the_pod_before(kept: Kept) -> None:
    before = JobHeartbeat(attempt=1, generation=0, phase="training", step=20, tokens=2000)
    kept.server.change({ANNOTATION_PROGRESS: before.model_dump_json()})
    kept.folder.step(21)
    kept.keeper.follow(2, History())
    kept.keeper.start()
    kept.wait_for(1)
    assert kept.beat().tokens == 2500


def test_a_pod_of_an_older_attempt_leaves_the_lease_alone(
    kept: Kept, capfd: pytest.CaptureFixture[str]
) -> None:
    newer = JobHeartbeat(attempt=5, generation=0, phase="training", step=20)
    kept.keeper.follow(4, History())
    kept.keeper.start()
    kept.wait_for(1)
    kept.server.change({ANNOTATION_PROGRESS: newer.model_dump_json()})
    kept.folder.progress("training", 1, attempt=4)  # asks for a renewal at once
    begin = time.monotonic()
    while ("PATCH", 409) not in kept.server.requests:
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
    kept.keeper.stop()
    assert kept.beat() == newer
    assert "attempt 5 holds it, this pod is of 4" in capfd.readouterr().err


def test_a_refusal_is_said_once_and_a_new_token_is_taken(
    kept: Kept, secrets: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept.server.token = "second"
    kept.keeper.follow(1, History())
    kept.keeper.start()
    begin = time.monotonic()
    while len(kept.server.requests) < 2:
        assert time.monotonic() - begin < 3 * RENEW_S
        time.sleep(0.05)
    said = capfd.readouterr().err
    assert said.count("the progress Lease is not renewed: HTTPError: HTTP Error 401") == 1
    (secrets / "token").write_text("second")
    kept.wait_for(1, 3 * RENEW_S)
    assert kept.beat().attempt == 1


def test_an_ipv6_address_and_a_missing_token_are_no_surprise(tmp_path: Path) -> None:
    api = LeaseApi.of("team/x", host="::1", port="443", token_dir=tmp_path)
    assert api.url.startswith("https://[::1]:443/apis/coordination.k8s.io/v1/namespaces/team/")
    keeper = LeaseKeeper(api, RunReader(tmp_path), holder="x")
    keeper.follow(1, History())
    keeper.start()
    begin = time.monotonic()
    keeper.stop()
    assert time.monotonic() - begin < 3
