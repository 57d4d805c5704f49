"""Where the environment says what is counted and traced is sent, and that it gets there."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from omni_contract.status import STAGES, JobStatus
from omni_operator.settings import SetupError
from omni_operator.telemetry import Telemetry, load_metric_exporter, load_span_exporter
from tests.operator.otlp import Receiver
from tests.operator.test_telemetry import incident, job_with, with_incidents

LOADERS = pytest.mark.parametrize(
    ("load", "signal"),
    [(load_span_exporter, "TRACES"), (load_metric_exporter, "METRICS")],
    ids=["traces", "metrics"],
)
Load = Callable[[dict[str, str]], object]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as running:
        yield running


def count_and_trace(telemetry: Telemetry) -> None:
    """One fault and its recovery."""
    telemetry.queue_depth(4)
    telemetry.status_written(job_with(JobStatus()), with_incidents(incident(*STAGES)))


@LOADERS
@pytest.mark.parametrize("name", [None, "", "none"])
def test_no_exporter_is_loaded_unless_one_is_named(
    load: Load, signal: str, name: str | None
) -> None:
    assert load({} if name is None else {f"OTEL_{signal}_EXPORTER": name}) is None


@LOADERS
def test_none_holds_against_an_endpoint(load: Load, signal: str) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", f"OTEL_{signal}_EXPORTER": "none"}
    assert load(env) is None


def test_an_exporter_is_found_by_its_name() -> None:
    exporter = load_span_exporter({"OTEL_TRACES_EXPORTER": "console"})
    assert isinstance(exporter, ConsoleSpanExporter)
    counts = load_metric_exporter({"OTEL_METRICS_EXPORTER": "console"})
    assert isinstance(counts, ConsoleMetricExporter)


def test_the_page_for_prometheus_needs_no_exporter() -> None:
    assert load_metric_exporter({"OTEL_METRICS_EXPORTER": "prometheus"}) is None


@LOADERS
def test_an_exporter_that_is_not_installed_is_explained(load: Load, signal: str) -> None:
    said = f"OTEL_{signal}_EXPORTER: no exporter 'smoke' is installed; use one of console, otlp"
    with pytest.raises(SetupError, match=said):
        load({f"OTEL_{signal}_EXPORTER": "smoke"})


def test_an_endpoint_and_headers_are_enough_to_send_traces_and_metrics(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=omni,authorization=Bearer%20abc")
    telemetry = Telemetry(instance="pod-1", **exporters(receiver.endpoint))
    count_and_trace(telemetry)
    telemetry.close()
    assert [span.name for span in receiver.spans] == [*STAGES, "incident"]
    assert set(receiver.metrics) == {
        "omni_operator_faults",
        "omni_operator_queue_depth",
        "omni_operator_recovery",
    }
    (fault,) = receiver.metrics["omni_operator_faults"].sum.data_points
    assert fault.as_int == 1
    assert {pair.key: pair.value.string_value for pair in fault.attributes} == {
        "class": "NodeLost",
        "action": "ReplacePod",
    }
    assert {sent["x-tenant"] for sent in receiver.headers} == {"omni"}
    assert {sent["authorization"] for sent in receiver.headers} == {"Bearer abc"}
    for sender in receiver.resources:  # or the counts of two replicas would be taken for one's
        assert sender["service.name"] == "megascale-omni-operator"
        assert sender["service.instance.id"] == "pod-1"


def test_an_endpoint_of_one_signal_sends_that_one(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{receiver.endpoint}/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
    env = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": url}
    assert load_metric_exporter(env) is None
    telemetry = Telemetry(span_exporter=load_span_exporter(env))
    count_and_trace(telemetry)
    telemetry.close()
    assert receiver.spans and not receiver.metrics


def test_a_receiver_that_is_away_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod has 30 s to end, and has most of them for its jobs."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    telemetry = Telemetry(**exporters(endpoint))
    count_and_trace(telemetry)
    began_s = time.monotonic()
    telemetry.close()
    assert time.monotonic() - began_s < 5


def exporters(endpoint: str) -> dict[str, Any]:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    return {
        "span_exporter": load_span_exporter(env),
        "metric_exporter": load_metric_exporter(env),
    }
