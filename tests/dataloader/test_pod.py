"""The data container of a pod: it starts the service, starts it again, and says when to give up."""

import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.shared_files import END_FILE, PEERS_FILE, DataEnd, DataPeers
from omni_dataloader.read_logs import LogReader, NotStoredError, Wanted
from omni_dataloader.store import Store
from tests.dataloader.serving import Undisturbed, assert_same, join_all, plan_of, take
from tests.fakes.sidecar_client import fake_plan
from tests.trainer.pods import DataContainer, PodFolder, end_all, until


@pytest.fixture
def start(tmp_path: Path, s3_env: Mapping[str, str]) -> Iterator[Any]:
    containers: list[DataContainer] = []

    def one(plan: JobPlan, index: int | None, *arguments: str) -> DataContainer:
        pod = PodFolder(tmp_path / f"pod-{len(containers)}", plan)
        pod.assign(1, index, "127.0.0.1:1")
        containers.append(DataContainer(pod, s3_env, *arguments))
        return containers[-1]

    yield one
    end_all(containers)


def saved_to(uri: str, plan: JobPlan) -> JobPlan:
    """The plan with its checkpoints, and so the logs, there."""
    raw = plan.model_dump(mode="json", by_alias=True)
    raw["spec"]["checkpoint"]["uri"] = uri
    return JobPlan.model_validate(raw)


