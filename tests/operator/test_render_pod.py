"""The pod of one node, and what a user's template does to it."""

from dataclasses import replace
from typing import Any

import pytest

from omni_contract.names import (
    DATA_CONTAINER,
    ENV_JOB_UID,
    ENV_LEASE,
    LABEL_JOB,
    LEASE_TOKEN_DIR,
    PLAN_DIR,
    SIDECAR_SOCKET,
    TRAINER_CONTAINER,
)
from omni_contract.records import History
from omni_operator.render.pod import render_pod, render_template
from omni_operator.settings import Settings
from tests.contract.jobs import DEMO, changed
from tests.operator.rendering import SETTINGS, UID, job_state, place_on, plan_of, with_template

GPU = "nvidia.com/gpu"
TWO_IMAGES = Settings(
    image="trainer:1",
    image_pull_policy="Never",
    data_image="data:1",
    data_image_pull_policy="Always",
)


def rendered(
    raw: dict[str, Any],
    index: int = 1,
    *,
    attempt: int = 1,
    settings: Settings = SETTINGS,
    **rest: Any,
) -> dict[str, Any]:
    """A pod of a job with two nodes and a spare."""
    job, plan = job_state(raw), plan_of(raw)
    placement = place_on(job, plan, attempt=attempt, spares=1, **rest)
    return render_pod(job, plan, placement, index, settings, History())


def of(template: dict[str, Any], *, device: str = "auto") -> dict[str, Any]:
    spec: dict[str, Any] = rendered(with_template(template, device=device))["spec"]
    return spec


def trainer(spec: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in spec["containers"] if c["name"] == TRAINER_CONTAINER)


def data(spec: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in spec["initContainers"] if c["name"] == DATA_CONTAINER)


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({item["name"] for item in items}) == len(items)
    return {item["name"]: item for item in items}


def test_from_attempt_to_attempt_only_annotations_and_the_name_change() -> None:
    """A pod that lives on cannot get a new environment, so no pod has anything of one attempt."""
    first, second = (rendered(DEMO, attempt=attempt)["spec"] for attempt in (1, 2))
    assert first.pop("hostname") != second.pop("hostname")
    assert first == second


@pytest.mark.parametrize(("index", "has"), [(0, True), (1, False), (2, True)])
def test_only_pods_that_may_hold_rank_0_have_a_token(index: int, has: bool) -> None:
    spec = rendered(DEMO, index)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert ("serviceAccountName" in spec) is has
    assert (ENV_LEASE in by_name(trainer(spec)["env"])) is has
    assert (LEASE_TOKEN_DIR in [m["mountPath"] for m in trainer(spec)["volumeMounts"]]) is has
    assert LEASE_TOKEN_DIR not in [m["mountPath"] for m in data(spec)["volumeMounts"]]
    assert ("token" in by_name(spec["volumes"])) is has


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_trainer_knows_its_jobs_uid(index: int) -> None:
    """Storage tells jobs apart by it: one created anew has the name and attempts of the old one."""
    env = by_name(trainer(rendered(DEMO, index)["spec"])["env"])
    assert env[ENV_JOB_UID]["value"] == UID


def test_a_data_service_is_ready_once_its_socket_is_there_and_holds_up_nobody() -> None:
    container = data(rendered(DEMO, 1)["spec"])
    assert container["restartPolicy"] == "Always"
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-S", SIDECAR_SOCKET]
    assert "startupProbe" not in container


def test_a_spare_is_ready_without_a_socket_whatever_the_user_says_of_the_probe() -> None:
    template = {"containers": [{"name": "data", "readinessProbe": {"periodSeconds": 9}}]}
    assert data(of(template))["readinessProbe"]["periodSeconds"] == 9
    assert "readinessProbe" not in data(rendered(with_template(template), 2)["spec"])


