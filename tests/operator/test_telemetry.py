"""What was counted reads as Prometheus reads it, an incident is counted once and traced once."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import STAGES, Incident, JobStatus, write_time
from omni_operator.state import JobState
from omni_operator.telemetry import Telemetry
from tests.operator.looking import running_job
from tests.operator.world import World, job

A = RestartAction
STAGE_SECONDS = {
    "detect": 30.0,
    "decide": 0.5,
    "terminate": 2.0,
    "schedule": 3.0,
    "start": 4.0,
    "firstStep": 5.0,
}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(spans: InMemorySpanExporter) -> Iterator[Telemetry]:
    made = Telemetry(span_exporter=spans)
    yield made
    made.close()


def job_with(status: JobStatus) -> JobState:
    return replace(running_job().job, status=status)


def incident(*stages: str, attempt: int = 1, action: A = A.REPLACE_POD) -> Incident:
    return Incident(
        time=write_time(1000),
        fault=FaultClass.NODE_LOST,
        action=action,
        attempt=attempt,
        generation=0,
        message="the node is gone",
        seconds={stage: STAGE_SECONDS[stage] for stage in stages},
        pod="p-1",
        kubernetes_node="n-1",
    )


def with_incidents(*incidents: Incident, attempt: int = 2) -> JobStatus:
    return JobStatus(attempt=attempt, incidents=list(incidents))


def samples(telemetry: Telemetry, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Values of a metric by its labels."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(telemetry.exposition())
        for sample in family.samples
        if sample.name == name
    }


def told(spans: InMemorySpanExporter, telemetry: Telemetry) -> tuple[ReadableSpan, ...]:
    telemetry.close()
    return spans.get_finished_spans()


def test_what_was_counted_is_exposed(telemetry: Telemetry) -> None:
    telemetry.reconciled(0.2, "done")
    telemetry.reconciled(0.4, "done")
    telemetry.reconciled(9, "error")
    telemetry.api_request("create", "pods", 201, 0.01)
    telemetry.api_request("create", "pods", 0, 3)
    telemetry.queue_depth(7)
    telemetry.queue_depth(4)
    telemetry.watch_age("nodes", 1.5)
    done, error = (("outcome", "done"),), (("outcome", "error"),)
    assert samples(telemetry, "omni_operator_reconcile_seconds_count") == {done: 2, error: 1}
    total_s = samples(telemetry, "omni_operator_reconcile_seconds_sum")
    assert total_s[done] == pytest.approx(0.6)
    requests = samples(telemetry, "omni_operator_api_request_seconds_count")
    assert requests == {
        (("code", "201"), ("resource", "pods"), ("verb", "create")): 1,
        (("code", "0"), ("resource", "pods"), ("verb", "create")): 1,
    }
    assert samples(telemetry, "omni_operator_queue_depth") == {(): 4}
    ages = samples(telemetry, "omni_operator_watch_age_seconds")
    assert ages == {(("resource", "nodes"),): 1.5}


def test_two_telemetries_share_nothing(telemetry: Telemetry) -> None:
    other = Telemetry()
    other.queue_depth(3)
    assert samples(telemetry, "omni_operator_queue_depth") == {}
    other.close()


def test_c40_a_fault_and_each_stage_count_once(telemetry: Telemetry) -> None:
    statuses = [
        JobStatus(attempt=1),
        with_incidents(incident("detect", "decide")),
        with_incidents(incident("detect", "decide", "terminate")),
        with_incidents(incident(*STAGES)),
        with_incidents(incident(*STAGES)),
    ]
    for old, new in zip(statuses, statuses[1:], strict=False):
        telemetry.status_written(job_with(old), new)
    faults = samples(telemetry, "omni_operator_faults_total")
    assert faults == {(("action", "ReplacePod"), ("class", "NodeLost")): 1}
    counts = samples(telemetry, "omni_operator_recovery_seconds_count")
    assert counts == {(("action", "ReplacePod"), ("stage", stage)): 1 for stage in STAGES}
    sums = samples(telemetry, "omni_operator_recovery_seconds_sum")
    assert {dict(labels)["stage"]: value for labels, value in sums.items()} == STAGE_SECONDS


def test_a_new_process_counts_nothing_again(telemetry: Telemetry) -> None:
    status = with_incidents(incident(*STAGES))
    telemetry.status_written(job_with(status), status)
    assert samples(telemetry, "omni_operator_faults_total") == {}
    assert samples(telemetry, "omni_operator_recovery_seconds_count") == {}


@pytest.mark.parametrize("restarts", [False, True], ids=["one-process", "restarted"])
def test_c40_the_operator_counts_a_fault_once(telemetry: Telemetry, restarts: bool) -> None:
    with World(told=telemetry.status_written) as world:
        world.apply(job())
        world.pass_s(5)
        world.cluster.end_container(world.pod_name(0), exit_code=1)
        world.pass_s(5)
        if restarts:
            world.restart()
        world.pass_s(60)
        assert len(world.status().incidents) == 1
    faults = samples(telemetry, "omni_operator_faults_total")
    assert faults == {(("action", "ReplacePod"), ("class", "AppError")): 1}


def test_an_incident_is_one_trace_with_a_span_for_each_stage(
    telemetry: Telemetry, spans: InMemorySpanExporter
) -> None:
    open_ = with_incidents(incident("detect", "decide"))
    over = with_incidents(incident(*STAGES))
    telemetry.status_written(job_with(JobStatus(attempt=1)), open_)
    telemetry.status_written(job_with(open_), over)
    telemetry.status_written(job_with(over), over)
    *stages, root = told(spans, telemetry)
    assert [span.name for span in stages] == list(STAGES)
    assert root.name == "incident" and root.parent is None
    assert root.context is not None and root.attributes is not None
    assert {span.parent.span_id for span in stages if span.parent} == {root.context.span_id}
    assert root.attributes["omni.fault"] == "NodeLost"
    assert root.attributes["k8s.node.name"] == "n-1"
    # It began before it was seen, and each stage where the one before ended.
    times = [(span.start_time, span.end_time) for span in stages]
    assert times[0] == (970 * 10**9, 1000 * 10**9)
    assert all(a[1] == b[0] for a, b in zip(times, times[1:], strict=False))
    assert (root.start_time, root.end_time) == (times[0][0], times[-1][1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (JobStatus(attempt=1), with_incidents(incident("detect", action=A.FAIL_JOB), attempt=1)),
        (with_incidents(incident("detect", "decide")), None),
        (with_incidents(incident(), attempt=1), with_incidents(incident(), attempt=2)),
    ],
    ids=["the-job-failed", "another-fault-came", "in-place-and-then-a-new-attempt"],
)
def test_an_incident_that_was_cut_short_is_traced_as_far_as_it_came(
    telemetry: Telemetry, spans: InMemorySpanExporter, old: JobStatus, new: JobStatus | None
) -> None:
    if new is None:
        second = incident("detect", "decide", attempt=2)
        new = with_incidents(*old.incidents, second, attempt=3)
    telemetry.status_written(job_with(old), new)
    roots = [span for span in told(spans, telemetry) if span.parent is None]
    assert len(roots) == 1


def test_without_an_exporter_nothing_is_traced() -> None:
    telemetry = Telemetry()
    telemetry.status_written(job_with(JobStatus()), with_incidents(incident(*STAGES)))
    assert samples(telemetry, "omni_operator_faults_total") != {}
    telemetry.close()
