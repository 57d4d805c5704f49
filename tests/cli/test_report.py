"""The page, the trace and the summary of a run come from its records, whole and self-contained."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from omni_cli import figures
from omni_cli.main import main
from omni_cli.report import RunRecords, write_report
from omni_cli.samples import unpatched
from omni_cli.summary import incidents
from omni_cli.trace import chrome_trace, idle_share, most_live
from omni_contract.names import METRICS_FILE
from omni_contract.spec_model import VitSpec
from omni_dataloader.decode import patchify
from tests.cli.runs import demo_plan, killed_run, traces, write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return folder


def test_the_page_is_self_contained_and_tells_the_story(run_dir: Path, tmp_path: Path) -> None:
    write_report(RunRecords.read(run_dir), tmp_path, None)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4  # losses, mixture, one incident, one step
    # Names of XML vocabularies look like addresses but fetch nothing.
    own = re.sub(r"https?://(www\.w3|purl|matplotlib|creativecommons)\.org/[\w/#.-]*", "", page)
    assert not re.search(r"(src|href)=\"(?!#|data:)|https?://|<script|@import", own)
    assert "rank 2 on node 1 failed after step 17" in page
    assert "8.2 s" in page and "7 steps since the checkpoint were done again" in page
    assert "30 / 30" in page


def test_the_command_prints_where_to_look(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir), "--out", str(tmp_path), "--no-samples"]) == 0
    assert str(tmp_path / "report.html") in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["restarts"] == 1 and summary["samples_lost"] is None
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_run_that_did_no_step_is_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--no-samples"]) == 2
    assert f"no step is recorded in {METRICS_FILE}" in capsys.readouterr().err


def test_names_in_records_cannot_break_the_page(run_dir: Path, tmp_path: Path) -> None:
    records = RunRecords.read(run_dir)
    evil = records.events[0].model_copy(update={"message": "<script>alert(1)</script>"})
    object.__setattr__(records, "events", [evil, *records.events[1:]])
    write_report(records, tmp_path, None)
    assert "<script>" not in (tmp_path / "report.html").read_text()


def test_the_trace_has_every_operation_of_every_rank() -> None:
    plan = demo_plan()
    found = traces(plan, 12)
    document = chrome_trace(found, plan.layout)
    spans = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == sum(len(t.spans) for t in found)
    first = next(e for e in spans if e["tid"] == 0)
    assert (first["name"], first["ts"], first["dur"]) == ("encoder forward 1", 0.0, 25_000.0)
    assert {e["pid"] for e in spans} == {0, 1}
    counters = [e["args"]["live"] for e in document["traceEvents"] if e["ph"] == "C"]
    assert max(counters) == most_live(found) == 2


def test_idle_time_is_what_no_operation_covers() -> None:
    trace = traces(demo_plan(), 12)[0]
    busy = 8 * (0.04 + 0.08) + 4 * (0.025 + 0.05)
    assert idle_share(trace) == pytest.approx(1 - busy / trace.spans[-1].end_s)
    nested = trace.spans[0].model_copy(update={"op": "LF"})
    twice = trace.model_copy(update={"spans": [*trace.spans, nested]})
    assert idle_share(twice) == pytest.approx(idle_share(trace))


def test_every_stage_of_an_incident_is_in_its_picture() -> None:
    steps, events = killed_run()
    (incident,) = incidents(events, steps)
    svg = figures.incident_timeline(incident)
    for stage in incident.stages:
        assert stage.name in svg


def test_patches_go_back_to_where_they_were_cut() -> None:
    vit = VitSpec(layers=1, hidden_size=8, heads=2, patch_size=4, merge_patches=2)
    image = np.arange(16 * 24 * 3, dtype=np.uint32).astype(np.uint8).reshape(16, 24, 3)
    patches = patchify(image, patch_size=4, merge_patches=2)
    assert np.array_equal(unpatched(patches, (4, 6), vit), image)
