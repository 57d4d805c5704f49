"""The operator as a process: one leads, another follows, and what happens around it ends neither.

Seconds are printed; what is asserted leaves room for a slow machine.
"""

import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from omni_contract.names import GROUP, KIND, PLURAL, VERSION
from tests.cluster.api import Object, wait_for
from tests.cluster.chart import Installed, install_chart, uninstall_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.job_kind import jobs_path
from tests.cluster.processes import free_port
from tests.contract.jobs import DEMO


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One process of the operator."""

    control_plane: ControlPlane
    name: str
    port: int

    def page(self, path: str) -> tuple[int, str]:
        """Status and text; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as said:
                return said.status, said.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()
        except OSError:
            return 0, ""

    @property
    def leads(self) -> bool:
        return self.page("/readyz") == (200, "leading\n")

    @property
    def stands_by(self) -> bool:
        return self.page("/readyz") == (200, "standing by\n")

    @property
    def log(self) -> str:
        return self.control_plane.processes.log(self.name).read_text()


class Replicas:
    """Processes with the chart's rights, of one release."""

    def __init__(self, control_plane: ControlPlane, installed: Installed) -> None:
        self._control_plane = control_plane
        self._installed = installed
        self._names: list[str] = []
        self._numbers = iter(range(100))

    def start(self, *options: str) -> Replica:
        name, port = f"{self._installed.namespace}-{next(self._numbers)}", free_port()
        self._names.append(name)
        arguments = [*self._installed.arguments, f"--port={port}", *options]
        self._control_plane.processes.start(
            name,
            [sys.executable, "-m", "omni_operator.main", *arguments],
            env={"KUBECONFIG": str(self._installed.kubeconfig)},
        )
        return Replica(control_plane=self._control_plane, name=name, port=port)

    def start_two(self) -> tuple[Replica, Replica]:
        """One that leads and one that stands by."""
        first = self.start()
        wait_for(lambda: first.leads, "the first replica leading")
        second = self.start()
        wait_for(lambda: second.stands_by, "the second replica standing by")
        return first, second

    def stop(self, replica: Replica, with_signal: signal.Signals = signal.SIGTERM) -> int:
        self._names.remove(replica.name)
        return self._control_plane.processes.stop(replica.name, with_signal=with_signal)

    def start_again(self, replica: Replica) -> None:
        self._control_plane.processes.stop(replica.name)
        self._control_plane.processes.start_again(replica.name)

    def take_rights_away(self) -> None:
        namespace = f"--namespace={self._installed.namespace}"
        self._control_plane.kubectl("delete", "rolebinding", "--all", namespace)
        uninstall_chart(self._control_plane, self._installed)

    def stop_all(self) -> None:
        for name in self._names:
            self._control_plane.processes.stop(name)


@pytest.fixture
def replicas(control_plane: ControlPlane, namespace: str) -> Iterator[Replicas]:
    installed = install_chart(control_plane, namespace)
    replicas = Replicas(control_plane, installed)
    yield replicas
    replicas.stop_all()
    uninstall_chart(control_plane, installed)


def create_job(control_plane: ControlPlane, namespace: str, name: str) -> None:
    metadata = {"name": name, "namespace": namespace}
    control_plane.api.create(jobs_path(namespace), {**DEMO, "metadata": metadata})


def is_answered(control_plane: ControlPlane, namespace: str, name: str) -> bool:
    job: Object = control_plane.api.get(f"{jobs_path(namespace)}/{name}")
    return "observedGeneration" in (job.get("status") or {})


def seconds_until(holds: object, what: str) -> float:
    assert callable(holds)
    began_s = time.monotonic()
    wait_for(holds, what, timeout_s=60, every_s=0.1)
    return time.monotonic() - began_s


def test_a_killed_leader_is_followed_within_20_s(
    control_plane: ControlPlane, namespace: str, replicas: Replicas
) -> None:
    first, second = replicas.start_two()
    replicas.stop(first, signal.SIGKILL)
    create_job(control_plane, namespace, "orphan")
    seconds = seconds_until(lambda: second.leads, "the second replica leading")
    print(f"failover after a kill: {seconds:.1f} s")
    assert seconds < 25
    seconds_until(lambda: is_answered(control_plane, namespace, "orphan"), "the job answered")


