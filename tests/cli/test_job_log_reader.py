"""No ConfigMap makes who asks for logs create another pod than the operator's."""

import copy
import json
from typing import Any

import pytest

from omni_cli.job import main
from omni_contract.log_store import LOG_READER_FILE
from omni_contract.names import LABEL_JOB, LABEL_LOG_READER
from tests.cli.job_objects import UID, FakeKubectl, Object, a_job, log_reader_map, running_status
from tests.contract.jobs import DEMO

Capture = pytest.CaptureFixture[str]
TEMPLATE: Object = {
    "dataImage": "registry.example/data:2",
    "imagePullSecrets": ["registry"],
    "nodeSelector": {"pool": "a"},
    "tolerations": [{"key": "mine", "operator": "Exists"}],
    "securityContext": {"runAsUser": 1000, "supplementalGroups": [7]},
    "volumes": [
        {"name": "ca", "secret": {"secretName": "ca"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
    ],
    "containers": [
        {
            "name": "data",
            "env": [{"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"}],
            "envFrom": [{"configMapRef": {"name": "proxy"}}],
            "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
            "securityContext": {"privileged": False, "capabilities": {"add": ["IPC_LOCK"]}},
        }
    ],
}
STORAGE = {"credentialsSecret": "omni-s3"}
SAYS_MUCH = DEMO | {"spec": DEMO["spec"] | {"podTemplate": TEMPLATE, "storage": STORAGE}}


def reader_of(config_map: Object) -> Object:
    found: Object = json.loads(config_map["data"][LOG_READER_FILE])
    return found


def with_reader(config_map: Object, reader: object) -> Object:
    return config_map | {"data": {LOG_READER_FILE: json.dumps(reader)}}


def put(reader: Object, path: str, value: Any) -> Object:
    """A pod with one value set; numbers in `path` index lists, `+` appends to one."""
    pod = copy.deepcopy(reader)
    *before, last = path.split(".")
    here: Any = pod
    for step in before:
        here = here[int(step)] if isinstance(here, list) else here[step]
    if last == "+":
        here.append(value)
    else:
        here[last] = value
    return pod


def no_pod_is_made(kubectl: FakeKubectl, capsys: Capture) -> str:
    """What is said instead."""
    assert main(["logs"]) == 2
    assert kubectl.pods == []
    return capsys.readouterr().err


@pytest.mark.parametrize("raw", [DEMO, SAYS_MUCH], ids=["bare", "says-much"])
def test_the_pod_that_the_operator_writes_is_made_as_it_is(
    raw: Object, kubectl: FakeKubectl
) -> None:
    config_map = log_reader_map(raw)
    kubectl.serve(a_job(status=running_status(), **raw["spec"]), config_map)
    assert main(["logs"]) == 0
    (made,) = kubectl.pods
    written = reader_of(config_map)
    assert made["spec"] == written["spec"]
    assert made["metadata"].pop("name").startswith(written["metadata"].pop("generateName"))
    assert made["metadata"] == written["metadata"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("kind", "Deployment"),
        ("spec.initContainers", [{"name": "data", "image": "evil"}]),
        ("spec.hostNetwork", True),
        ("spec.hostPID", True),
        ("spec.hostIPC", True),
        ("spec.nodeName", "control-plane"),
        ("spec.serviceAccountName", "admin"),
        ("spec.automountServiceAccountToken", True),
        ("spec.containers.+", {"name": "data", "image": "evil"}),
        ("spec.volumes.+", {"name": "root", "hostPath": {"path": "/"}}),
        ("spec.volumes.+", {"name": "tmp", "secret": {"secretName": "admins"}}),
        ("spec.volumes.+", {"name": "plan", "configMap": {"name": "others"}}),
        ("spec.imagePullSecrets", [{"name": "others"}]),
        ("spec.securityContext", {}),
        ("spec.securityContext.runAsUser", 0),
        ("spec.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
        ("spec.containers.0.command", ["sh", "-c", "sleep 600"]),
        ("spec.containers.0.args", ["600"]),
        ("spec.containers.0.env.+", {"name": "HTTPS_PROXY", "value": "http://evil"}),
        ("spec.containers.0.envFrom", [{"secretRef": {"name": "admins"}}]),
        ("spec.containers.0.lifecycle", {"postStart": {"exec": {"command": ["sh"]}}}),
        ("spec.containers.0.securityContext", {}),
        ("spec.containers.0.securityContext.privileged", True),
        ("spec.containers.0.securityContext.allowPrivilegeEscalation", True),
        ("spec.containers.0.securityContext.capabilities.add", ["SYS_ADMIN"]),
    ],
)
def test_what_the_operator_never_writes_is_refused(
    path: str, value: Any, kubectl: FakeKubectl, capsys: Capture
) -> None:
    config_map = log_reader_map()
    reader = put(reader_of(config_map), path, value)
    kubectl.serve(a_job(status=running_status()), with_reader(config_map, reader))
    said = no_pod_is_made(kubectl, capsys)
    assert "ConfigMap stamps-5d1ce-placement-2 does not hold the pod that the operator" in said
    begin, context, _ = path.removesuffix(".+").replace(".0", "[0]").partition("securityContext")
    assert f"{LOG_READER_FILE}.{begin}{context}" in said


def test_no_field_means_one_thing_here_and_another_to_kubernetes(kubectl: FakeKubectl) -> None:
    config_map = log_reader_map()
    reader = reader_of(config_map)
    said = reader["spec"].pop("automountServiceAccountToken")
    reader["spec"]["automount_service_account_token"] = said
    kubectl.serve(a_job(status=running_status()), with_reader(config_map, reader))
    assert main(["logs"]) == 0
    (made,) = kubectl.pods
    assert made["spec"] == reader_of(config_map)["spec"]


@pytest.mark.parametrize("reader", ["no pod", [], {}], ids=["text", "list", "empty"])
def test_what_is_no_pod_is_refused(reader: object, kubectl: FakeKubectl, capsys: Capture) -> None:
    kubectl.serve(a_job(status=running_status()), with_reader(log_reader_map(), reader))
    assert "does not hold the pod" in no_pod_is_made(kubectl, capsys)


def test_the_image_is_the_one_that_the_job_names(kubectl: FakeKubectl, capsys: Capture) -> None:
    """Another one would be given the keys of the job's store."""
    config_map = log_reader_map(SAYS_MUCH)
    reader = put(reader_of(config_map), "spec.containers.0.image", "evil")
    job = a_job(status=running_status(), **SAYS_MUCH["spec"])
    kubectl.serve(job, with_reader(config_map, reader))
    assert "'evil' is not podTemplate.dataImage" in no_pod_is_made(kubectl, capsys)


def test_or_else_the_one_that_its_operator_placed_it_with(
    kubectl: FakeKubectl, capsys: Capture
) -> None:
    config_map = log_reader_map()
    (ours,) = reader_of(config_map)["spec"]["containers"]
    placed = {"configMap": "stamps-5d1ce-placement-2", "nodes": 2, "dataImage": ours["image"]}
    job = a_job(status=running_status(placement=placed))
    evil = put(reader_of(config_map), "spec.containers.0.image", "evil")
    kubectl.serve(job, with_reader(config_map, evil))
    assert "'evil' is not status.placement.dataImage" in no_pod_is_made(kubectl, capsys)
    kubectl.serve(job, config_map)
    assert main(["logs"]) == 0
    assert len(kubectl.pods) == 1


@pytest.mark.parametrize(
    "template",
    [
        {"containers": [{"name": "data", "securityContext": {"privileged": True}}]},
        {
            "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
            "containers": [
                {"name": "data", "volumeMounts": [{"name": "root", "mountPath": "/root"}]}
            ],
        },
    ],
    ids=["privileged", "folder-of-the-node"],
)
def test_not_even_the_job_has_an_administrator_make_a_pod_with_more_rights(
    template: Object, kubectl: FakeKubectl, capsys: Capture
) -> None:
    raw = DEMO | {"spec": DEMO["spec"] | {"podTemplate": template}}
    kubectl.serve(a_job(status=running_status(), **raw["spec"]), log_reader_map(raw))
    assert "never a folder of a node or a privilege" in no_pod_is_made(kubectl, capsys)


def test_a_config_map_that_only_has_the_label_is_not_looked_at(kubectl: FakeKubectl) -> None:
    ours = log_reader_map()
    evil = put(reader_of(ours), "spec.containers.0.image", "evil")
    newer = with_reader(ours, evil)
    newer["metadata"] = ours["metadata"] | {"name": "zz", "creationTimestamp": "2030-01-01"}
    kubectl.serve(a_job(status=running_status()), ours, newer)
    assert main(["logs"]) == 0
    (made,) = kubectl.pods
    assert made["spec"] == reader_of(ours)["spec"]


@pytest.mark.parametrize("change", [{"controller": False}, {"uid": "another"}], ids=str)
def test_a_config_map_that_the_job_does_not_control_is_refused(
    change: Object, kubectl: FakeKubectl, capsys: Capture
) -> None:
    config_map = log_reader_map()
    config_map["metadata"]["ownerReferences"][0].update(change)
    kubectl.serve(a_job(status=running_status()), config_map)
    assert "metadata.ownerReferences" in no_pod_is_made(kubectl, capsys)


def test_the_pod_is_made_in_the_jobs_namespace_with_our_labels_only(kubectl: FakeKubectl) -> None:
    config_map = log_reader_map()
    evil = {"generateName": "x", "namespace": "kube-system", "annotations": {"a": "b"}}
    reader = put(reader_of(config_map), "metadata", evil)
    kubectl.serve(a_job(status=running_status()), with_reader(config_map, reader))
    assert main(["logs"]) == 0
    (made,) = kubectl.pods
    assert made["metadata"].keys() == {"name", "namespace", "labels", "ownerReferences"}
    assert made["metadata"]["namespace"] == "train"
    assert made["metadata"]["labels"] == {LABEL_JOB: "stamps", LABEL_LOG_READER: UID}


def test_the_attempt_before_has_one_where_the_newest_is_not_placed(kubectl: FakeKubectl) -> None:
    status = running_status(attempt=3)
    del status["placement"]
    kubectl.serve(a_job(status=status), log_reader_map(attempt=2))
    assert main(["logs"]) == 0
    assert len(kubectl.pods) == 1
