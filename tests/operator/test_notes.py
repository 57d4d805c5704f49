"""Events tell transitions once; the same again counts one up."""

from dataclasses import replace
from typing import Any

import pytest

from omni_contract.errors import SpecError
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import JobStatus
from omni_operator.faults.detect import find, find_cause
from omni_operator.status.incidents import open_incident
from omni_operator.status.life import (
    accept,
    complete,
    fail,
    place,
    refuse,
    release_gang,
    suspend,
    wait_for_room,
)
from omni_operator.status.notes import EventBook, Note, notes_between
from omni_operator.status.progress import absorb_heartbeat
from tests.operator.looking import Scene, look, opened, released, running_job

A = RestartAction
NOTE = Note(reason="NodeLost", type="Warning", message="node-1 is gone")


def reasons(old: JobStatus, new: JobStatus) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in notes_between(old, new)]


def failed_pod(scene: Scene, status: JobStatus) -> JobStatus:
    scene.pods.end_container(scene.name(1), exit_code=1)
    observed = scene.look(status=status)
    cause = find_cause(find(observed, scene.plan.spec))
    incident = open_incident(cause, A.REPLACE_POD, observed=observed)
    return opened(scene, status, opened_by=A.REPLACE_POD, incident=incident)


def test_that_pods_are_let_go_is_told_where_they_waited_after_they_were_placed() -> None:
    scene = running_job()
    placed = place(opened(scene), scene.look(), scene.placement, config_map="p-1")
    assert reasons(placed, release_gang(placed, scene.look())) == [("Normal", "GangReady")]


def test_the_way_of_a_job_to_its_end_is_told() -> None:
    scene = running_job()
    first = opened(scene)
    assert reasons(JobStatus(), first) == [("Normal", "AttemptOpened")]
    ready = released(scene)
    assert reasons(first, ready) == [("Normal", "Placed")], "they waited for nothing"
    running = look(scene, ready)
    assert reasons(ready, running) == [("Normal", "Running")]
    again = failed_pod(scene, running)
    assert reasons(running, again) == [("Warning", "AppError"), ("Normal", "AttemptOpened")]
    notes = notes_between(running, again)
    assert notes[0].message.endswith("trainer ended with exit code 1 -> ReplacePod")
    assert notes[1].message == "attempt 2 with 4 pods is opened by ReplacePod"
    observed = scene.look()
    assert reasons(running, complete(running, observed, "")) == [("Normal", "Completed")]
    assert reasons(running, fail(running, observed, "UserLimit", "")) == [("Warning", "Failed")]


def test_an_attempt_without_a_fault_says_why_there_is_one() -> None:
    scene = running_job()
    running = look(scene, released(scene))
    again = opened(scene, running, opened_by=A.RESTART_JOB, message="somebody asked")
    (note,) = notes_between(running, again)
    assert note.message == "attempt 2 with 4 pods is opened by RestartJob after somebody asked"


def test_nothing_new_tells_nothing() -> None:
    scene = running_job()
    running = look(scene, released(scene))
    assert notes_between(running, running) == ()
    scene.beat(step=9, step_s=1)
    assert notes_between(running, absorb_heartbeat(running, scene.look())) == ()
    assert notes_between(running, accept(running, scene.look(), "valid")) == ()


def test_a_wait_is_told_again_when_its_reason_changes_and_not_when_its_words_do() -> None:
    scene = running_job()
    first = opened(scene)
    few = wait_for_room(first, scene.look(), "NotEnoughNodes", "1 of 4")
    assert reasons(first, few) == [("Warning", "NotEnoughNodes")]
    assert reasons(few, wait_for_room(few, scene.look(), "NotEnoughNodes", "2 of 4")) == []
    split = wait_for_room(few, scene.look(), "NoRoomUnderTopology", "2 racks")
    assert reasons(few, split) == [("Warning", "NoRoomUnderTopology")]


def test_the_end_of_a_job_that_waits_is_told_once() -> None:
    scene = running_job()
    first = opened(scene)
    over = fail(first, scene.look(), "NotEnoughNodes", "1 of 4; topology.onUnsatisfied is Fail")
    assert reasons(first, over) == [("Warning", "Failed")]


@pytest.mark.parametrize("other", ["ErrImagePull", "ImagePullBackOff"])
def test_a_kubelet_that_goes_to_and_fro_is_told_once(other: str) -> None:
    scene = running_job()
    ready = released(scene)
    name = scene.name(0)
    scene.pods.wait_in_container(name, container="trainer", reason="ErrImagePull")
    waits = look(scene, ready)
    assert ("Warning", "ImageCannotBePulled") in reasons(ready, waits)
    scene.pods.wait_in_container(name, container="trainer", reason=other)
    assert reasons(waits, look(scene, waits)) == []


