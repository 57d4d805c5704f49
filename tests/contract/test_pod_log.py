"""A container's words reach both its log and the file of the attempt."""

import sys
from pathlib import Path

import pytest

from omni_contract.pod_info import Assignment
from omni_contract.pod_log import PodLog
from omni_contract.records import History

Capture = pytest.CaptureFixture[str]


def part(attempt: int, index: int | None) -> Assignment:
    return Assignment(attempt=attempt, index=index, rendezvous="a:1", history=History())


def test_every_attempt_has_its_file_and_stderr_has_all(tmp_path: Path, capfd: Capture) -> None:
    log = PodLog(tmp_path, "trainer")
    with log.text() as text:
        print("early", file=text)
        for attempt, index in ((1, None), (2, 3), (2, 3)):
            log.turn_to(part(attempt, index))
            print(f"attempt {attempt}", file=text)
        log.write(b"from a child \xff\n")
    assert capfd.readouterr().err.splitlines() == [
        "early", "attempt 1", "attempt 2", "attempt 2", "from a child \ufffd"
    ]  # fmt: skip
    files = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert files == {
        "trainer-spare.1.log": b"attempt 1\n",
        "trainer-3.2.log": b"attempt 2\nattempt 2\nfrom a child \xff\n",
    }


def test_the_folder_is_for_both_containers_whoever_made_it(tmp_path: Path) -> None:
    """They may run as two users of one group."""
    PodLog(tmp_path, "data").turn_to(part(1, 0))
    assert (tmp_path / "logs").stat().st_mode & 0o7777 == 0o2775


def test_a_container_started_again_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for words in (b"one\n", b"two\n"):
        log = PodLog(tmp_path, "data")
        log.turn_to(part(1, 0))
        log.write(words)
    assert (tmp_path / "logs" / "data-0.1.log").read_bytes() == b"one\ntwo\n"


def test_a_run_folder_that_cannot_be_written_costs_the_copy_only(
    tmp_path: Path, capfd: Capture
) -> None:
    (tmp_path / "logs").write_text("in the way")
    log = PodLog(tmp_path, "data")
    log.turn_to(part(1, 0))
    print("said", file=log.text(), flush=True)
    assert capfd.readouterr().err == "said\n"


def test_it_stands_in_the_place_of_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    log = PodLog(tmp_path, "data")
    log.turn_to(part(1, 0))
    monkeypatch.setattr(sys, "stderr", log.text())
    sys.stderr.buffer.write(b"bytes\n")
    print("text", file=sys.stderr)
    assert capfd.readouterr().err == "bytes\ntext\n"
    assert (tmp_path / "logs" / "data-0.1.log").read_bytes() == b"bytes\ntext\n"