@pytest.mark.parametrize("index", [0, 1, 2])
def test_nothing_but_the_operator_restarts_a_pod(index: int) -> None:
    spec = rendered(DEMO, index)["spec"]
    assert spec["restartPolicy"] == "Never"
    assert "livenessProbe" not in trainer(spec)
    assert "livenessProbe" not in data(spec)
    for_ever = {t["key"] for t in spec["tolerations"] if "tolerationSeconds" not in t}
    assert {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"} <= for_ever


def test_each_rank_gets_a_gpu_unless_the_job_runs_on_the_cpu() -> None:
    spec = of({})
    assert trainer(spec)["resources"]["limits"] == {GPU: "2"}
    assert GPU in {t["key"] for t in spec["tolerations"]}
    assert "shm" in by_name(spec["volumes"])
    spec = of({}, device="cpu")
    assert "limits" not in trainer(spec)["resources"]
    assert GPU not in {t["key"] for t in spec["tolerations"]}
    assert "shm" not in by_name(spec["volumes"])
    assert "limits" not in data(spec)["resources"]


def test_both_containers_get_the_credentials() -> None:
    spec = rendered(changed("spec.storage", {"credentialsSecret": "omni-s3"}))["spec"]
    for container in (trainer(spec), data(spec)):
        assert container["envFrom"] == [{"secretRef": {"name": "omni-s3"}}]
    assert "envFrom" not in trainer(rendered(DEMO)["spec"])


def images(template: dict[str, Any], settings: Settings) -> tuple[str, str]:
    spec = rendered(with_template(template), settings=settings)["spec"]
    return trainer(spec)["image"], data(spec)["image"]


def test_the_images_of_the_job_go_before_the_operators() -> None:
    assert images({}, TWO_IMAGES) == ("trainer:1", "data:1")
    # A trainer of the user's own need not hold the data service.
    assert images({"image": "mine:2"}, TWO_IMAGES) == ("mine:2", "data:1")
    assert images({"dataImage": "mine:3"}, TWO_IMAGES) == ("trainer:1", "mine:3")
    assert images({"image": "mine:2", "dataImage": "mine:3"}, TWO_IMAGES) == ("mine:2", "mine:3")
    assert of({"imagePullSecrets": ["a"]})["imagePullSecrets"] == [{"name": "a"}]


def test_an_operator_with_one_image_runs_both_containers_from_it() -> None:
    assert images({}, Settings(image="both:1")) == ("both:1", "both:1")
    assert images({"image": "mine:2"}, Settings(image="both:1")) == ("mine:2", "both:1")


def test_each_image_has_its_pull_policy() -> None:
    def policies(settings: Settings) -> tuple[str, str]:
        spec = rendered(DEMO, settings=settings)["spec"]
        return trainer(spec)["imagePullPolicy"], data(spec)["imagePullPolicy"]

    assert policies(TWO_IMAGES) == ("Never", "Always")
    one = replace(TWO_IMAGES, data_image_pull_policy=None)
    assert policies(one) == ("Never", "Never")


def test_a_quota_system_is_told_both_images() -> None:
    raw = with_template({})
    pod = render_template(job_state(raw), plan_of(raw).spec, TWO_IMAGES)["spec"]
    assert (trainer(pod)["image"], data(pod)["image"]) == ("trainer:1", "data:1")


def test_labels_and_annotations_are_added_to_ours() -> None:
    template = {"labels": {"team": "vision"}, "annotations": {"note": "x"}}
    meta = rendered(with_template(template))["metadata"]
    assert meta["labels"]["team"] == "vision"
    assert meta["labels"][LABEL_JOB] == "stamps"
    assert meta["annotations"]["note"] == "x"
    assert meta["annotations"]["megascale-omni.dev/attempt"] == "1"


def test_selectors_of_job_and_queue_add_up() -> None:
    raw = with_template({"nodeSelector": {"pool": "a", "disk": "ssd"}})
    selector = rendered(raw, node_selector={"pool": "b"})["spec"]["nodeSelector"]
    assert selector == {"kubernetes.io/os": "linux", "pool": "b", "disk": "ssd"}


def test_env_merges_by_name_and_mounts_by_path() -> None:
    secret = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    template = {
        "env": {"HOME": "/home", "KEY": "plain"},
        "volumes": [
            {"name": "tmp", "emptyDir": {"sizeLimit": "9Gi"}},
            {"name": "w", "emptyDir": {}},
        ],
        "volumeMounts": [{"name": "w", "mountPath": "/w"}, {"name": "w", "mountPath": "/tmp"}],
        "containers": [{"name": "trainer", "env": [secret]}, {"name": "data", "env": [secret]}],
    }
    spec = of(template)
    env = by_name(trainer(spec)["env"])
    assert env["HOME"]["value"] == "/home"
    assert env["KEY"] == secret
    assert by_name(data(spec)["env"])["HOME"]["value"] == "/tmp"
    assert by_name(spec["volumes"])["tmp"]["emptyDir"] == {"sizeLimit": "9Gi"}
    mounts = {m["mountPath"]: m["name"] for m in trainer(spec)["volumeMounts"]}
    assert len(mounts) == len(trainer(spec)["volumeMounts"])
    assert (mounts["/w"], mounts["/tmp"], mounts[PLAN_DIR]) == ("w", "w", "plan")


def test_other_containers_are_added_as_they_are() -> None:
    other = {"name": "tensorboard", "image": "tb", "command": ["tb"]}
    spec = of({"containers": [other]})
    assert [c["name"] for c in spec["containers"]] == [TRAINER_CONTAINER, "tensorboard"]
    assert spec["containers"][1] == other


def test_tolerations_are_appended() -> None:
    mine = {"key": "mine", "operator": "Exists"}
    assert of({"tolerations": [mine]})["tolerations"][-1] == mine
    assert len(of({"tolerations": [mine]})["tolerations"]) == len(of({})["tolerations"]) + 1


def test_a_limit_without_a_request_takes_ours_along() -> None:
    """Our request may be above the user's limit, which the API refuses."""
    container = {"name": "trainer", "resources": {"limits": {"cpu": "100m"}}}
    resources = trainer(of({"containers": [container]}))["resources"]
    assert resources["limits"] == {"cpu": "100m", GPU: "2"}
    assert set(resources["requests"]) == {"memory"}
    container = {"name": "data", "resources": {"requests": {"cpu": "4"}}}
    resources = data(of({"containers": [container]}))["resources"]
    assert resources == {"requests": {"cpu": "4", "memory": "1Gi"}}


def test_security_context_is_merged() -> None:
    template = {
        "securityContext": {"runAsUser": 1000},
        "containers": [
            {"name": "trainer", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
        ],
    }
    spec = of(template)
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["runAsNonRoot"] is True
    capabilities = [c["securityContext"]["capabilities"] for c in (trainer(spec), data(spec))]
    assert capabilities == [{"drop": ["ALL"], "add": ["IPC_LOCK"]}, {"drop": ["ALL"]}]


def test_a_container_named_twice_is_merged_twice() -> None:
    """Nothing that a user says is left out without a word."""
    first = {"name": "trainer", "env": [{"name": "A", "value": "1"}]}
    second = {"name": "trainer", "env": [{"name": "B", "value": "2"}]}
    assert {"A", "B"} <= set(by_name(trainer(of({"containers": [first, second]}))["env"]))


ANYTHING: list[Any] = [
    None, True, 0, -1.5, "", "text", [], [1], [[]], [{}], ["a"], {}, {"a": 1}, [{"name": {}}],
]  # fmt: skip


@pytest.mark.parametrize(
    "field",
    ["env", "ports", "envFrom", "volumeMounts", "resources", "securityContext", "readinessProbe"],
)
def test_whatever_json_a_template_holds_is_left_to_the_api_server(field: str) -> None:
    """The schema lets pod parts through unread; one job's nonsense must not stop the operator."""
    usual = {"resources": {"limits": {"cpu": "1"}}, "env": [{"name": "A", "value": "b"}]}
    for value in ANYTHING:
        for inner in ({field: value}, {"resources": {"limits": value, "requests": value}}):
            containers = [
                {"name": name, **said}
                for name in ("trainer", "data")
                for said in (inner, usual, inner)
            ]
            assert trainer(of({"containers": containers}))["command"]
        of({"volumes": [{"name": value}], "tolerations": [{"key": value}]})
        of({"volumeMounts": [{"mountPath": value}], "securityContext": {"runAsUser": value}})


def test_a_template_of_one_pod_leaves_those_rendered_later_alone() -> None:
    before = of({})
    of({"containers": [{"name": "trainer", "securityContext": {"capabilities": {"drop": ["X"]}}}]})
    assert of({}) == before