def test_suspending_and_resuming_are_told() -> None:
    scene = running_job()
    running = look(scene, released(scene))
    ending = suspend(running, scene.look(), num_left=2)
    assert reasons(running, ending) == [("Normal", "Suspending")]
    assert reasons(ending, suspend(ending, scene.look(), num_left=1)) == []
    over = suspend(ending, scene.look(), num_left=0)
    assert reasons(ending, over) == [("Normal", "Suspended")]
    resumed = opened(scene, over)
    assert reasons(over, resumed) == [("Normal", "AttemptOpened"), ("Normal", "Resumed")]


def test_a_wrong_spec_is_told() -> None:
    scene = running_job()
    refused = refuse(JobStatus(), scene.look(), SpecError("spec.train", "is missing"))
    (note,) = notes_between(JobStatus(), refused)
    assert note == Note(reason="InvalidSpec", type="Warning", message="spec.train: is missing")


def test_a_restart_in_place_is_told_with_its_cause() -> None:
    scene = running_job()
    running = look(scene, released(scene))
    scene.beat(step=3, generation=1, last_fault=FaultClass.OOM, last_message="rank 2 fell")
    told = absorb_heartbeat(running, scene.look())
    assert reasons(running, told) == [("Warning", "OOM"), ("Normal", "RestartInPlace")]


# The book of Events.


def test_a_note_told_again_counts_one_up() -> None:
    job, book = running_job().job, EventBook()
    first = book.write_of(job, NOTE, 1000)
    assert first.body is not None and not first.operations
    again = book.write_of(job, NOTE, 2000)
    assert again.name == first.name and again.body is None
    assert [(o["path"], o["value"]) for o in again.operations] == [
        ("/count", 2),
        ("/lastTimestamp", "1970-01-01T00:33:20Z"),
    ]


@pytest.mark.parametrize(
    "change",
    [{"message": "node-2 is gone"}, {"reason": "NodeTainted"}, {"type": "Normal"}],
    ids=lambda change: next(iter(change)),
)
def test_another_note_is_another_event(change: dict[str, Any]) -> None:
    job, book = running_job().job, EventBook()
    first = book.write_of(job, NOTE, 1000)
    other = book.write_of(job, replace(NOTE, **change), 1000)
    assert other.body is not None and other.name != first.name
    later_job = book.write_of(replace(job, uid="another"), NOTE, 1000)
    assert later_job.body is not None and later_job.name != first.name


def test_an_event_is_one_that_kubectl_shows() -> None:
    job = running_job().job
    body = EventBook().write_of(job, NOTE, 1000).body
    assert body is not None
    involved = body["involvedObject"]
    assert (involved["kind"], involved["name"]) == ("MultimodalTrainingJob", job.key.name)
    assert involved["uid"] == job.uid and involved["namespace"] == job.key.namespace
    assert body["metadata"]["namespace"] == job.key.namespace
    assert (body["type"], body["reason"], body["count"]) == ("Warning", "NodeLost", 1)
    assert body["firstTimestamp"] == body["lastTimestamp"] == "1970-01-01T00:16:40Z"


def test_a_message_too_long_for_an_event_is_cut() -> None:
    note = replace(NOTE, message="x" * 5000)
    body = EventBook().write_of(running_job().job, note, 1000).body
    assert body is not None and len(body["message"]) == 1024


def test_an_event_that_is_gone_is_made_anew() -> None:
    job, book = running_job().job, EventBook()
    book.write_of(job, NOTE, 1000)
    lost = book.write_of(job, NOTE, 2000)
    book.forget(lost.name)
    assert book.write_of(job, NOTE, 2000).body is not None


def test_two_leaders_in_a_row_name_an_event_alike() -> None:
    job = running_job().job
    names = {EventBook().write_of(job, NOTE, now_s).name for now_s in (1000, 2000)}
    assert len(names) == 1


def test_the_book_forgets_the_oldest() -> None:
    job, book = running_job().job, EventBook()
    for number in range(4097):
        book.write_of(job, replace(NOTE, message=f"message {number}"), 1000)
    assert book.write_of(job, replace(NOTE, message="message 0"), 2000).body is not None
    assert book.write_of(job, replace(NOTE, message="message 4096"), 2000).body is None
