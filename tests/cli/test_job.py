"""`kubectl mmtj` says what is true, teaches what to do next, and answers mistakes in a sentence."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omni_cli.job import main, mmtj
from omni_contract.names import ANNOTATION_RESTART
from omni_contract.placement import JobPlacement
from tests.cli.job_objects import (
    PLACEMENT,
    FakeKubectl,
    a_job,
    a_pod,
    an_event,
    condition,
    placement_map,
    running_status,
)

Capture = pytest.CaptureFixture[str]
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kubectl.md"
NO_CRD = """\
E1130 08:00:00.000000   77 memcache.go:265] "Unhandled Error" err="couldn't get the list"
error: the server doesn't have a resource type "multimodaltrainingjobs"
"""
FORBIDDEN = (
    "Error from server (Forbidden): multimodaltrainingjobs.megascale-omni.dev is forbidden: User "
    '"eve" cannot list resource "multimodaltrainingjobs" in the namespace "train"'
)
REFUSED = (
    "The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?"
)


def said_on_failure(arguments: list[str], capsys: Capture) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kubectl mmtj: ") and "Traceback" not in said.err
    return said.err


def test_help_teaches_the_commands(capsys: Capture) -> None:
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    for name in ("status", "timeline", "placement", "logs", "restart", "suspend", "resume"):
        assert f"\n  {name} " in said
    assert "kubectl mmtj status --watch" in said and "Exit codes" in said


@pytest.mark.parametrize("command", list(mmtj.commands))
def test_every_command_has_help_and_the_flags_of_kubectl(command: str, capsys: Capture) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: kubectl mmtj {command}")
    assert all(flag in said for flag in ("-n, --namespace", "--context", "--kubeconfig"))
    assert all(len(line) <= 90 for line in said.splitlines())


def documented() -> list[str]:
    """Every `kubectl mmtj` line of the document about it."""
    lines = DOCUMENT.read_text().splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.startswith("kubectl mmtj ")]


@pytest.mark.parametrize("line", documented())
def test_a_command_in_the_document_exists(line: str, capsys: Capture) -> None:
    command, *words = line.split()[2:]
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert [word for word in words if word.startswith("-") and word not in said] == []


def test_the_document_names_every_command() -> None:
    assert {line.split()[2] for line in documented()} == set(mmtj.commands)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; import omni_cli.job;"
        "sys.exit(str({'torch', 'numpy', 'boto3', 'kubernetes'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False)
    assert done.stderr.strip() == b""


@pytest.mark.parametrize(
    ("refusal", "says"),
    [
        (NO_CRD, ["the operator is not installed there", "helm install"]),
        (FORBIDDEN, ['User "eve" cannot list resource', "Ask who runs the cluster"]),
        (REFUSED, ["does not answer", "127.0.0.1:1 was refused", "config current-context"]),
        ('error: context "x" does not exist', ['context "x" does not exist']),
        ("", ["kubectl failed without a word"]),
    ],
    ids=["no-crd", "forbidden", "unreachable", "kubectls-own", "silent"],
)
@pytest.mark.parametrize("command", ["status", "suspend"])
def test_a_refusal_is_a_sentence(
    command: str, refusal: str, says: list[str], kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.refuse(refusal)
    said = said_on_failure([command, "stamps"], capsys)
    assert all(part in said for part in says), said
    assert "memcache" not in said


def test_without_kubectl_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no kubectl on PATH" in said_on_failure(["status"], capsys)


def test_the_only_job_needs_no_name(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status=running_status()))
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("stamps  Running")


@pytest.mark.parametrize(
    ("names", "asked", "says"),
    [
        ([], [], "there is no job in namespace train; choose a namespace with -n"),
        ([], ["stamps"], "there is no job stamps in namespace train; there are no jobs at all"),
        (["a", "b"], [], "say which job: there are a, b"),
        (["a"], ["b"], "there is no job b in namespace train; there is a"),
    ],
)
def test_a_job_that_is_not_found_names_those_there_are(
    names: list[str], asked: list[str], says: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(*(a_job(name) for name in names))
    assert says in said_on_failure(["status", *asked, "-n", "train"], capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "stamps", "-n", "train", "--context", "c", "--kubeconfig", "f"],
        ["-n", "train", "--context", "c", "status", "stamps", "--kubeconfig", "f"],
        ["-n", "other", "--context", "c", "status", "stamps", "-n", "train", "--kubeconfig", "f"],
    ],
    ids=["behind", "before", "behind-wins"],
)
def test_the_flags_go_to_kubectl(arguments: list[str], kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()))
    assert main(arguments) == 0
    (call,) = kubectl.calls
    assert call[:3] == ["--namespace=train", "--context=c", "--kubeconfig=f"]


def test_a_status_of_another_version_is_no_traceback(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status={"phase": "Dreaming"}))
    assert "status.phase is not what this version reads" in said_on_failure(["status"], capsys)


@pytest.mark.parametrize(("end", "code"), [("Completed", 0), ("Failed", 1)])
def test_a_watch_ends_with_the_job(
    end: str, code: int, kubectl: FakeKubectl, capsys: Capture
) -> None:
    conditions = [condition(end, "True", "Ended", "all 120 steps are done")]
    over = running_status(phase=end, conditions=conditions)
    suspended = running_status(phase="Suspended")
    kubectl.serve(
        a_job(status={}),
        then=(
            a_job(status=running_status()),
            a_job(status=running_status()),
            a_job(status=suspended),
            a_job(status=over),
        ),
    )
    assert main(["status", "--watch", "--every", "0.05"]) == code
    said = capsys.readouterr().out.splitlines()
    words = [line.split()[1] for line in said[:4]]
    assert words == ["Pending", "Running", "Suspended", end]
    assert any("all 120 steps are done" in line for line in said)


def test_a_watch_tells_that_the_job_was_deleted(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status=running_status()), then=(placement_map(),))
    assert main(["status", "-w", "--every", "0.05"]) == 2
    assert "there is no job stamps" in capsys.readouterr().err


def test_a_watch_outlives_an_api_server_that_is_away(kubectl: FakeKubectl) -> None:
    kubectl.serve(a_job(status=running_status()))
    command = [sys.executable, "-m", "omni_cli.job", "status", "-w", "--every", "0.05"]
    with subprocess.Popen(command, env=kubectl.environ, stdout=subprocess.PIPE, text=True) as watch:
        deadline = time.monotonic() + 30
        while not kubectl.calls:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kubectl.refuse(REFUSED)
        num_calls = len(kubectl.calls)
        while len(kubectl.calls) < num_calls + 2:
            assert time.monotonic() < deadline and watch.poll() is None
            time.sleep(0.05)
        completed = running_status(conditions=[condition("Completed", "True", "Done")])
        kubectl.serve(a_job(status=completed | {"phase": "Completed"}))
        (kubectl.folder / "refusal.txt").unlink()
        said, _ = watch.communicate(timeout=30)
    assert watch.returncode == 0
    assert said.count("the cluster does not answer; still trying") == 1
    assert "Completed" in said


def test_the_timeline_reads_the_events_of_this_job(kubectl: FakeKubectl, capsys: Capture) -> None:
    other = an_event("2026-01-01T08:00:30Z", "Placed", "another job")
    other["involvedObject"] = {"uid": "another"}
    kubectl.serve(
        a_job(status=running_status()),
        an_event("2026-01-01T08:00:20Z", "Placed", "on 2 nodes"),
        other,
    )
    assert main(["timeline"]) == 0
    said = capsys.readouterr().out
    assert "event Placed: on 2 nodes" in said and "another job" not in said
    assert all(len(line) <= 80 for line in said.splitlines())


def test_the_placement_is_drawn_with_live_pods(kubectl: FakeKubectl, capsys: Capture) -> None:
    job = a_job(status=running_status())
    pods = [a_pod("stamps-5d1ce-1-0", 0), a_pod("stamps-5d1ce-1-2", None)]
    kubectl.serve(job, placement_map(), *pods)
    assert main(["placement"]) == 0
    said = capsys.readouterr().out
    assert "A1!" in said and "running: 2   ! not there: 1" in said
    assert main(["placement", "-o", "wide"]) == 0
    assert "stamps-5d1ce-2-1" in capsys.readouterr().out
    assert main(["placement", "-o", "json"]) == 0
    assert JobPlacement.model_validate_json(capsys.readouterr().out) == PLACEMENT


def test_a_job_without_placement_says_why(kubectl: FakeKubectl, capsys: Capture) -> None:
    waits = condition("Placed", "False", "NoRoom", "2 nodes are asked, 1 is free")
    kubectl.serve(a_job(status={"conditions": [waits]}))
    said = said_on_failure(["placement"], capsys)
    assert "no placement yet: 2 nodes are asked, 1 is free" in said


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (None, "is gone; kubectl mmtj restart stamps places it anew"),
        ({"binaryData": {}}, "holds no placement that this version reads (KeyError)"),
        ({"binaryData": {"placement.json.gz.000": "aGVsbG8="}}, "that this version reads (Bad"),
    ],
    ids=["gone", "empty", "no-gzip"],
)
def test_a_broken_placement_is_a_sentence(
    document: dict[str, object] | None, says: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    maps = [placement_map() | document] if document is not None else []
    kubectl.serve(a_job(status=running_status()), *maps)
    assert says in said_on_failure(["placement"], capsys)


def test_restart_says_what_happens_and_asks_for_it_once(
    kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(a_job(status=running_status()))
    assert main(["restart"]) == 0
    said = capsys.readouterr().out
    assert "the pods of attempt 2 end now, with 120 s" in said and "attempt 3 goes on" in said
    annotations = [call for call in kubectl.calls if call[1] == "annotate"]
    (asked,) = [a for call in annotations for a in call if a.startswith(f"{ANNOTATION_RESTART}=")]
    assert "--overwrite" in annotations[0] and asked > f"{ANNOTATION_RESTART}=2026"


@pytest.mark.parametrize(("command", "value"), [("suspend", True), ("resume", False)])
def test_suspend_and_resume_patch_the_spec(
    command: str, value: bool, kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(a_job(status=running_status(), suspend=not value))
    assert main([command, "stamps"]) == 0
    patch = kubectl.calls[-1]
    assert patch[1:4] == ["patch", "multimodaltrainingjobs.megascale-omni.dev", "stamps"]
    assert json.loads(patch[-1].removeprefix("--patch=")) == {"spec": {"suspend": value}}
    capsys.readouterr()

    kubectl.serve(a_job(status=running_status(), suspend=value))
    assert main([command, "stamps"]) == 0
    assert "suspended" in capsys.readouterr().out
    assert "patch" not in kubectl.calls[-1]


@pytest.mark.parametrize("command", ["restart", "suspend", "resume"])
def test_a_job_that_is_over_is_left_alone(
    command: str, kubectl: FakeKubectl, capsys: Capture
) -> None:
    kubectl.serve(a_job(status={"conditions": [condition("Failed", "True", "RestartLimit")]}))
    assert "a job that is over stays so" in said_on_failure([command], capsys)
    assert len(kubectl.calls) == 1


def test_a_suspended_job_cannot_restart(kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status=running_status(), suspend=True))
    assert "kubectl mmtj resume stamps" in said_on_failure(["restart"], capsys)


def test_a_job_without_an_attempt_has_nothing_to_restart(
    kubectl: FakeKubectl, capsys: Capture
) -> None:
    """Asked for now, the restart would follow the first attempt at once."""
    kubectl.serve(a_job(status={}))
    assert "job stamps has no attempt yet" in said_on_failure(["restart"], capsys)
    assert len(kubectl.calls) == 1


@pytest.mark.parametrize(
    "arguments", [["nap"], ["status", "--nap"], ["logs", "--all", "--previous-attempt"]]
)
def test_a_wrong_command_line_is_a_sentence(arguments: list[str], capsys: Capture) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("Usage: kubectl mmtj")
