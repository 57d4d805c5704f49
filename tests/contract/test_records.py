"""Record files are written by processes that get killed."""

from pathlib import Path

from omni_contract.records import RunEvent


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    event = RunEvent(time_s=1.0, kind="started", attempt=1, generation=1, message="go")
    path = tmp_path / "events.jsonl"
    path.write_text(event.model_dump_json() + "\n" + event.model_dump_json()[:20])
    assert RunEvent.read_all(path) == [event]


def test_no_file_has_no_lines(tmp_path: Path) -> None:
    assert RunEvent.read_all(tmp_path / "events.jsonl") == []


def test_a_newer_writer_may_add_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(
        '{"time_s":1,"kind":"started","attempt":1,"generation":1,"message":"go","mood":"good"}\n'
    )
    assert RunEvent.read_all(path)[0].kind == "started"
