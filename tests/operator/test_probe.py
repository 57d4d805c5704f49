"""The fields that the API server's words about a pod name, as the user typed them."""

import asyncio
from typing import Any

import pytest

from omni_operator.api import Refused
from omni_operator.decisions.probe import find_refusal, probe_pod, typed_fields
from omni_operator.kinds import POD
from tests.fakes.fake_cluster import FakeCluster
from tests.operator.rendering import SETTINGS, job_state, plan_of, with_template

TEMPLATE: dict[str, Any] = {
    "env": {"NCCL DEBUG": "INFO"},
    "volumes": [{"name": "cache", "emptyDir": {}}],
    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "containers": [
        {"name": "logs", "image": "logs:1", "env": [{"name": "A B", "value": ""}]},
        {"name": "trainer", "resources": {"limits": {"cpu": "0.5"}}},
    ],
}


RAW = with_template(TEMPLATE)


@pytest.mark.parametrize(
    ("path", "typed"),
    [
        ("metadata.labels", "spec.podTemplate.labels"),
        ("metadata.annotations.size", "spec.podTemplate.annotations.size"),
        ("spec.imagePullSecrets[0].name", "spec.podTemplate.imagePullSecrets[0].name"),
        ("spec.securityContext.runAsUser", "spec.podTemplate.securityContext.runAsUser"),
        ("spec.tolerations[4].effect", "spec.podTemplate.tolerations"),
        ("spec.volumes[6].name", "spec.podTemplate.volumes"),
        ("spec.containers[0].image", "spec.podTemplate.image"),
        ("spec.initContainers[0].image", "spec.podTemplate.dataImage"),
        ("spec.containers[0].resources.x", "spec.podTemplate.containers[1].resources.x"),
        ("spec.containers[1].env[0].name", "spec.podTemplate.containers[0].env[0].name"),
        ("spec.containers[1].image", "spec.podTemplate.containers[0].image"),
        ("spec.containers.env.value", "spec.podTemplate.containers"),
        ("spec.containers[9].env[0].name", None),
        ("spec.hostname", None),
        ("spec.volumesX", None),
    ],
)  # fmt: skip
def test_a_field_of_the_pod_is_told_as_the_user_typed_it(path: str, typed: str | None) -> None:
    made = plan_of(RAW)
    pod = probe_pod(job_state(RAW), made, SETTINGS)
    found = list(typed_fields(f"Pod is invalid: {path}: Invalid value", pod, made.spec))
    assert found == ([] if typed is None else [typed])


def test_variables_and_mounts_of_the_trainer_are_told_by_their_names() -> None:
    made = plan_of(RAW)
    pod = probe_pod(job_state(RAW), made, SETTINGS)
    trainer = pod["spec"]["containers"][0]
    env = [item["name"] for item in trainer["env"]].index("NCCL DEBUG")
    mount = [item["mountPath"] for item in trainer["volumeMounts"]].index("/cache")
    said = (
        f"[spec.containers[0].env[{env}].name: bad, spec.containers[0].volumeMounts[{mount}]: bad"
    )
    assert list(typed_fields(said, pod, made.spec)) == [
        "spec.podTemplate.env.NCCL DEBUG",
        "spec.podTemplate.volumeMounts[0]",
    ]


def test_what_is_asked_about_needs_nothing_that_is_made_later() -> None:
    pod = probe_pod(job_state(RAW), plan_of(RAW), SETTINGS)
    assert "serviceAccountName" not in pod["spec"]
    assert len(pod["metadata"]["name"]) < 64


def test_a_refusal_without_a_field_names_the_template() -> None:
    cluster = FakeCluster()
    words = "quantities must match the regular expression"
    cluster.refuses = lambda verb, kind, name: Refused(reason="Bad", message=words)
    job = job_state(RAW)
    said = asyncio.run(find_refusal(job, None, SETTINGS, cluster))
    assert said.startswith("spec.podTemplate: ") and said.endswith(words)
    assert cluster.names(POD) == []
    assert asyncio.run(find_refusal(job, plan_of(RAW), SETTINGS, cluster)) == ""
