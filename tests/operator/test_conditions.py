"""What a status is made of: conditions in order, the phase and its reason, how much two differ."""

from dataclasses import replace

import pytest

from omni_contract.status import CONDITIONS, Condition, JobStatus, Phase, read_time, write_time
from omni_operator.state import JobState, Observed
from omni_operator.status.conditions import phase_of, set_condition, significance, with_phase
from omni_operator.status.life import accept
from omni_operator.status.progress import absorb_heartbeat
from tests.operator.looking import BEGIN, look, released, running_job


def bare(job: JobState, now_s: float) -> Observed:
    return Observed(
        now_s=now_s,
        job=job,
        pods=(),
        placement=None,
        previous=None,
        plan=None,
        progress=None,
        nodes={},
        used={},
        occupied={},
    )


def test_the_time_of_a_transition_stays_while_only_words_change() -> None:
    job = running_job().job
    first = set_condition(BEGIN, "Placed", False, "Placing", "a", observed=bare(job, 100))
    second = set_condition(first, "Placed", False, "BackingOff", "b", observed=bare(job, 200))
    third = set_condition(second, "Placed", None, "BackingOff", "b", observed=bare(job, 300))
    times = [status.conditions[0].last_transition_time for status in (first, second, third)]
    assert [read_time(time) for time in times] == [100, 100, 300]
    assert (second.conditions[0].reason, third.conditions[0].status) == ("BackingOff", "Unknown")
    assert len(third.conditions) == 1


def test_conditions_stand_in_the_order_of_the_contract_and_bear_the_generation() -> None:
    scene = running_job()
    observed = replace(scene.look(), job=replace(scene.job, generation=7))
    status = BEGIN
    for type_ in reversed(CONDITIONS):
        status = set_condition(status, type_, True, "Opened", "it is so", observed=observed)
    assert tuple(condition.type for condition in status.conditions) == CONDITIONS
    assert {condition.observed_generation for condition in status.conditions} == {7}


def test_a_message_too_long_for_the_schema_is_cut() -> None:
    observed = running_job().look()
    status = set_condition(BEGIN, "Placed", False, "Placing", "x" * 10_000, observed=observed)
    assert len(status.conditions[0].message) == 4096
    assert JobStatus.model_validate(status.model_dump()) == status


@pytest.mark.parametrize(
    ("holding", "phase"),
    [
        ((), "Pending"),
        (("Accepted",), "Pending"),
        (("Placed",), "Starting"),
        (("Placed", "GangReady"), "Starting"),
        (("Placed", "GangReady", "Running"), "Running"),
        (("GangReady", "Running", "Restarting"), "Restarting"),
        (("Placed", "Suspended"), "Suspended"),
        (("Running", "Completed"), "Completed"),
        (("Completed", "Failed", "Suspended"), "Failed"),
    ],
)
def test_the_phase_is_the_conditions_in_one_word(holding: tuple[str, ...], phase: Phase) -> None:
    status = BEGIN
    for type_ in holding:
        status = set_condition(status, type_, True, "Opened", "a", observed=running_job().look())
    assert phase_of(status) == phase


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ((), None),
        ((("Accepted", False), ("Running", False)), "AcceptedF"),
        ((("Accepted", True), ("Placed", False), ("GangReady", False)), "PlacedF"),
        ((("Placed", True), ("GangReady", False), ("Running", False)), "GangReadyF"),
        ((("Placed", True), ("GangReady", True), ("Running", False)), "RunningF"),
        ((("GangReady", True), ("Running", False), ("Degraded", True)), "DegradedT"),
        ((("Running", True), ("Degraded", False)), "RunningT"),
        ((("Accepted", False), ("Running", True), ("Degraded", True)), "DegradedT"),
        ((("Placed", False), ("Restarting", True)), "RestartingT"),
        ((("Placed", False), ("Suspended", True)), "SuspendedT"),
        ((("Running", False), ("Completed", True)), "CompletedT"),
        ((("Failed", True), ("Degraded", True)), "FailedT"),
    ],
)
def test_the_reason_is_that_of_the_condition_which_explains_the_phase(
    told: tuple[tuple[str, bool], ...], reason: str | None
) -> None:
    conditions = [
        Condition(
            type=type_,
            status="True" if holds else "False",
            reason=f"{type_}{'T' if holds else 'F'}",
            message="a",
            last_transition_time=write_time(0),
        )
        for type_, holds in told
    ]
    status = BEGIN.model_copy(update={"conditions": conditions})
    assert with_phase(status, running_job().look()).reason == reason


def test_facts_words_and_progress_are_told_apart() -> None:
    scene = running_job()
    status = look(scene, released(scene))
    scene.beat(step=9, step_s=1)
    told = absorb_heartbeat(status, scene.look(after_s=15))
    assert significance(status, status) == "nothing"
    assert significance(status, told) == "progress"
    assert told.goodput != status.goodput
    reworded = accept(status, scene.look(), "one")
    assert significance(reworded, accept(reworded, scene.look(), "two")) == "words"
    assert significance(status, reworded) == "facts"
    scene.beat(step=9, generation=1)
    assert significance(told, absorb_heartbeat(told, scene.look())) == "facts"


def test_that_data_services_are_ready_is_told_with_what_else_changes() -> None:
    scene = running_job()
    status = look(scene, released(scene))
    unready = set_condition(
        status, "DataServiceReady", False, "NotReady", "3 of 4", observed=scene.look()
    )
    assert significance(unready, status) == "words"
