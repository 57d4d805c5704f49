"""The view tells each job what concerns it, and keeps room for whom it was promised."""

from collections.abc import Mapping
from typing import Any

import pytest

from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.records import JobHeartbeat
from omni_operator.kinds import JOB, NODE, POD
from omni_operator.state import Admission, JobKey, Observed
from omni_operator.watch.observe import StatusError
from omni_operator.watch.view import View
from tests.operator.raw import GPU, ended, job, node, pod, said

TRAIN = JobKey(namespace="team", name="train")
OTHER = JobKey(namespace="team", name="other")


def observe(view: View, key: JobKey = OTHER) -> Observed:
    observed = view.observe(key, now_s=100.0)
    assert observed is not None
    return observed


def used(view: View, key: JobKey = OTHER) -> dict[str, Mapping[str, int]]:
    """What others hold, as this job sees it."""
    return {name: dict(held) for name, held in observe(view, key).used.items() if held}


def placement(*nodes: str, attempt: int = 1, names: tuple[str, ...] = ()) -> JobPlacement:
    names = names or tuple(f"p{at}" for at in range(len(nodes)))
    pods = zip(names, nodes, strict=True)
    return JobPlacement(
        attempt=attempt,
        plan_hash="plan",
        pods=tuple(PlacedPod(name=name, node=node, born=1) for name, node in pods),
    )


def note(view: View, made: JobPlacement, *, uid: str = "job-1", amount: int = 8) -> None:
    view.note_placement(uid, made, resource=GPU, amount=amount)


@pytest.fixture
def view() -> View:
    """Two jobs and no pods."""
    view = View()
    view.see_job(None, job(status={"attempt": 1}))
    view.see_job(None, job("other", uid="job-2", status=ended("GangReady")))
    return view


def test_a_pod_concerns_its_own_job_only(view: View) -> None:
    assert view.see_pod("ADDED", pod()) == {TRAIN}
    assert [found.name for found in observe(view, TRAIN).pods] == ["p0"]
    assert observe(view).pods == ()


def test_old_news_changes_nothing(view: View) -> None:
    """Answers to our own writes and events of the watch come in any order."""
    view.see_pod("MODIFIED", pod(version=5, phase="Running"))
    assert view.see_pod("MODIFIED", pod(version=4, phase="Pending")) == set()
    assert view.see_pod(None, pod(version=5)) == set()
    assert observe(view, TRAIN).pods[0].phase == "Running"
    assert view.see_job("MODIFIED", job(version=1)) == set()


def test_what_is_told_late_of_an_older_job_leaves_the_one_of_now_alone() -> None:
    """Events of two objects come in any order, and answers to writes later still."""
    view = View()
    view.see_job("ADDED", job(version=5))
    view.see_job("ADDED", job(uid="job-9", version=12))
    view.see_job("MODIFIED", job(version=10))
    view.see_job("DELETED", job(version=11))
    assert observe(view, TRAIN).job.uid == "job-9"


def test_an_older_job_that_is_told_of_only_after_the_newer_one_is_over() -> None:
    view = View()
    view.see_job("ADDED", job(uid="job-9", version=12))
    assert view.see_job("MODIFIED", job(version=10)) == set()
    assert view.see_job("MODIFIED", job(version=11)) == set()
    assert observe(view, TRAIN).job.uid == "job-9"


def test_the_late_end_of_a_job_that_could_not_be_read_ends_no_other() -> None:
    view = View()
    view.see_job("ADDED", job(version=5, status={"attempt": "many"}))
    view.see_job("ADDED", job(uid="job-9", version=12))
    view.see_job("DELETED", job(version=11))
    assert observe(view, TRAIN).job.uid == "job-9"


def test_the_late_end_of_an_older_node_ends_no_other(view: View) -> None:
    older, newer = node(version=5), node(version=12)
    older["metadata"]["uid"], newer["metadata"]["uid"] = "node-1", "node-9"
    view.see_node("ADDED", older)
    view.see_node("ADDED", newer)
    older["metadata"]["resourceVersion"] = "10"
    view.see_node("MODIFIED", older)
    view.see_node("DELETED", older)
    assert [found.uid for found in observe(view).nodes.values()] == ["node-9"]


def test_of_a_job_that_is_over_its_placement_is_not_kept(view: View) -> None:
    note(view, placement("n0"))
    view.see_job("MODIFIED", job(version=2, status={"attempt": 1} | ended("Completed")))
    assert view.placement("job-1", 1) is None