def test_a_leader_that_is_asked_to_end_hands_over_at_once(
    control_plane: ControlPlane, namespace: str, replicas: Replicas
) -> None:
    first, second = replicas.start_two()
    began_s = time.monotonic()
    assert replicas.stop(first) == 0
    ended_s = time.monotonic() - began_s
    seconds = seconds_until(lambda: second.leads, "the second replica leading")
    print(f"ended after {ended_s:.1f} s, failover after SIGTERM: {seconds:.1f} s")
    assert ended_s < 5
    assert seconds < 8
    assert "Traceback" not in first.log


def test_one_that_stands_by_ends_at_once(replicas: Replicas) -> None:
    _, second = replicas.start_two()
    assert replicas.stop(second) == 0


def test_a_leader_that_loses_its_lease_ends_with_a_sentence(
    control_plane: ControlPlane, namespace: str, replicas: Replicas
) -> None:
    first = replicas.start()
    wait_for(lambda: first.leads, "the replica leading")
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
    (lease,) = control_plane.api.list(leases)
    stolen = {"spec": {"holderIdentity": "thief"}}
    control_plane.api.patch(f"{leases}/{lease['metadata']['name']}", stolen)
    wait_for(lambda: control_plane.processes.has_ended(first.name), "the replica ended")
    assert replicas.stop(first) == 1
    assert "is held by 'thief'" in first.log
    assert "Traceback" not in first.log


def test_a_restarted_api_server_is_survived_and_the_watches_come_back(
    control_plane: ControlPlane, namespace: str, replicas: Replicas
) -> None:
    first = replicas.start()
    wait_for(lambda: first.leads, "the replica leading")
    began_s = time.monotonic()
    control_plane.restart_api_server()
    away_s = time.monotonic() - began_s
    create_job(control_plane, namespace, "after")

    def answered() -> bool:
        # On a slow machine it is away for longer than the Lease lasts; a kubelet starts it again.
        if control_plane.processes.has_ended(first.name):
            assert "could not be renewed for 1" in first.log, first.log
            replicas.start_again(first)
        return is_answered(control_plane, namespace, "after")

    seconds = seconds_until(answered, "the job answered")
    print(f"API server away {away_s:.1f} s, a new job answered {seconds:.1f} s after that")
    wait_for(lambda: first.leads, "the replica leading")
    assert first.page("/healthz")[0] == 200

    def is_current() -> bool:
        silent, back = (first.log.rfind(f"The watches are {word}") for word in ("silent", "back"))
        return back >= silent

    wait_for(is_current, "the watches back")
    assert "Traceback" not in first.log


def test_missing_rights_are_told_at_the_start(
    control_plane: ControlPlane, replicas: Replicas
) -> None:
    replicas.take_rights_away()
    replica = replicas.start()
    wait_for(lambda: control_plane.processes.has_ended(replica.name), "the replica ended")
    assert replicas.stop(replica) == 1
    assert 'cannot get resource "leases"' in replica.log
    assert "Traceback" not in replica.log


def test_what_is_counted_can_be_scraped(replicas: Replicas) -> None:
    first = replicas.start()
    wait_for(lambda: first.leads, "the replica leading")

    def counted() -> str:
        return first.page("/metrics")[1]

    wait_for(lambda: "omni_operator_watch_age" in counted(), "the age of watches counted")
    assert 'resource="leases"' in counted()


def test_a_kind_that_is_taken_away_ends_it_with_a_sentence() -> None:
    """In a cluster of its own: all jobs go with their kind."""
    with ControlPlane() as control_plane:
        control_plane.create_namespace("shell")
        replicas = Replicas(control_plane, install_chart(control_plane, "shell"))
        first = replicas.start()
        wait_for(lambda: first.leads, "the replica leading")
        control_plane.kubectl("delete", "crd", f"{PLURAL}.{GROUP}")
        wait_for(lambda: control_plane.processes.has_ended(first.name), "the replica ended")
        assert replicas.stop(first) == 1
        last_words = first.log.splitlines()[-1]
        assert f"does not serve {KIND}.{GROUP}/{VERSION} any more: apply the CRD" in last_words
