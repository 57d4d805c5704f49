"""How writes are carried out and what becomes of their answers."""

import asyncio
import copy
import random
from typing import Any

import pytest

from omni_contract.status import JobStatus
from omni_operator.api import ApiError, ApiUnavailable, Conflict
from omni_operator.decisions.steps import Create, Delete, Patch
from omni_operator.kinds import EVENT, JOB, POD, Kind
from omni_operator.reconcile.writing import Writer, merge_patch
from omni_operator.state import JobKey, JobState
from omni_operator.watch.observe import read_job
from omni_operator.watch.view import View
from tests.fakes.fake_cluster import FakeCluster
from tests.operator.world import job


def document(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """A document of few keys, so that two of them often share some."""

    def value() -> Any:
        kind = chance.randrange(3 if depth else 2)
        if kind == 2:
            return document(chance, depth - 1)
        return chance.randrange(3) if kind else [chance.randrange(3)]

    return {key: value() for key in "abc" if chance.random() < 0.6}


def merged(document: Any, patch: Any) -> Any:
    """RFC 7386, word for word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def test_a_merge_patch_makes_the_one_document_the_other() -> None:
    chance = random.Random(1)
    for _ in range(500):
        old, new = document(chance), document(chance)
        before = copy.deepcopy(old)
        assert merged(old, merge_patch(old, new)) == new
        assert old == before
        assert merge_patch(new, new) == {}


def pod(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "c"}]},
    }


class Desk:
    """A writer at an empty cluster that holds one job."""

    def __init__(self, *, at_once: int = 1) -> None:
        self.cluster = FakeCluster()
        self.view = View()
        self.woken: list[JobKey] = []
        self.writer = Writer(
            view=self.view,
            cluster=self.cluster,
            max_at_once=at_once,
            wake=self.woken.append,
            told=lambda job, status: None,
        )
        self.job: JobState = read_job(self.cluster.put(job()))

    def write(self, *group: Create | Patch | Delete) -> None:
        asyncio.run(self.writer.write_group(self.job, group))


def test_after_a_write_that_fails_no_other_is_begun() -> None:
    def refuse(verb: str, kind: Kind, name: str) -> ApiError | None:
        return ApiUnavailable(reason="Timeout", message="no answer") if name == "p2" else None

    desk = Desk()
    desk.cluster.refuses = refuse
    with pytest.raises(ApiUnavailable):
        desk.write(*(Create(kind=POD, body=pod(f"p{i}")) for i in range(5)))
    assert desk.cluster.names(POD) == ["p0", "p1"]


def test_a_pod_that_is_there_already_is_looked_at() -> None:
    desk = Desk()
    body = pod("p0")
    body["metadata"]["ownerReferences"] = [
        {
            "apiVersion": "megascale-omni.dev/v1alpha1",
            "kind": "MultimodalTrainingJob",
            "name": "stamps",
            "uid": desk.job.uid,
            "controller": True,
        }
    ]
    desk.cluster.put(body)
    desk.view.see_job(None, desk.cluster.find(JOB, "stamps"))
    desk.write(Create(kind=POD, body=body))
    observed = desk.view.observe(desk.job.key, now_s=0)
    assert observed is not None
    assert [pod.name for pod in observed.pods] == ["p0"]


def test_a_patch_for_a_pod_that_is_gone_tells_the_view_so() -> None:
    desk = Desk()
    made = desk.cluster.put(pod("p0"))
    desk.view.see_pod(None, made)
    desk.cluster.remove(POD, "p0")
    uid = made["metadata"]["uid"]
    desk.write(Patch(name="p0", uid=uid, operations=[]))
    assert desk.view.see_pod(None, made) == frozenset()


def test_a_deletion_is_asked_for_once() -> None:
    desk = Desk()
    made = desk.cluster.put(pod("p0"))
    desk.cluster.change(POD, "p0", lambda raw: raw["spec"].update(nodeName="n0"))
    for _ in range(3):
        desk.write(Delete(kind=POD, name="p0", uid=made["metadata"]["uid"]))
    assert desk.cluster.writes == [("delete", "pods", "p0")]
    desk.write(Delete(kind=POD, name="p0", uid=made["metadata"]["uid"], grace_s=0))
    assert desk.cluster.names(POD) == []


def test_c40_a_status_is_written_over_the_version_it_was_decided_from_only() -> None:
    """Another operator opened an attempt meanwhile: this one's count is not added to it."""
    desk = Desk()
    desk.cluster.change(JOB, "stamps", lambda raw: raw["status"].update(attempt=1, restarts=1))
    with pytest.raises(Conflict):
        asyncio.run(desk.writer.write_status(desk.job, JobStatus(attempt=1), 0))
    assert desk.cluster.find(JOB, "stamps")["status"] == {"attempt": 1, "restarts": 1}
    assert desk.cluster.names(EVENT) == []