def test_what_is_noted_of_a_job_that_has_gone_meanwhile_is_not_kept(view: View) -> None:
    view.see_job("DELETED", job(version=2))
    note(view, placement("n0"))
    assert view.placement("job-1", 1) is None
    assert used(view) == {}


def test_versions_are_compared_as_numbers(view: View) -> None:
    view.see_pod("MODIFIED", pod(version=9, phase="Pending"))
    assert view.see_pod("MODIFIED", pod(version=10)) == {TRAIN}


def test_a_late_answer_does_not_bring_a_deleted_pod_back(view: View) -> None:
    view.see_pod("ADDED", pod(version=5))
    assert view.see_pod("DELETED", pod(version=7)) == {TRAIN}
    assert view.see_pod("MODIFIED", pod(version=6)) == set()
    assert observe(view, TRAIN).pods == ()
    assert used(view) == {}


def test_a_pod_deleted_twice_is_no_news(view: View) -> None:
    view.see_pod("ADDED", pod())
    view.see_pod("DELETED", pod(version=2))
    assert view.see_pod("DELETED", pod(version=2)) == set()


def test_a_listing_ends_what_it_no_longer_holds(view: View) -> None:
    """The watch was away while the pod was deleted."""
    view.see_pod("ADDED", pod("gone", version=3))
    view.see_pod("ADDED", pod("stays", version=4))
    view.see_pod("ADDED", pod("newer", version=9, node="n1"))
    assert view.see_listed(POD, {"uid-stays"}, "8") == {TRAIN}
    assert {found.name for found in observe(view, TRAIN).pods} == {"stays", "newer"}
    assert view.see_listed(JOB, {"job-2"}, "8") == {TRAIN}
    assert view.observe(TRAIN, now_s=0) is None
    view.see_node(None, node())
    view.see_listed(NODE, set(), "8")
    assert not observe(view).nodes


def test_pods_of_any_owner_hold_their_gpus_until_they_are_over(view: View) -> None:
    view.see_pod(None, pod("foreign", job_uid=None, gpus=2, namespace="x"))
    view.see_pod(None, pod("ours", gpus=4))
    assert used(view) == {"n0": {GPU: 6}}
    view.see_pod("MODIFIED", pod("foreign", version=2, job_uid=None, gpus=2, phase="Succeeded"))
    assert used(view) == {"n0": {GPU: 4}}
    view.see_pod("MODIFIED", pod("ours", version=3, gpus=4, phase="Failed"))
    assert used(view) == {}


def test_a_pod_on_no_node_holds_nothing(view: View) -> None:
    view.see_pod(None, pod("foreign", job_uid=None, node=None))
    assert used(view) == {}


def test_a_terminating_pod_still_holds_its_gpus(view: View) -> None:
    view.see_pod(None, pod(meta={"deletionTimestamp": "2026-11-30T08:02:00Z"}))
    assert used(view) == {"n0": {GPU: 8}}


def test_a_job_does_not_stand_in_its_own_way(view: View) -> None:
    view.see_pod(None, pod())
    note(view, placement("n0", "n1"))
    assert used(view, TRAIN) == {}
    assert used(view) == {"n0": {GPU: 8}, "n1": {GPU: 8}}


def test_a_placement_holds_room_before_its_pods_are_there(view: View) -> None:
    note(view, placement("n0", "n1"))
    assert used(view) == {"n0": {GPU: 8}, "n1": {GPU: 8}}
    view.see_pod("ADDED", pod("p0", node=None, phase="Pending"))
    assert used(view) == {"n0": {GPU: 8}, "n1": {GPU: 8}}, "gated"
    view.see_pod("MODIFIED", pod("p0", version=2, node="n0", phase="Pending"))
    assert used(view) == {"n0": {GPU: 8}, "n1": {GPU: 8}}, "counted once"


def test_c32_a_slot_that_a_failed_pod_freed_stays_reserved(view: View) -> None:
    waiting = job("other", uid="job-2", version=5, status={"conditions": [said("Placed", "False")]})
    view.see_job("MODIFIED", waiting)
    note(view, placement("n0"))
    view.see_pod("ADDED", pod("p0"))
    assert view.see_pod("MODIFIED", pod("p0", version=2, phase="Failed")) == {TRAIN}
    assert used(view) == {"n0": {GPU: 8}}
    view.see_job("MODIFIED", job(version=6, status={"attempt": 2}))
    assert used(view) == {"n0": {GPU: 8}}, "an attempt was opened and not placed yet"
    note(view, placement("n1", attempt=2))
    assert used(view) == {"n1": {GPU: 8}}


