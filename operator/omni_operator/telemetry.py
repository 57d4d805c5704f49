"""What the operator counts, for Prometheus and whatever takes OTLP, and one trace per incident.

Nothing global: each `Telemetry` has providers of its own, and is passed to whoever has to count.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Tracer, set_span_in_context
from prometheus_client import CollectorRegistry, generate_latest

from omni_contract.spec_run import RestartAction
from omni_contract.status import STAGES, Incident, JobStatus, read_time
from omni_operator.settings import SetupError
from omni_operator.state import JobState

_SCOPE: Final = "omni_operator"
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"
_OTLP: Final = "otlp"
_OTLP_OVER_HTTP: Final = "otlp_proto_http"
"""What its package calls it."""
_NONE: Final = "none"
_PROMETHEUS: Final = "prometheus"
_CLOSE_S: Final = 3.0
_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_LONG_S: Final = (0.1, 0.3, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


def load_span_exporter(env: Mapping[str, str]) -> SpanExporter | None:
    """Where traces go: OTEL_TRACES_EXPORTER names an exporter. Left out, it is `otlp`, over HTTP,
    where an endpoint is given. Raises SetupError.

    What else the exporter wants to know, it takes from the environment of the process.
    """
    exporter: SpanExporter | None = _load(env, "traces")
    return exporter


def load_metric_exporter(env: Mapping[str, str]) -> MetricExporter | None:
    """Where what was counted goes, besides the page for Prometheus: as above, by
    OTEL_METRICS_EXPORTER."""
    exporter: MetricExporter | None = _load(env, "metrics")
    return exporter


def _load(env: Mapping[str, str], signal: str) -> Any:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    endpoints = (_ENDPOINT, f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    usual = _OTLP if any(env.get(name) for name in endpoints) else _NONE
    name = env.get(variable) or usual
    if name == _NONE or (signal, name) == ("metrics", _PROMETHEUS):  # that page is always there
        return None
    group = f"opentelemetry_{signal}_exporter"
    installed = _OTLP_OVER_HTTP if name == _OTLP else name
    found = next(iter(entry_points(group=group, name=installed)), None)
    if found is None:
        others = {entry.name for entry in entry_points(group=group)} - {_OTLP_OVER_HTTP}
        raise SetupError(
            f"{variable}: no exporter {name!r} is installed; use one of "
            f"{', '.join(sorted({_OTLP, *others}))} or none, or add its package to the image"
        )
    return found.load()()


class Telemetry:
    """Meters and the tracer of one operator process."""

    def __init__(
        self,
        *,
        instance: str = "",
        span_exporter: SpanExporter | None = None,
        metric_exporter: MetricExporter | None = None,
    ) -> None:
        """`instance` tells this process from others whose counts the same receiver gets."""
        self._registry = CollectorRegistry()
        resource = Resource.create(
            {"service.name": "megascale-omni-operator", "service.instance.id": instance}
        )
        page = PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=self._registry
        )
        readers: list[MetricReader] = [page]
        if metric_exporter is not None:
            readers.append(PeriodicExportingMetricReader(metric_exporter))
        self._meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._tracers: TracerProvider | None = None
        self._tracer: Tracer | None = None
        if span_exporter is not None:
            self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(BatchSpanProcessor(span_exporter))
            self._tracer = self._tracers.get_tracer(_SCOPE)
        meter = self._meters.get_meter(_SCOPE)
        self._reconcile_s = meter.create_histogram(
            "omni_operator_reconcile",
            unit="s",
            description="Time of one reconcile, by how it ended.",
            explicit_bucket_boundaries_advisory=_SHORT_S,
        )
        self._request_s = meter.create_histogram(
            "omni_operator_api_request",
            unit="s",
            description="Time of one request to the API server, by verb, resource and HTTP status "
            "(0: no answer).",
            explicit_bucket_boundaries_advisory=_SHORT_S,
        )
        self._recovery_s = meter.create_histogram(
            "omni_operator_recovery",
            unit="s",
            description="Time of one stage of a recovery, by stage and action.",
            explicit_bucket_boundaries_advisory=_LONG_S,
        )
        self._faults = meter.create_counter(
            "omni_operator_faults", description="Faults, by class and what was done about them."
        )
        self._queue_depth = meter.create_gauge(
            "omni_operator_queue_depth", description="Jobs that wait for a worker."
        )
        self._watch_age_s = meter.create_gauge(
            "omni_operator_watch_age",
            unit="s",
            description="Time since a watch was last heard of, by resource.",
        )

    def reconciled(self, seconds: float, outcome: str) -> None:
        """One reconcile took this long."""
        self._reconcile_s.record(seconds, {"outcome": outcome})

    def api_request(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """One request was answered after so long; code 0: it was not."""
        labels = {"verb": verb, "resource": resource, "code": str(code)}
        self._request_s.record(seconds, labels)

    def queue_depth(self, depth: int) -> None:
        """So many jobs wait for a worker."""
        self._queue_depth.set(depth)

    def watch_age(self, resource: str, seconds: float) -> None:
        """A watch was heard of so long ago."""
        self._watch_age_s.set(seconds, {"resource": resource})

    def status_written(self, job: JobState, status: JobStatus) -> None:
        """The status of a job follows the one it had. Its incidents are counted by the difference,
        so that an operator that starts anew counts nothing again."""
        known = {_key(incident): incident for incident in job.status.incidents}
        for incident in status.incidents:
            before = known.get(_key(incident))
            action = str(incident.action)
            if before is None:
                self._faults.add(1, {"class": str(incident.fault), "action": action})
            for stage, seconds in incident.seconds.items():
                if before is None or stage not in before.seconds:
                    self._recovery_s.record(seconds, {"stage": stage, "action": action})
            was_over = before is not None and _is_over(before, job.status)
            if self._tracer is not None and not was_over and _is_over(incident, status):
                _trace(self._tracer, job, incident)

    def exposition(self) -> str:
        """All that was counted, as Prometheus reads it."""
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Send what is left to send, but wait no longer for a receiver that is away."""
        ends: list[Callable[[], None]] = [self._meters.shutdown]
        if self._tracers is not None:
            ends.append(self._tracers.shutdown)
        closing = [threading.Thread(target=end, daemon=True) for end in ends]
        for thread in closing:
            thread.start()
        until_s = time.monotonic() + _CLOSE_S
        for thread in closing:
            thread.join(max(0.0, until_s - time.monotonic()))


