"""The chart's dashboard for Grafana asks for what the operator exports, and for all of it."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_contract.status import STAGES, JobStatus
from omni_operator.telemetry import Telemetry
from tests.operator.test_telemetry import incident, job_with, with_incidents

FILE: Final = (
    Path(__file__).resolve().parents[2] / "charts" / "megascale-omni" / "files" / "dashboard.json"
)
_SCRAPED: Final = {"instance"}
"""Labels that Prometheus adds."""


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def exported() -> dict[str, set[str]]:
    """Labels of each sample that an operator exposes which did everything once."""
    telemetry = Telemetry()
    telemetry.reconciled(0.1, "done")
    telemetry.api_request("list", "pods", 200, 0.1)
    telemetry.queue_depth(1)
    telemetry.watch_age("pods", 1)
    telemetry.status_written(job_with(JobStatus()), with_incidents(incident(*STAGES)))
    families = text_string_to_metric_families(telemetry.exposition())
    labels = {
        sample.name: set(sample.labels)
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    telemetry.close()
    return labels


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def metrics_in(query: str) -> set[str]:
    return set(re.findall(r"\bomni_\w+", query))


def test_every_metric_and_label_of_the_dashboard_is_exported(dashboard: dict[str, Any]) -> None:
    known = exported()
    variables = [one["query"] for one in dashboard["templating"]["list"]]
    for query in [*queries(dashboard), *variables]:
        assert metrics_in(query) <= known.keys(), query
    for query in queries(dashboard):
        usable = set.intersection(*(known[name] for name in metrics_in(query))) | _SCRAPED
        grouped = {
            label.strip()
            for by in re.findall(r"\bby \(([^)]*)\)", query)
            for label in by.split(",")
        }
        filtered = set(re.findall(r"[{,]\s*(\w+)(?:=~|!~|!=|=)", query))
        assert grouped | filtered <= usable, query


def test_everything_that_is_exported_has_a_panel(dashboard: dict[str, Any]) -> None:
    kinds = re.compile(r"_(bucket|sum|count|total)$")
    shown = {kinds.sub("", name) for query in queries(dashboard) for name in metrics_in(query)}
    assert {kinds.sub("", name) for name in exported()} == shown


def test_legends_name_labels_of_their_query(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"\bby \([^)]*\b{label}\b", target["expr"]), target


def test_panels_have_names_of_their_own_and_do_not_cover_each_other(
    dashboard: dict[str, Any],
) -> None:
    cells = list[tuple[int, int]]()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
        cells += [(y, x) for y in rows for x in columns]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