def test_an_older_placement_read_late_reserves_nothing(view: View) -> None:
    note(view, placement("n1", attempt=2))
    note(view, placement("n0", attempt=1))
    assert used(view) == {"n1": {GPU: 8}}
    view.see_job("MODIFIED", job(version=6, status={"attempt": 2}))
    observed = observe(view, TRAIN)
    assert observed.placement == placement("n1", attempt=2)
    assert observed.previous == placement("n0", attempt=1)


def test_the_placement_before_is_the_newest_earlier_one(view: View) -> None:
    note(view, placement("n0", attempt=3))
    view.see_job("MODIFIED", job(version=6, status={"attempt": 5}))
    assert observe(view, TRAIN).placement is None
    assert observe(view, TRAIN).previous == placement("n0", attempt=3)


@pytest.mark.parametrize("condition", ["Completed", "Failed", "Suspended"])
def test_a_job_that_is_over_or_suspended_reserves_nothing(view: View, condition: str) -> None:
    note(view, placement("n0"))
    view.see_job("MODIFIED", job(version=5, status={"attempt": 1, **ended(condition)}))
    assert used(view) == {}
    view.see_job("MODIFIED", job(version=6, status={"attempt": 1}))
    note(view, placement("n0"))
    assert used(view) == {}, "what was given up is not taken back"
    note(view, placement("n1", attempt=2))
    assert used(view) == {"n1": {GPU: 8}}


def test_a_placement_of_a_job_that_is_over_reserves_nothing(view: View) -> None:
    """As it is read after a restart of the operator."""
    view.see_job("MODIFIED", job(version=5, status={"attempt": 1, **ended("Failed")}))
    note(view, placement("n0"))
    assert used(view) == {}


def test_a_withdrawn_attempt_reserves_nothing_and_wakes_those_who_wait(view: View) -> None:
    view.see_job("MODIFIED", job("other", uid="job-2", version=5))
    note(view, placement("n0"))
    assert OTHER in view.release("job-1")
    assert used(view) == {}
    assert view.release("job-1") == set()


def test_a_deleted_job_is_forgotten_with_what_it_reserved(view: View) -> None:
    view.see_job("MODIFIED", job("other", uid="job-2", version=5))
    note(view, placement("n0"))
    view.note_progress("job-1", heartbeat(step=1), "t", 1.0)
    assert view.see_job("DELETED", job(version=7)) == {TRAIN, OTHER}
    assert (view.observe(TRAIN, now_s=0), view.placement("job-1", 1)) == (None, None)
    assert used(view) == {}
    assert view.keys() == (OTHER,)


def test_a_job_made_anew_under_its_name_starts_from_nothing(view: View) -> None:
    note(view, placement("n0"))
    view.see_pod(None, pod())
    view.see_job("ADDED", job(uid="job-9", version=9))
    assert observe(view, TRAIN).job.uid == "job-9"
    assert observe(view, TRAIN).pods == ()
    assert used(view) == {"n0": {GPU: 8}}, "the old pod is still there"
    view.see_job("DELETED", job(uid="job-1", version=8))
    assert observe(view, TRAIN).job.uid == "job-9"


def test_cpu_jobs_count_as_occupants(view: View) -> None:
    note(view, placement("n0", "n1"), amount=0)
    view.see_pod("ADDED", pod("p0", gpus=0))
    view.see_pod("ADDED", pod("foreign", job_uid=None, gpus=0))
    observed = observe(view)
    assert {name: observed.occupied[name] for name in observed.occupied} == {"n0": 1, "n1": 1}
    assert used(view) == {}
    assert observe(view, TRAIN).occupied.get("n0") == 0


def test_room_that_is_freed_wakes_the_jobs_that_wait(view: View) -> None:
    view.see_job("MODIFIED", job(version=5, status={"conditions": [said("Placed", "False")]}))
    view.see_pod(None, pod("foreign", job_uid=None))
    assert view.see_pod("MODIFIED", pod("foreign", job_uid=None, version=2, phase="Failed")) == {
        TRAIN
    }
    view.see_pod(None, pod("another", job_uid=None))
    assert view.see_pod("DELETED", pod("another", job_uid=None, version=9)) == {TRAIN}


