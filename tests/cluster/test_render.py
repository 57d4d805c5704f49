"""Rendered objects before a real API server, in a namespace that enforces `restricted`."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from omni_contract.names import ANNOTATION_ATTEMPT, LABEL_JOB
from omni_contract.records import History
from omni_operator.kinds import LEASE, POD, kind_of
from omni_operator.render.names import Object, ObjectNames, annotation_patch, gate_patch
from omni_operator.render.objects import (
    RenderedObjects,
    read_placement,
    read_plan,
    render_objects,
    render_placement,
)
from omni_operator.render.pod import render_pod
from omni_operator.settings import Settings
from omni_operator.state import JobState
from omni_operator.watch.observe import read_job, read_pod
from tests.cluster.api import Api, ApiError, wait_for
from tests.cluster.cluster import Cluster
from tests.cluster.job_kind import install_job_kind, jobs_path
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.pods import Pods
from tests.contract.jobs import changed
from tests.operator.rendering import place_on, plan_of, with_template

SETTINGS: Final = Settings(image="registry.example/omni:1")
RICH: Final = {
    "labels": {"team": "vision"},
    "annotations": {"note": "x"},
    "imagePullSecrets": ["pull"],
    "env": {"NCCL_DEBUG": "INFO"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "mine", "operator": "Exists"}],
    "volumes": [
        {"name": "work", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
    ],
    "volumeMounts": [{"name": "work", "mountPath": "/work"}],
    "containers": [
        {"name": "trainer", "resources": {"limits": {"cpu": "100m", "memory": "64Gi"}}},
        {
            "name": "data",
            "env": [{"name": "A", "value": "b"}],
            "readinessProbe": {"periodSeconds": 2},
        },
    ],
    "securityContext": {"runAsUser": 1000, "supplementalGroups": [7]},
    "terminationGraceSeconds": 600,
}


@pytest.fixture(scope="module", autouse=True)
def job_kind(cluster: Cluster) -> None:
    install_job_kind(cluster)


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> Iterator[str]:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    yield namespace


def create_job(cluster: Cluster, namespace: str, raw: dict[str, Any]) -> JobState:
    return read_job(cluster.api.create(jobs_path(namespace), raw))


def create(api: Api, body: Object) -> Object:
    """POST as the operator does; an unknown field is an error here, not a warning."""
    path = kind_of(body).path(body["metadata"]["namespace"])
    return api.request("POST", path, body, query={"fieldValidation": "Strict"})


def all_of(objects: RenderedObjects) -> tuple[Object, ...]:
    return (*objects.created, *objects.applied, objects.role_binding)


def apply(api: Api, body: Object) -> Object:
    path = kind_of(body).path(body["metadata"]["namespace"], body["metadata"]["name"])
    return api.patch(path, body, kind="apply")


@pytest.mark.parametrize(
    "raw",
    [
        with_template({}),
        with_template({}, device="cpu"),
        with_template(RICH),
        changed("spec.storage", {"credentialsSecret": "omni-s3"}),
    ],
    ids=["gpu", "cpu", "overrides", "credentials"],
)
def test_pods_pass_restricted_and_hold_no_unknown_field(
    cluster: Cluster, restricted: str, raw: dict[str, Any]
) -> None:
    job, plan = create_job(cluster, restricted, raw), plan_of(raw)
    placement = place_on(job, plan, spares=1)
    for body in all_of(render_objects(job, plan)):
        create(cluster.api, body)
    for index in range(len(placement.all_pods)):
        rendered = render_pod(job, plan, placement, index, SETTINGS, History())
        spec = create(cluster.api, rendered)["spec"]
        automounted = [v for v in spec["volumes"] if v["name"].startswith("kube-api-access")]
        assert automounted == []


def test_an_override_that_restricted_forbids_is_refused_in_words(
    cluster: Cluster, restricted: str
) -> None:
    add = {"capabilities": {"add": ["IPC_LOCK"]}}
    raw = with_template({"containers": [{"name": "trainer", "securityContext": add}]})
    job, plan = create_job(cluster, restricted, raw), plan_of(raw)
    with pytest.raises(ApiError, match='violates PodSecurity "restricted.*IPC_LOCK'):
        create(cluster.api, render_pod(job, plan, place_on(job, plan), 1, SETTINGS, History()))


def test_gated_pods_run_where_the_patch_says_and_are_told_of_later_attempts(
    cluster: Cluster, restricted: str, nodes: Nodes, pods: Pods
) -> None:
    names = nodes.add(Grid(nodes=3, gpus=2, name="render"))
    raw = with_template({})
    job, plan = create_job(cluster, restricted, raw), plan_of(raw)
    placement = place_on(job, plan)
    for body in all_of(render_objects(job, plan)):
        create(cluster.api, body)
    for index in range(2):
        create(cluster.api, render_pod(job, plan, placement, index, SETTINGS, History()))
    targets = dict(zip([p.name for p in placement.pods], reversed(names[:2]), strict=True))
    for name, node in targets.items():
        path = POD.path(restricted, name)
        operations = gate_patch(read_pod(pods.get(name)), node)
        cluster.api.patch(path, operations, kind="json")
        with pytest.raises(ApiError) as refused:
            cluster.api.patch(path, operations, kind="json")
        assert refused.value.status == 422
    pods.wait_until_running(*targets)
    assert {name: pods.get(name)["spec"]["nodeName"] for name in targets} == targets
    assert not any("managedFields" in pods.get(name)["metadata"] for name in targets)
    name = placement.pods[1].name
    operations = annotation_patch(read_pod(pods.get(name)), {ANNOTATION_ATTEMPT: "2"})
    changed_pod = cluster.api.patch(POD.path(restricted, name), operations, kind="json")
    assert changed_pod["metadata"]["annotations"][ANNOTATION_ATTEMPT] == "2"
    assert annotation_patch(read_pod(changed_pod), {ANNOTATION_ATTEMPT: "2"}) == []


def test_applying_twice_writes_nothing(cluster: Cluster, namespace: str) -> None:
    raw = with_template({})
    job = create_job(cluster, namespace, raw)
    objects = render_objects(job, plan_of(raw))
    for body in (*objects.applied, objects.role_binding):
        first, second = apply(cluster.api, body), apply(cluster.api, body)
        assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


def test_plan_and_placement_come_back_and_never_change(cluster: Cluster, namespace: str) -> None:
    raw = with_template({})
    job, plan = create_job(cluster, namespace, raw), plan_of(raw)
    placement = place_on(job, plan)
    stored = create(cluster.api, render_objects(job, plan).plan)
    assert read_plan(stored) == plan
    assert read_placement(create(cluster.api, render_placement(job, placement))) == placement
    path = kind_of(stored).path(namespace, stored["metadata"]["name"])
    with pytest.raises(ApiError, match="immutable"):
        cluster.api.patch(path, {"binaryData": {"x": "eA=="}})


def test_rank_0_renews_its_lease_and_can_do_nothing_else(cluster: Cluster, namespace: str) -> None:
    raw = with_template({})
    job = create_job(cluster, namespace, raw)
    objects, names = render_objects(job, plan_of(raw)), ObjectNames.of(job)
    for body in all_of(objects):
        create(cluster.api, body)
    rank0 = Api(cluster.kubeconfig_for(namespace, names.rank0))
    lease = LEASE.path(namespace, names.progress_lease)
    try:
        wait_for(lambda: may(lambda: rank0.get(lease)), "the role binding to hold")
        renewed = {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
        assert rank0.patch(lease, renewed)["spec"] == renewed["spec"]
        for forbidden in (LEASE.path(namespace, "another"), POD.path(namespace)):
            assert not may(lambda path=forbidden: rank0.get(path))  # type: ignore[misc]
        assert not may(lambda: rank0.delete(lease))
    finally:
        rank0.close()


def test_a_priority_class_says_whether_pods_preempt(cluster: Cluster, namespace: str) -> None:
    """A pod cannot say it: the API server refuses a preemptionPolicy other than its class's."""
    name = f"{namespace}-polite"
    polite = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": name},
        "value": 0,
        "preemptionPolicy": "Never",
    }
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    cluster.api.create(path, polite)
    try:
        raw = with_template({})
        job, plan = create_job(cluster, namespace, raw), plan_of(raw)
        placement = place_on(job, plan)
        bare = render_pod(job, plan, placement, 1, SETTINGS, History())
        bare["spec"]["preemptionPolicy"] = "Never"
        with pytest.raises(ApiError, match="must not be provided in pod spec"):
            create(cluster.api, bare)
        settings = Settings(image="registry.example/omni:1", priority_class=name)
        pod = create(cluster.api, render_pod(job, plan, placement, 1, settings, History()))
        assert pod["spec"]["preemptionPolicy"] == "Never"
    finally:
        cluster.api.delete(f"{path}/{name}")


def test_c38_everything_goes_with_the_job_while_no_operator_runs(
    cluster: Cluster, namespace: str
) -> None:
    raw = with_template({})
    job, plan = create_job(cluster, namespace, raw), plan_of(raw)
    placement, objects = place_on(job, plan), render_objects(job, plan)
    bodies = [*all_of(objects), render_placement(job, placement)]
    bodies += [render_pod(job, plan, placement, i, SETTINGS, History()) for i in range(2)]
    paths = []
    for body in bodies:
        create(cluster.api, body)
        paths.append(kind_of(body).path(namespace, body["metadata"]["name"]))
        assert body["metadata"]["labels"][LABEL_JOB] == job.key.name
    cluster.api.delete(f"{jobs_path(namespace)}/{job.key.name}")
    wait_for(
        lambda: not [path for path in paths if cluster.api.exists(path)],
        "all objects of the job gone",
        timeout_s=60,  # the garbage collector learns of a new kind every 30 s
    )


def may(ask: Callable[[], object]) -> bool:
    """Whether the API server allows it."""
    try:
        ask()
    except ApiError as exc:
        if exc.status != 403:
            raise
        return False
    return True
