"""docs/operations.md explains all that the operator can say of a job, and nothing else."""

import re
from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from itertools import product
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_contract.faults import FAULTS
from omni_contract.reasons import ConditionReason
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import CONDITIONS, Condition, Incident, JobStatus, write_time
from omni_operator.status.notes import notes_between
from omni_operator.telemetry import Telemetry
from tests.house.operations_page import PAGE, SECTIONS, first_words, reasons_by_condition
from tests.operator.looking import running_job


def words_of(type_: Any) -> Iterator[str]:
    """Every text that a closed type allows."""
    if isinstance(type_, type) and issubclass(type_, StrEnum):
        yield from map(str, type_)
    elif isinstance(type_, str):
        yield type_
    else:
        for part in get_args(type_):
            yield from words_of(part)


REASONS = set(words_of(ConditionReason))


def condition(type_: str, said: Any, reason: str) -> Condition:
    at = write_time(1000)
    return Condition(type=type_, status=said, reason=reason, message="", last_transition_time=at)


def event_reasons() -> set[str]:
    """Of every Event that statuses of all conditions, reasons and faults can bring about."""
    statuses = [
        JobStatus(conditions=[condition(*told)])
        for told in product(CONDITIONS, ("True", "False", "Unknown"), sorted(REASONS))
    ]
    for fault, action in product(FaultClass, RestartAction):
        incident = Incident(
            time=write_time(1000), fault=fault, action=action, attempt=1, generation=0, message=""
        )
        statuses.append(JobStatus(attempt=2, opened_by=action, incidents=[incident]))
    statuses.append(JobStatus(generation=1))
    return {note.reason for status in statuses for note in notes_between(JobStatus(), status)}


def metric_labels() -> dict[str, set[str]]:
    """Names of all metrics with those of their labels, of an operator that has done everything."""
    telemetry, job = Telemetry(), running_job().job
    incident = Incident(
        time=write_time(1000),
        fault=FaultClass.HANG,
        action=RestartAction.RESTART_JOB,
        attempt=1,
        generation=0,
        message="",
        seconds={"detect": 1.0},
    )
    status = JobStatus(attempt=2, incidents=[incident])
    counted: dict[str, tuple[Any, ...]] = {
        "reconciled": (1.0, "done"),
        "api_request": ("get", "pods", 200, 1.0),
        "queue_depth": (1,),
        "watch_age": ("pods", 1.0),
        "status_written": (replace(job, status=JobStatus()), status),
    }
    told = {name for name in vars(Telemetry) if name[0] != "_"} - {"exposition", "close"}
    assert told == counted.keys(), "a new method of Telemetry is to be called here"
    for name, arguments in counted.items():
        getattr(telemetry, name)(*arguments)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(telemetry.exposition()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = labels
    telemetry.close()
    return found


def test_every_condition_has_reasons() -> None:
    """Which of them each one has, the random walks of the operator's tests compare."""
    explained = reasons_by_condition()
    assert [type_ for type_ in CONDITIONS if not explained[type_]] == []


def test_every_reason_of_a_condition_is_explained() -> None:
    assert {"InvalidSpec", "Shrunk", "RestartInPlace", "OOM"} <= REASONS
    assert REASONS - first_words(PAGE) == set()


def test_no_reason_is_explained_that_cannot_be() -> None:
    known = {*REASONS, *event_reasons(), *metric_labels()}
    assert first_words(PAGE) - known == set()


def test_every_class_of_fault_has_a_row_of_what_to_do() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(?: *[^| ][^|]*\|){3}$", SECTIONS["Incidents"], re.M)
    assert rows == list(FAULTS)


def test_every_reason_of_an_event_is_explained() -> None:
    told = event_reasons()
    assert {"AttemptOpened", "NodeLost", "Placed", "Shrunk"} <= told
    of_events = set(re.findall(r"`(\w+)`", SECTIONS["Events"]))
    assert told - of_events - first_words(PAGE) == set()


@pytest.mark.parametrize(("name", "labels"), metric_labels().items())
def test_every_metric_has_a_row_with_its_labels(name: str, labels: set[str]) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|([^|]*)\|", SECTIONS["Metrics"], re.M)
    assert set(re.findall(r"`(\w+)`", row)) == labels