def test_a_degraded_job_waits_for_better_room(view: View) -> None:
    conditions = [said("GangReady", "True"), said("Degraded", "True")]
    view.see_job("MODIFIED", job(version=5, status={"conditions": conditions}))
    assert TRAIN in view.see_node("ADDED", node("new"))


def test_a_node_wakes_the_jobs_on_it_when_it_changes(view: View) -> None:
    view.see_job("MODIFIED", job(version=5, status=ended("GangReady")))
    note(view, placement("n0"))
    view.see_node(None, node("n0"))
    assert view.see_node("MODIFIED", node("n0", version=2, heartbeat="later")) == set()
    assert view.see_node("MODIFIED", node("n0", version=3, ready="Unknown")) == {TRAIN}
    view.see_node("ADDED", node("n1"))
    assert view.see_node("MODIFIED", node("n1", version=2, ready="False")) == set()
    assert view.see_node("DELETED", node("n0", version=4)) == {TRAIN}
    assert set(observe(view).nodes) == {"n1"}


def test_mappings_of_an_observation_follow_the_view(view: View) -> None:
    observed = observe(view)
    view.see_node(None, node("n0"))
    view.see_pod(None, pod())
    assert set(observed.nodes) == {"n0"}
    assert observed.used["n0"] == {GPU: 8}


def test_an_unreadable_status_keeps_what_the_job_reserves(view: View) -> None:
    note(view, placement("n0"))
    view.see_job("MODIFIED", job(version=5, status={"attempt": "many"}))
    with pytest.raises(StatusError):
        view.observe(TRAIN, now_s=0)
    assert set(view.keys()) == {TRAIN, OTHER}
    assert used(view) == {"n0": {GPU: 8}}
    view.see_job("MODIFIED", job(version=6, status={"attempt": 1}))
    assert observe(view, TRAIN).job.status.attempt == 1


def test_a_job_that_was_never_readable_can_be_deleted() -> None:
    view = View()
    view.see_job(None, job(status={"attempt": "many"}))
    assert view.keys() == (TRAIN,)
    assert view.see_job("DELETED", job(version=5)) == {TRAIN}
    assert view.keys() == ()


def heartbeat(*, step: int, phase: str = "training") -> JobHeartbeat:
    fields: dict[str, Any] = {"attempt": 1, "generation": 0, "phase": phase, "step": step}
    return JobHeartbeat(**fields)


def test_standing_still_is_timed_by_the_own_clock(view: View) -> None:
    view.note_progress("job-1", heartbeat(step=1), "ten to six", 100.0)
    view.note_progress("job-1", heartbeat(step=1), "five to six", 130.0)
    progress = observe(view, TRAIN).progress
    assert progress is not None
    assert (progress.renewed_s, progress.step_since_s) == (130.0, 100.0)
    view.note_progress("job-1", heartbeat(step=1), "five to six", 140.0)
    view.note_progress("job-1", heartbeat(step=2), "five to six", 150.0)
    progress = observe(view, TRAIN).progress
    assert progress is not None
    assert (progress.renewed_s, progress.step_since_s) == (130.0, 150.0)


def test_blind_time_does_not_count_as_standing_still(view: View) -> None:
    view.note_progress("job-1", heartbeat(step=1), "t", 100.0)
    view.skip_blind_time(60.0)
    progress = observe(view, TRAIN).progress
    assert progress is not None
    assert (progress.renewed_s, progress.step_since_s) == (160.0, 160.0)


def test_a_lease_without_heartbeat_is_no_progress(view: View) -> None:
    view.note_progress("job-1", heartbeat(step=1), "t", 100.0)
    view.note_progress("job-1", None, None, 101.0)
    assert observe(view, TRAIN).progress is None


def test_an_admission_wakes_its_job_once(view: View) -> None:
    admitted = Admission(reason="QueueWaiting", message="no quota")
    assert view.note_admission("job-1", admitted) == {TRAIN}
    assert view.note_admission("job-1", admitted) == set()
    assert observe(view, TRAIN).admission == admitted
    assert view.note_admission("job-1", None) == {TRAIN}


def test_an_observation_says_whether_it_is_of_now(view: View) -> None:
    assert observe(view).watch_is_healthy
    view.watch_is_healthy = False
    assert not observe(view).watch_is_healthy