def _key(incident: Incident) -> tuple[int, int, str]:
    return incident.attempt, incident.generation, incident.time


def _is_over(incident: Incident, status: JobStatus) -> bool:
    """Whether no stage of it can come any more."""
    if incident.action is RestartAction.FAIL_JOB or "firstStep" in incident.seconds:
        return True
    if status.holds("Completed") or status.holds("Failed"):
        return True
    if "decide" in incident.seconds:  # by the operator: the next attempt is its repair
        return incident.attempt + 1 < status.attempt
    now = (status.attempt, status.generation)
    return (incident.attempt, incident.generation + 1) < now


def _trace(tracer: Tracer, job: JobState, incident: Incident) -> None:
    """The incident as a span, and in it one for each stage that was told."""
    began_s = read_time(incident.time) - incident.seconds.get("detect", 0)
    attributes: dict[str, Any] = {
        "omni.job": str(job.key),
        "omni.job.uid": job.uid,
        "omni.fault": str(incident.fault),
        "omni.action": str(incident.action),
        "omni.attempt": incident.attempt,
        "omni.generation": incident.generation,
        "omni.message": incident.message,
        "k8s.pod.name": incident.pod,
        "k8s.node.name": incident.kubernetes_node,
    }
    known = {key: value for key, value in attributes.items() if value is not None}
    root = tracer.start_span("incident", start_time=_ns(began_s), attributes=known)
    end_s = began_s
    for stage, seconds in _stages(incident):
        span: Span = tracer.start_span(
            stage, context=set_span_in_context(root), start_time=_ns(end_s)
        )
        end_s += seconds
        span.end(_ns(end_s))
    root.end(_ns(end_s))


def _stages(incident: Incident) -> Iterator[tuple[str, float]]:
    for stage in STAGES:
        if stage in incident.seconds:
            yield stage, incident.seconds[stage]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
