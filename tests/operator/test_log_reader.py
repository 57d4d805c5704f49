"""The pod that reads the logs of a job without pods has its keys, and none of its rights."""

import json

import pytest

from omni_contract.log_store import LOG_READER_FILE
from omni_contract.names import LABEL_JOB_UID, LABEL_LOG_READER
from omni_operator.render.log_reader import render_log_reader, with_log_reader
from omni_operator.render.objects import read_placement, render_placement
from omni_operator.settings import Settings
from omni_operator.watch.observe import owner_uid
from tests.contract.jobs import changed
from tests.operator.rendering import SETTINGS, UID, job_state, place_on, plan_of, with_template

RICH = with_template(
    {
        "imagePullSecrets": ["registry"],
        "nodeSelector": {"pool": "a"},
        "volumes": [
            {"name": "ca", "configMap": {"name": "ca"}},
            {"name": "scratch", "persistentVolumeClaim": {"claimName": "scratch"}},
        ],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "containers": [
            {
                "name": "data",
                "env": [{"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"}],
                "volumeMounts": [{"name": "ca", "mountPath": "/ca"}],
                "ports": [{"containerPort": 9999}],
            },
            {"name": "mesh", "image": "mesh:1"},
        ],
    }
)


def test_it_has_what_the_data_service_reads_the_store_with() -> None:
    raw = RICH | {"spec": RICH["spec"] | {"storage": {"credentialsSecret": "omni-s3"}}}
    job, plan = job_state(raw), plan_of(raw)
    pod = render_log_reader(job, plan, place_on(job, plan), SETTINGS)
    (container,) = pod["spec"]["containers"]
    assert container["name"] == "data"
    assert container["envFrom"] == [{"secretRef": {"name": "omni-s3"}}]
    assert {"name": "AWS_CA_BUNDLE", "value": "/ca/ca.crt"} in container["env"]
    assert {m["name"] for m in container["volumeMounts"]} == {"plan", "tmp", "ca"}
    assert {v["name"] for v in pod["spec"]["volumes"]} == {"plan", "tmp", "ca"}
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["spec"]["nodeSelector"]["pool"] == "a"


@pytest.mark.parametrize(
    ("template", "settings", "image", "policy"),
    [
        ({}, Settings(image="all:1"), "all:1", "IfNotPresent"),
        ({}, Settings(image="all:1", data_image="data:1"), "data:1", "IfNotPresent"),
        (
            {"image": "mine:1"},
            Settings(image="all:1", data_image="data:1", data_image_pull_policy="Always"),
            "data:1",
            "Always",
        ),
        ({"dataImage": "mine:1"}, Settings(image="all:1", data_image="data:1"), "mine:1", None),
    ],
    ids=["one-image", "data-image", "own-trainer", "own-data-image"],
)
def test_it_has_the_image_of_the_data_service(
    template: dict[str, str], settings: Settings, image: str, policy: str | None
) -> None:
    raw = with_template(template)
    job, plan = job_state(raw), plan_of(raw)
    (container,) = render_log_reader(job, plan, place_on(job, plan), settings)["spec"]["containers"]
    assert container["image"] == image
    assert policy in (None, container["imagePullPolicy"])


def test_it_is_no_pod_of_the_job_and_holds_no_gpu() -> None:
    """Or the operator would end it, and its Service name it."""
    raw = changed("spec.resources.device", "auto")
    job, plan = job_state(raw), plan_of(raw)
    pod = render_log_reader(job, plan, place_on(job, plan), SETTINGS)
    assert owner_uid(pod) is None
    (owner,) = pod["metadata"]["ownerReferences"]
    assert owner["uid"] == UID  # and still goes with it
    assert LABEL_JOB_UID not in pod["metadata"]["labels"]
    assert pod["metadata"]["labels"][LABEL_LOG_READER] == UID
    assert pod["spec"]["containers"][0]["resources"].keys() == {"requests"}
    assert "schedulingGates" not in pod["spec"] and "serviceAccountName" not in pod["spec"]
    assert "ports" not in pod["spec"]["containers"][0]


def test_it_stands_beside_the_placement() -> None:
    job, plan = job_state(RICH), plan_of(RICH)
    placement = place_on(job, plan)
    config_map = with_log_reader(render_placement(job, placement), job, plan, placement, SETTINGS)
    assert read_placement(config_map) == placement
    pod = json.loads(config_map["data"][LOG_READER_FILE])
    assert pod == render_log_reader(job, plan, placement, SETTINGS)