def service_of(container: DataContainer, *, other_than: int = 0) -> psutil.Process:
    """The data service below the container's main program."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = psutil.Process(container.process.pid).children()
        return bool(found) and found[0].pid != other_than

    until(is_there, "service", lambda: container.log)
    return found[0]


def node_of(service: psutil.Process) -> str:
    return next(word for word in service.cmdline() if word.startswith("--node="))


def end_of(container: DataContainer) -> DataEnd:
    path = container.pod.shared / END_FILE
    until(path.exists, "end file", lambda: container.log)
    end = DataEnd.load(path)
    assert end is not None
    return end


def test_services_serve_once_they_know_each_other_and_come_back_when_killed(
    start: Any, uri: str, undisturbed: Undisturbed
) -> None:
    plan = plan_of(uri)
    containers = [start(plan, index) for index in range(2)]
    sockets = [container.pod.socket for container in containers]
    for container in containers:  # the readiness probe looks for it
        until(container.pod.socket.is_socket, "socket", lambda: containers[0].log)
    addresses = tuple(container.pod.data_address for container in containers)
    for container in containers:
        DataPeers(attempt=1, addresses=addresses).save(container.pod.shared / PEERS_FILE)
    clients = join_all(sockets, plan)
    assert_same([take(clients, 1)], undisturbed.steps[:1])
    killed = service_of(containers[1])
    killed.kill()
    again = service_of(containers[1], other_than=killed.pid)
    assert node_of(again) == "--node=1"
    until(lambda: containers[1].log.count("serving socket=") == 2, "service", lambda: "")
    for container in containers:
        assert container.end() == Exit.INTERRUPTED
        assert not container.pod.socket.exists()


def test_what_a_killed_pod_said_can_still_be_read(
    start: Any, uri: str, s3: Store, bucket: str
) -> None:
    container = start(saved_to(bucket, plan_of(uri)), 0, "--ship-every=0.2")
    until(lambda: "serving socket=" in container.log, "service", lambda: container.log)
    (container.pod.run_dir / "logs" / "rank-3.1.0.log").write_text("I am 3\n")
    reader = LogReader(s3, bucket, "pod")

    def stored(**wanted: Any) -> str:
        try:
            (stream,) = reader.find(Wanted(**wanted))
        except NotStoredError:
            return ""
        return b"".join(reader.read(part.block) for part in stream.parts).decode()

    until(lambda: stored(rank=3) == "I am 3\n", "log", lambda: container.log)
    service = service_of(container)
    container.process.kill()
    service.kill()
    assert "serving socket=" in stored(container="data")
    assert container.log.startswith(stored(container="data"))


def test_the_last_words_of_a_container_are_stored_before_it_ends(
    start: Any, uri: str, s3: Store, bucket: str
) -> None:
    container = start(saved_to(bucket, plan_of(uri)), 1, "--ship-every=1000")
    until(lambda: "serving socket=" in container.log, "service", lambda: container.log)
    assert container.end() == Exit.INTERRUPTED
    reader = LogReader(s3, bucket, "pod")
    (stream,) = reader.find(Wanted(node=1, container="data"))
    assert b"".join(reader.read(p.block) for p in stream.parts).decode() == container.log


def test_what_is_read_after_the_end_of_the_service_is_stored(
    start: Any, uri: str, s3: Store, bucket: str
) -> None:
    container = start(saved_to(bucket, plan_of(uri)), 0, "--ship-every=0.2")
    until(lambda: "serving socket=" in container.log, "service", lambda: container.log)
    reader = LogReader(s3, bucket, "pod")

    def stored() -> str:
        try:
            (stream,) = reader.find(Wanted(container="data"))
        except NotStoredError:
            return ""
        return b"".join(reader.read(part.block) for part in stream.parts).decode()

    until(lambda: "serving socket=" in stored(), "log", lambda: container.log)
    service = service_of(container)
    with open(f"/proc/{service.pid}/fd/2", "w") as stderr:  # as a child of the service has it
        container.process.terminate()
        service.wait(20)
        time.sleep(0.2)  # a container that waits for the service alone has looked a last time
        stderr.write("last words\n")
    assert container.process.wait(20) == Exit.INTERRUPTED
    assert stored().endswith("last words\n")


def test_a_spare_serves_nobody_until_it_gets_a_node(start: Any, uri: str) -> None:
    container = start(plan_of(uri), None)
    other = start(plan_of(uri), 0)
    first = service_of(other)
    assert not psutil.Process(container.process.pid).children()
    container.pod.assign(2, 1, "127.0.0.1:1")
    assert node_of(service_of(container)) == "--node=1"
    other.pod.assign(2, 1, "127.0.0.1:1")  # another node of the plan: another service
    assert node_of(service_of(other, other_than=first.pid)) == "--node=1"
    assert container.end() == Exit.INTERRUPTED


def test_a_mistake_ends_the_container_and_is_told_to_the_trainer(start: Any) -> None:
    container = start(fake_plan("s3://no-such-bucket"), 0)
    end = end_of(container)
    assert end.exit_code == Exit.USER
    assert "no-such-bucket" in end.message
    assert container.process.wait(10) == Exit.USER
    assert container.log.rstrip().endswith(f"giving up: {end.message}")  # what the kubelet shows


def test_a_stopped_service_is_killed_and_started_again(start: Any, uri: str) -> None:
    container = start(plan_of(uri), 0, "--silent-after=3")
    stopped = service_of(container)
    until(container.pod.socket.with_suffix(".beat").exists, "beat", lambda: container.log)
    stopped.send_signal(signal.SIGSTOP)
    service_of(container, other_than=stopped.pid)
    assert "the data service is stopped or stuck: it is killed" in container.log


def test_a_service_that_keeps_dying_is_given_up(start: Any, uri: str) -> None:
    container = start(plan_of(uri), 0)
    pid = 0
    for _ in range(6):
        service = service_of(container, other_than=pid)
        pid = service.pid
        service.send_signal(signal.SIGKILL)
    end = end_of(container)
    assert end.exit_code == Exit.ERROR
    assert end.message.startswith("the data service died 6 times within a minute, last by signal 9")


def test_the_service_ends_with_its_container(start: Any, uri: str) -> None:
    container = start(plan_of(uri), 0)
    service = service_of(container)
    until(container.pod.socket.is_socket, "socket", lambda: container.log)
    container.process.kill()
    container.process.wait()
    service.wait(20)
