"""What decisions read is what the API server said, whichever version of us wrote the status."""

from typing import Any

import pytest

from omni_contract.names import GATE
from omni_operator.state import ContainerState, JobKey, Taint
from omni_operator.watch.observe import (
    StatusError,
    read_job,
    read_node,
    read_pod,
    read_requests,
)
from tests.operator.raw import GPU, TIME, TIME_S, job, node, pod, said


def test_a_job_is_read_with_what_identifies_it() -> None:
    raw = job(version=7, status={"attempt": 2, "phase": "Running"})
    raw["metadata"]["annotations"] = {"a": "b"}
    state = read_job(raw)
    assert state.key == JobKey(namespace="team", name="train")
    assert (state.uid, state.generation, state.resource_version) == ("job-1", 3, "7")
    assert (state.status.attempt, state.status.phase) == (2, "Running")
    assert (state.created_s, state.is_deleting, state.annotations) == (TIME_S, False, {"a": "b"})


def test_a_job_without_status_has_not_begun() -> None:
    raw = job()
    del raw["status"]
    assert read_job(raw).status.attempt == 0


def test_a_job_with_a_deletion_time_is_being_deleted() -> None:
    raw = job()
    raw["metadata"]["deletionTimestamp"] = TIME
    assert read_job(raw).is_deleting


@pytest.mark.parametrize(
    ("status", "kept"),
    [
        ({"attempt": 3, "phase": "Dreaming"}, {"attempt": 3, "phase": "Pending"}),
        ({"attempt": 3, "aNewField": {"x": 1}}, {"attempt": 3}),
        ({"attempt": 3, "openedBy": "RebootRack"}, {"attempt": 3, "opened_by": None}),
        ({"attempt": 3, "placement": {"nodes": "many"}}, {"attempt": 3, "placement": None}),
    ],
    ids=["new phase", "new field", "new action", "other block"],
)
def test_a_field_another_version_wrote_is_left_out_and_the_rest_is_kept(
    status: dict[str, Any], kept: dict[str, Any]
) -> None:
    found = read_job(job(status=status)).status
    assert {name: getattr(found, name) for name in kept} == kept


def test_c34_a_bad_item_of_a_list_does_not_take_a_terminal_condition_with_it() -> None:
    conditions = [
        said("Accepted", "Perhaps"),
        said("Failed", "True"),
        {"type": "Odd"},
        said("Running", "False"),
    ]
    found = read_job(job(status={"conditions": conditions})).status.conditions
    assert [(c.type, c.status) for c in found] == [("Failed", "True"), ("Running", "False")]


@pytest.mark.parametrize("field", ["attempt", "generation", "restarts", "budget"])
def test_c40_a_counter_that_cannot_be_read_is_named_and_not_guessed(field: str) -> None:
    with pytest.raises(StatusError, match=rf"status\.{field} of job team/train: 'many'"):
        read_job(job(status={field: "many"}))


def test_a_label_alone_does_not_make_a_pod_ours() -> None:
    raw = pod(job_uid=None, meta={"labels": {"megascale-omni.dev/job-uid": "job-1"}})
    assert read_pod(raw).job_uid is None


def test_a_pod_of_an_owner_that_does_not_control_it_is_foreign() -> None:
    raw = pod()
    raw["metadata"]["ownerReferences"][0]["controller"] = False
    assert read_pod(raw).job_uid is None


def test_of_a_foreign_pod_only_what_it_holds_is_kept() -> None:
    raw = pod(job_uid=None, meta={"annotations": {"large": "x" * 1000}, "labels": {"a": "b"}})
    state = read_pod(raw)
    assert (state.node, state.requests) == ("n0", {GPU: 8})
    assert (state.annotations, state.labels, state.containers) == ({}, {}, ())


def test_a_gated_pod_says_why_it_is_not_scheduled() -> None:
    gated = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "SchedulingGated",
        "message": "gates",
    }
    state = read_pod(
        pod(
            node=None,
            phase="Pending",
            spec={"schedulingGates": [{"name": GATE}]},
            status={"conditions": [gated]},
        )
    )
    assert state.is_gated
    assert state.scheduled == (False, "SchedulingGated", "gates")


def test_the_gate_of_somebody_else_is_not_ours() -> None:
    assert not read_pod(pod(spec={"schedulingGates": [{"name": "example.com/g"}]})).is_gated


