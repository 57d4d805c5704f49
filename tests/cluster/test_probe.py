"""What a real API server says about pods with a mistake, before any is made."""

import asyncio
from typing import Any

import pytest

from omni_operator.cluster import Access, Cluster
from omni_operator.decisions.probe import find_refusal
from omni_operator.kinds import POD
from tests.cluster.api import wait_for
from tests.cluster.control_plane import ControlPlane
from tests.operator.rendering import SETTINGS, job_state, with_template

MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    "label": ({"labels": {"team": "a b"}}, "labels", "a valid label must be"),
    "annotation": ({"annotations": {"a b": "c"}}, "annotations", "a b"),
    "env": ({"env": {"A=B": "c"}}, "env.A=B", "environment variable name"),
    "user": ({"securityContext": {"runAsUser": "root"}}, "securityContext.runAsUser", "string"),
    "quantity": (
        {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "64 GB"}}}]},
        "",
        "quantities must match",
    ),
    "volume": (
        {"volumeMounts": [{"name": "cache", "mountPath": "/cache"}]},
        "volumeMounts[0]",
        "Not found",
    ),
    "priority": ({"priorityClassName": "urgent"}, "", "no PriorityClass with name urgent"),
}


@pytest.mark.parametrize(("template", "field", "words"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_in_the_pods_is_told_with_its_field(
    control_plane: ControlPlane,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    template: dict[str, Any],
    field: str,
    words: str,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.admin_kubeconfig))
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for(lambda: control_plane.api.get(account), "a service account")

    async def judge(raw: dict[str, Any]) -> str:
        cluster = Cluster(await Access.find(), max_requests=1)
        try:
            job = job_state(raw, namespace=namespace)
            return await find_refusal(job, None, SETTINGS, cluster)
        finally:
            await cluster.close()

    said = asyncio.run(judge(with_template(template)))
    path = f"spec.podTemplate.{field}".rstrip(".")
    assert said.startswith(f"{path}: the API server refuses")
    assert words in said
    assert asyncio.run(judge(with_template({"labels": {"team": "a"}}))) == ""
    assert control_plane.api.list(f"/api/v1/namespaces/{namespace}/{POD.plural}") == []
