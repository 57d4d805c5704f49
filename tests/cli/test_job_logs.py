"""`kubectl mmtj logs` finds a log wherever it is, and says what is missing where it cannot."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from omni_cli.job import main
from omni_contract.log_store import NOTICE
from omni_contract.names import LABEL_LOG_READER
from tests.cli.job_objects import (
    UID,
    FakeKubectl,
    a_job,
    a_pod,
    log_reader_map,
    running_status,
)

Capture = pytest.CaptureFixture[str]
PODS = [
    a_pod("stamps-5d1ce-1-0", 0, attempt=1, phase="Failed"),
    a_pod("stamps-5d1ce-2-0", 0),
    a_pod("stamps-5d1ce-1-1", 1),
    a_pod("stamps-5d1ce-1-2", None),
]
READS = [
    "--", "python", "-m", "omni_dataloader.read_logs", "--job=stamps-5d1ce",
]  # fmt: skip
NOT_YOURS = (
    'Error from server (Forbidden): error when creating "STDIN": pods is forbidden: User "eve" '
    'cannot create resource "pods" in API group "" in the namespace "train"'
)


def verbs(kubectl: FakeKubectl) -> list[str]:
    """What was done beside looking."""
    words = [next(word for word in call if not word.startswith("-")) for call in kubectl.calls]
    return [word for word in words if word != "get"]


@pytest.mark.parametrize(
    ("arguments", "called"),
    [
        ([], ["logs", "stamps-5d1ce-2-0", "--container=trainer"]),
        (
            ["--node", "1", "-c", "data", "-f", "--tail", "5"],
            ["logs", "stamps-5d1ce-1-1", "--tail=5", "--container=data", "--follow"],
        ),
        (["--previous-attempt"], ["logs", "stamps-5d1ce-1-0", "--container=trainer"]),
        (["--attempt", "2"], ["logs", "stamps-5d1ce-2-0", "--container=trainer"]),
        (
            ["--all"],
            [
                "logs",
                "--selector=megascale-omni.dev/job-uid=5d1ce0a2-0000-4000-8000-000000000001",
                "--prefix",
                "--max-log-requests=4",
                "--tail=-1",
                "--container=trainer",
            ],
        ),
    ],
    ids=["default", "node-1-data", "previous", "attempt", "all"],
)
def test_the_log_of_a_pod_that_is_there_is_kubectls(
    arguments: list[str], called: list[str], kubectl: FakeKubectl, capfd: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    assert main(["logs", *arguments]) == 0
    assert kubectl.calls[-1] == called
    assert capfd.readouterr().out.startswith("the log of ")


@pytest.mark.parametrize(
    ("arguments", "pod", "asked"),
    [
        ("--attempt=1 --node=1", "1-1", "--node=1 --container=trainer --attempt=1"),
        ("--attempt=2 --node=1", "1-1", "--node=1 --container=trainer --attempt=2"),
        ("--previous-attempt --node=1", "1-1", "--node=1 --container=trainer --attempt=1"),
        ("--node=7 -c data", "2-0", "--node=7 --container=data"),
        ("--rank=9 --tail=3", "2-0", "--node=0 --container=trainer --rank=9 --tail=3"),
    ],
    ids=["lived-on", "lives-on", "previous", "gone", "rank"],
)
def test_what_no_pod_has_is_read_from_the_store_in_one_of_the_job(
    arguments: str, pod: str, asked: str, kubectl: FakeKubectl, capfd: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    assert main(["logs", *arguments.split()]) == 0
    name = f"stamps-5d1ce-{pod}"
    assert kubectl.calls[-1] == ["exec", name, "--container=data", *READS, *asked.split()]
    assert capfd.readouterr().out == f"stored, read in {name}\n"


def test_a_pod_that_kubectl_does_not_get_to_is_read_from_the_store(
    kubectl: FakeKubectl, capfd: Capture
) -> None:
    """Its node is lost, say; the pod stays in the API until it is replaced."""
    kubectl.serve(a_job(status=running_status()), *PODS)
    kubectl.refuse("Error from server: Get https://10.0.0.7:10250: i/o timeout", "logs")
    assert main(["logs", "--tail=5"]) == 0
    assert kubectl.calls[-1][-4:] == [
        "--node=0", "--container=trainer", "--attempt=2", "--tail=5"
    ]  # fmt: skip
    said = capfd.readouterr()
    assert said.out.startswith("stored, read in ")
    assert "kubectl cannot show the log of pod stamps-5d1ce-2-0" in said.err


def test_a_pod_that_has_not_started_has_nothing_stored(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()), a_pod("stamps-5d1ce-2-0", 0, phase="Pending"))
    kubectl.refuse("container is waiting to start", "logs")
    assert main(["logs"]) == 2
    assert verbs(kubectl) == ["logs"]


def test_an_attempt_that_is_over_is_not_followed(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    assert main(["logs", "--rank=1", "-f", "--attempt=1"]) == 0
    assert "--stdin" not in kubectl.calls[-1] and "--follow" not in kubectl.calls[-1]


def test_a_stored_log_is_followed_for_as_long_as_somebody_waits(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    assert main(["logs", "--rank=1", "-f"]) == 0
    call = kubectl.calls[-1]
    assert call[:4] == ["exec", "stamps-5d1ce-2-0", "--container=data", "--stdin"]
    assert call[-1] == "--follow"


@contextmanager
def running(kubectl: FakeKubectl, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The plugin as a process that does not outlive its test."""
    command = [sys.executable, "-m", "omni_cli.job", *arguments]
    environ = os.environ | kubectl.environ
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_who_follows_is_told_of_an_outage_at_once(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    kubectl.notify(f"a line of a library\n{NOTICE}the store is away")
    with running(kubectl, "logs", "--rank=1", "-f") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"{NOTICE}the store is away\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_notice_is_no_part_of_the_error(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS)
    kubectl.refuse(f"{NOTICE}away\nthe bucket is gone\ncommand terminated with exit code 2", "exec")
    assert main(["logs", "--rank=1", "-f"]) == 2
    assert capsys.readouterr().err == f"{NOTICE}away\nkubectl mmtj: the bucket is gone\n"


def test_where_no_pod_runs_one_is_made_and_goes_again(kubectl: FakeKubectl, capfd: Capture) -> None:
    kubectl.serve(a_job(status=running_status()), log_reader_map(), PODS[0])
    assert main(["logs", "--node=1"]) == 0
    assert verbs(kubectl) == ["delete", "create", "exec", "delete"]
    name = "stamps-5d1ce-logs-x7k2p"
    left, *_, executed, deleted = [call for call in kubectl.calls if call[1] != "get"]
    assert f"--selector={LABEL_LOG_READER}={UID}" in left
    assert executed[:3] == ["exec", name, "--container=data"]
    assert deleted[1:4] == ["delete", "pod", name]
    said = capfd.readouterr()
    assert said.out == f"stored, read in {name}\n"
    assert "no pod of job stamps runs: one is made to read its logs" in said.err


@pytest.mark.parametrize(
    "words",
    [
        'error: unable to upgrade connection: container not found ("data")',
        "Error from server: error dialing backend: dial tcp 10.0.0.7:10250: i/o timeout",
    ],
    ids=["ending", "lost-node"],
)
def test_a_pod_that_cannot_be_reached_is_not_the_only_one(
    words: str, kubectl: FakeKubectl, capfd: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()), *PODS[1:], log_reader_map())
    kubectl.refuse(words, "exec")
    assert main(["logs", "--rank=0"]) == 2
    assert verbs(kubectl) == ["exec", "exec", "delete", "create", "exec", "delete"]
    assert words.removeprefix("error: ") in capfd.readouterr().err


