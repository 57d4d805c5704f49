"""How jobs rest, end and go, and what they leave."""

import json
import time
from typing import Final

from omni_contract.names import ANNOTATION_RESTART, LABEL_JOB, TRAINER_CONTAINER
from tests.cluster.jobs import JobHandle, index_of, name_of, uid_of
from tests.cluster.lifecycle.scene import (
    Case,
    Scene,
    in_phase,
    left_of,
    running,
    some_seconds,
    story,
    uids,
    until,
)
from tests.cluster.stories import Story

CASES: Final[list[Case]] = []
_GRACE_S: Final = 77


@story(CASES, nodes=2)
def c34_a_finished_job_stays_finished_when_its_pods_are_deleted(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(keepPods="All"))
    yield running(job)
    job.complete()
    yield in_phase(job, "Completed")
    assert {pod["status"]["phase"] for pod in job.pods} == {"Succeeded"}
    job.act.delete(*map(name_of, job.pods))
    job.patch({"metadata": {"annotations": {ANNOTATION_RESTART: "1"}}})
    began_s = time.monotonic()
    yield until("some seconds over", lambda: time.monotonic() > began_s + 5)
    assert job.pods == [] and job.status.phase == "Completed" and job.status.attempt == 1


@story(CASES, nodes=2)
def a_suspended_job_gets_its_grace_and_resumes_without_being_counted(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(podTemplate={"terminationGraceSeconds": _GRACE_S}))
    yield running(job)
    slow = job.pod(1)
    job.act.terminate_slowly(name_of(slow), 4)
    job.patch({"spec": {"suspend": True}})
    yield until("it ends", lambda: uid_of(slow) not in uids(job).values())
    (ending,) = (pod for pod in job.pods if uid_of(pod) == uid_of(slow))
    assert ending["metadata"]["deletionGracePeriodSeconds"] == _GRACE_S
    assert job.reason("Suspended") == "Suspending" and not job.status.holds("Suspended")
    yield in_phase(job, "Suspended")
    assert job.pods == [] and not job.status.holds("Running")
    job.patch({"spec": {"suspend": False}})
    yield running(job, 2)
    assert job.status.restarts == 0 and job.status.incidents == []
    assert job.status.phase == "Running"


@story(CASES, nodes=2)
def a_finished_job_is_deleted_after_its_time_with_all_it_owned(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(ttlSecondsAfterFinished=2))
    yield running(job)
    assert len(left_of(scene.api, job.name)) >= 8
    job.complete()
    yield until("the job gone", lambda: not job.exists())
    yield until("all of it gone", lambda: not left_of(scene.api, job.name))


@story(CASES, nodes=2)
def a_job_that_runs_too_long_fails_and_frees_its_nodes(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document(activeDeadlineSeconds=3))
    yield running(job)
    yield in_phase(job, "Failed")
    assert job.reason("Failed") == "DeadlineExceeded"
    yield until("no pod left", lambda: not job.pods)


@story(CASES, nodes=2)
def pods_of_a_failed_job_are_kept_only_where_they_are_asked_for(scene: Scene) -> Story[None]:
    kept, gone = scene.job("-kept"), scene.job("-gone")
    for job, keep in ((kept, "Failed"), (gone, "None")):
        job.create(scene.document(keepPods=keep, restart={"limit": 0}))
        yield running(job)
        job.act.end_container(name_of(job.pod(1)), exit_code=1, container=TRAINER_CONTAINER)
        yield in_phase(job, "Failed")
        yield until("no GPU held", lambda job=job: not job.living)  # type: ignore[misc]
    yield until("no pod kept", lambda: not gone.pods)
    assert [index_of(pod) for pod in kept.pods] == [1]


@story(CASES, nodes=2)
def a_quiet_job_has_nothing_written(scene: Scene) -> Story[None]:
    job = scene.job()
    job.create(scene.document())
    yield running(job)
    yield from some_seconds(10)
    began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime())
    yield from some_seconds(30)
    assert _writes_about(scene, job.name, since=began) == []


@story(CASES, nodes=2)
def a_job_deleted_in_any_phase_leaves_nothing(scene: Scene) -> Story[None]:
    def dies(job: JobHandle) -> Story[None]:
        job.delete()
        yield until(f"{job.name} gone", lambda: not job.exists())
        yield until(f"all of {job.name} gone", lambda: not left_of(scene.api, job.name))

    job = scene.job("-waits")
    job.create(scene.document(nodes=4))
    yield until("it waits", lambda: job.reason("Placed") == "NotEnoughNodes")
    yield from dies(job)
    for phase in ("Starting", "Running", "Restarting", "Suspended", "Completed", "Failed"):
        job = scene.job(f"-{phase.lower()}")
        job.create(scene.document(keepPods="All", restart={"limit": 0}))
        if phase == "Starting":
            yield until("placed", lambda job=job: job.status.holds("Placed"))  # type: ignore[misc]
            yield from dies(job)
            continue
        yield running(job)
        pod = name_of(job.pod(1))
        if phase == "Restarting":
            job.act.stick(pod)
            job.act.delete(pod)
            yield until("new", lambda job=job: job.status.attempt == 2)  # type: ignore[misc]
        elif phase == "Suspended":
            job.patch({"spec": {"suspend": True}})
        elif phase == "Completed":
            job.complete()
        elif phase == "Failed":
            job.act.end_container(pod, exit_code=1, container=TRAINER_CONTAINER)
        yield in_phase(job, phase)
        job.delete()
        for left in job.act.list(f"{LABEL_JOB}={job.name}"):
            job.act.unstick(name_of(left))
        yield from dies(job)


@story(CASES, nodes=2)
def a_job_of_the_same_name_that_comes_later_is_another_one(scene: Scene) -> Story[None]:
    job = scene.job()
    seen = set()
    for _ in range(2):
        job.create(scene.document())
        yield running(job)
        assert job.status.attempt == 1
        seen.add(job.uid5)
        assert all(job.uid5 in name_of(pod) for pod in job.living)
        job.delete()
        yield until("the job gone", lambda: not job.exists())
    assert len(seen) == 2


def _writes_about(scene: Scene, job: str, *, since: str) -> list[str]:
    """What the operator wrote about a job since then, by the API server's audit log."""
    found = []
    for line in scene.control_plane.audit_log.read_text().splitlines():
        if scene.operator.user not in line or f"{job}" not in line:
            continue
        event = json.loads(line)
        name = event.get("objectRef", {}).get("name", "")
        is_ours = name == job or name.startswith(f"{job}-")
        is_write = event["verb"] not in ("get", "list", "watch")
        if is_ours and is_write and event["requestReceivedTimestamp"] > since:
            found.append(f"{event['verb']} {event['requestURI']}")
    return found
