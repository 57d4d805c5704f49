"""Names, annotations and patches, done to pods in an API server in memory."""

import asyncio
from typing import Any

import pytest

from omni_contract.names import (
    ANNOTATION_HISTORY,
    ANNOTATION_INDEX,
    ANNOTATION_RENDEZVOUS,
    GATE,
)
from omni_contract.records import History
from omni_operator.api import Conflict
from omni_operator.kinds import POD
from omni_operator.render.names import (
    HOSTNAME_LABEL,
    ObjectNames,
    Operations,
    annotation_patch,
    gate_patch,
    pod_annotations,
)
from omni_operator.render.pod import render_pod
from omni_operator.watch.observe import read_pod
from tests.contract.jobs import DEMO, changed
from tests.fakes.fake_cluster import FakeCluster
from tests.operator.rendering import SETTINGS, job_state, place_on, plan_of

JOB, PLAN = job_state(DEMO), plan_of(DEMO)
NAMES = ObjectNames.of(JOB)


def created(cluster: FakeCluster, *, attempt: int = 1) -> str:
    """Create the pod of node 1 and return its name."""
    placement = place_on(JOB, PLAN, attempt=attempt)
    pod = render_pod(JOB, PLAN, placement, 1, SETTINGS, History())
    cluster.put(pod)
    name: str = pod["metadata"]["name"]
    return name


def patched(cluster: FakeCluster, name: str, operations: Operations) -> dict[str, Any]:
    return dict(asyncio.run(cluster.json_patch(POD, JOB.key.namespace, name, operations)))


def test_the_longest_names_are_host_names() -> None:
    """A job name of 40 characters leaves room for any attempt of the largest job."""
    job = job_state(changed("metadata.name", "j" * 40))
    assert len(ObjectNames.of(job).pod(born=9_999_999_999, index=10_999)) == 63
    assert len(ObjectNames.of(job).service) < 63


def test_a_later_job_of_the_same_name_has_other_names() -> None:
    later = ObjectNames.of(job_state(DEMO, uid="ffffffff-0000-4000-8000-000000000000"))
    for names in ("service", "progress_lease", "rank0"):
        assert getattr(later, names) != getattr(NAMES, names)
    assert later.pod(born=1, index=0) != NAMES.pod(born=1, index=0)


def test_all_pods_of_an_attempt_meet_at_the_pod_of_node_0() -> None:
    placement = place_on(JOB, PLAN, spares=1)
    told = [pod_annotations(JOB, placement, i, SETTINGS, History()) for i in range(3)]
    meet = f"{placement.pods[0].name}.{NAMES.service}.team.svc.cluster.local:29400"
    assert [one[ANNOTATION_RENDEZVOUS] for one in told] == [meet] * 3
    assert [one[ANNOTATION_INDEX] for one in told] == ["0", "1", ""]


def test_history_survives_the_annotation() -> None:
    history = History(user_restarts=2, highest_step=70)
    told = pod_annotations(JOB, place_on(JOB, PLAN), 0, SETTINGS, history)
    assert History.model_validate_json(told[ANNOTATION_HISTORY]) == history


def test_a_living_pod_is_told_only_what_changed() -> None:
    cluster = FakeCluster()
    name = created(cluster)
    pod = read_pod(cluster.find(POD, name))
    old = pod_annotations(JOB, place_on(JOB, PLAN), 1, SETTINGS, History())
    assert annotation_patch(pod, old) == []
    new = old | {ANNOTATION_INDEX: "", ANNOTATION_RENDEZVOUS: "elsewhere:29400"}
    operations = annotation_patch(pod, new)
    assert len(operations) == 1 + 2
    stays = cluster.find(POD, name)["metadata"]["annotations"]
    assert patched(cluster, name, operations)["metadata"]["annotations"] == {**stays, **new}


@pytest.mark.parametrize("patch", ["gate", "annotations"])
def test_a_patch_misses_a_pod_of_the_same_name_made_later(patch: str) -> None:
    cluster = FakeCluster()
    name = created(cluster)
    pod = read_pod(cluster.find(POD, name))
    cluster.remove(POD, name)
    created(cluster)
    operations = (
        gate_patch(pod, "node-1")
        if patch == "gate"
        else annotation_patch(pod, {ANNOTATION_INDEX: "7"})
    )
    with pytest.raises(Conflict):
        patched(cluster, name, operations)
    later = cluster.find(POD, name)
    assert read_pod(later).is_gated
    assert later["metadata"]["annotations"][ANNOTATION_INDEX] == "1"


def test_lifting_the_gate_binds_to_the_node_and_leaves_other_gates() -> None:
    cluster = FakeCluster()
    name = created(cluster)
    foreign = {"name": "elsewhere.example/gate"}
    cluster.change(POD, name, lambda pod: pod["spec"]["schedulingGates"].append(foreign))
    before = cluster.find(POD, name)["spec"]["nodeSelector"]
    spec = patched(cluster, name, gate_patch(read_pod(cluster.find(POD, name)), "host-7"))["spec"]
    assert spec["nodeSelector"] == {**before, HOSTNAME_LABEL: "host-7"}
    assert spec["schedulingGates"] == [foreign]


def test_a_gate_is_lifted_once() -> None:
    """Two leaders that overlap must not bind a pod to two nodes."""
    cluster = FakeCluster()
    name = created(cluster)
    operations = gate_patch(read_pod(cluster.find(POD, name)), "host-7")
    patched(cluster, name, operations)
    with pytest.raises(Conflict):
        patched(cluster, name, operations)


def test_the_gate_is_ours() -> None:
    cluster = FakeCluster()
    pod = cluster.find(POD, created(cluster))
    assert pod["spec"]["schedulingGates"] == [{"name": GATE}]