@pytest.mark.parametrize(
    ("refusals", "says"),
    [
        ({"create": NOT_YOURS}, 'cannot create resource "pods" in API group ""'),
        ({"exec": "no logs of attempt 7 are stored; there are those of attempts 1-2\n"
          "command terminated with exit code 2"},
         "kubectl mmtj: no logs of attempt 7 are stored; there are those of attempts 1-2\n"),
        ({"exec": 'Error from server (Forbidden): pods "x" is forbidden: User "eve" cannot create '
          'resource "pods/exec"'}, 'cannot create resource "pods/exec". Ask who runs the cluster'),
    ],
    ids=["create", "not-stored", "exec"],
)  # fmt: skip
def test_a_refusal_is_a_sentence_and_nothing_is_left(
    refusals: dict[str, str], says: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()), log_reader_map())
    for verb, words in refusals.items():
        kubectl.refuse(words, verb)
    assert main(["logs", "--attempt=7"]) == 2
    said = capsys.readouterr().err
    assert says in said and "command terminated" not in said
    assert verbs(kubectl)[-1] == ("create" if "create" in refusals else "delete")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}}
                ],
            },
            "made to read the logs, does not start: ErrImagePull: no such tag",
        ),
        ({"phase": "Failed", "message": "evicted"}, "does not start: evicted"),
    ],
    ids=["image", "failed"],
)
def test_a_pod_that_cannot_start_is_given_up_with_its_reason(
    status: dict[str, Any], says: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()), log_reader_map())
    kubectl.start_pods_as(status)
    assert main(["logs"]) == 2
    assert says in capsys.readouterr().err
    assert verbs(kubectl)[-1] == "delete"


def test_the_pod_goes_when_the_user_does(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()), log_reader_map())
    kubectl.start_pods_as({"phase": "Pending"})
    with running(kubectl, "logs") as process:
        deadline = time.monotonic() + 30
        while "create" not in verbs(kubectl) or verbs(kubectl)[-1] != "create":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert verbs(kubectl)[-1] == "delete"


@pytest.mark.parametrize(
    ("arguments", "objects", "says"),
    [
        (
            [],
            [],
            "is gone. Any S3 client finds the logs in s3://omni/runs/stamps/logs/stamps-5d1ce/",
        ),
        (["--all"], [], "has no pods now; without --all the logs that are stored are shown"),
    ],
    ids=["no-placement", "all"],
)
def test_logs_that_cannot_be_shown_say_where_they_are(
    arguments: list[str], objects: list[Any], says: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    checkpoint = {"uri": "s3://omni/runs/stamps"}
    kubectl.serve(a_job(status=running_status(), checkpoint=checkpoint), *objects)
    assert main(["logs", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_a_job_that_never_had_a_pod_says_so(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job())
    assert main(["logs"]) == 2
    assert "has no pods yet; see why: kubectl mmtj status stamps" in capsys.readouterr().err
    assert main(["logs", "--previous-attempt"]) == 2
    assert "has had no attempt before this one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--all", "--attempt=1"],
        ["--all", "--rank=1"],
        ["--attempt=1", "--previous-attempt"],
        ["--attempt=0"],
        ["--container=mine"],
    ],
)
def test_what_excludes_each_other_is_a_sentence(arguments: list[str], capsys: Capture) -> None:
    assert main(["logs", *arguments]) == 2
    assert capsys.readouterr().err.startswith("Usage: kubectl mmtj logs")