def test_deletion_counts_from_when_it_was_asked_for() -> None:
    """The API server writes the end of the grace period as deletionTimestamp."""
    meta = {"deletionTimestamp": "2026-11-30T08:02:00Z", "deletionGracePeriodSeconds": 120}
    assert read_pod(pod(meta=meta)).deleting_since_s == TIME_S
    assert read_pod(pod()).deleting_since_s is None


def test_a_disruption_counts_only_where_it_holds() -> None:
    why = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "PreemptionByScheduler",
        "message": "m",
        "lastTransitionTime": TIME,
    }
    assert read_pod(pod(status={"conditions": [why]})).disruption == (
        "PreemptionByScheduler",
        "m",
        TIME_S,
    )
    assert read_pod(pod(status={"conditions": [why | {"status": "False"}]})).disruption is None


def test_containers_are_read_in_every_state() -> None:
    over = {"exitCode": 3, "reason": "Error", "message": "why", "finishedAt": TIME}
    statuses: list[dict[str, Any]] = [
        {
            "name": "waiting",
            "restartCount": 0,
            "ready": False,
            "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}},
        },
        {
            "name": "back",
            "restartCount": 2,
            "ready": True,
            "started": True,
            "state": {"running": {"startedAt": TIME}},
            "lastState": {"terminated": over},
        },
        {"name": "over", "restartCount": 0, "ready": False, "state": {"terminated": over}},
    ]
    state = read_pod(
        pod(
            status={
                "initContainerStatuses": [
                    {"name": "data", "restartCount": 0, "ready": True, "started": True, "state": {}}
                ],
                "containerStatuses": statuses,
            }
        )
    )
    data, waiting, back, ended = state.containers
    assert data.is_init and data.is_ready and data.is_started
    assert not waiting.is_init
    assert (waiting.waiting_reason, waiting.waiting_message) == ("ErrImagePull", "no such image")
    assert back == ContainerState(
        name="back",
        is_init=False,
        is_ready=True,
        is_started=True,
        restarts=2,
        running_since_s=TIME_S,
        exit_code=3,
        reason="Error",
        message="why",
        finished_s=TIME_S,
    )
    assert (ended.is_terminated, ended.exit_code, ended.running_since_s) == (True, 3, None)
    assert state.container("over") is ended


def test_a_phase_nobody_knows_is_unknown() -> None:
    assert read_pod(pod(phase="Dreaming")).phase == "Unknown"


def container(gpus: int | str, *, sidecar: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = {"name": "c", "resources": {"requests": {GPU: gpus, "cpu": "1"}}}
    return made | ({"restartPolicy": "Always"} if sidecar else {})


@pytest.mark.parametrize(
    ("init", "main", "held"),
    [
        ([], [4, 4], 8),
        ([container("2", sidecar=True)], [4], 6),
        ([container("8")], [4], 8),
        ([container("2", sidecar=True), container("5")], [4], 7),
        ([container("5"), container("2", sidecar=True)], [4], 6),
        ([], ["1k"], 1000),
        ([], ["2Ti"], 2 * 2**40),
        ([], ["1Ki"], 1024),
    ],
    ids=["containers add", "sidecars add", "init peak", "init after sidecar", "init before sidecar",
         "k", "Ti", "Ki"],
)  # fmt: skip
def test_a_pod_holds_the_most_it_needs_at_any_time(
    init: list[dict[str, Any]], main: list[int | str], held: int
) -> None:
    spec = {"initContainers": init, "containers": [container(gpus) for gpus in main]}
    assert read_requests(spec) == {GPU: held}


def test_native_resources_are_no_gpus() -> None:
    requests = {"cpu": "1500m", "memory": "1Gi", "hugepages-2Mi": "4Mi", "ephemeral-storage": "1G"}
    assert read_requests({"containers": [{"resources": {"requests": requests}}]}) == {}


def test_a_node_is_read_with_its_gpus_and_state() -> None:
    taint = {"key": "k", "value": "v", "effect": "NoExecute", "timeAdded": TIME}
    state = read_node(
        node(ready="Unknown", labels={"zone": "a"}, unschedulable=True, taints=[taint])
    )
    assert (state.name, state.allocatable, state.labels) == ("n0", {GPU: 8}, {"zone": "a"})
    assert (state.ready, state.ready_since_s, state.is_cordoned) == ("Unknown", TIME_S, True)
    assert state.taints == (Taint(key="k", value="v", effect="NoExecute", since_s=TIME_S),)


def test_a_node_that_never_said_anything_is_not_ready() -> None:
    raw = node()
    raw["status"] = {}
    state = read_node(raw)
    assert (state.ready, state.ready_since_s, state.allocatable) == ("Unknown", TIME_S, {})
