"""What the pods of an attempt need, and what is read back from ConfigMaps."""

import base64
import hashlib
import json
from typing import Any

import pytest

from omni_contract.names import PLACEMENT_FILE
from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.plan import JobPlan
from omni_operator.render.names import ObjectNames
from omni_operator.render.objects import (
    read_placement,
    read_plan,
    render_objects,
    render_placement,
    render_plan,
)
from tests.contract.jobs import DEMO
from tests.operator.rendering import UID, job_state, place_on, plan_of

JOB, PLAN = job_state(DEMO), plan_of(DEMO)
OBJECTS = render_objects(JOB, PLAN)
ALL = (
    *OBJECTS.applied,
    OBJECTS.role_binding,
    *OBJECTS.created,
    render_placement(JOB, place_on(JOB, PLAN)),
)
LIMIT_BYTES = 2**20


def num_bytes(config_map: dict[str, Any]) -> int:
    return sum(len(base64.b64decode(piece)) for piece in config_map["binaryData"].values())


@pytest.mark.parametrize("body", ALL, ids=lambda body: body["kind"])
def test_c38_the_garbage_collector_deletes_everything_with_the_job(body: dict[str, Any]) -> None:
    """Without blockOwnerDeletion and finalizers nothing waits for the operator."""
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert "blockOwnerDeletion" not in owner
    assert "finalizers" not in body["metadata"]
    assert body["metadata"]["namespace"] == "team"


def test_a_plan_comes_back_from_its_config_map() -> None:
    assert read_plan(OBJECTS.plan) == PLAN
    assert OBJECTS.plan["metadata"]["name"].endswith(PLAN.hash)


def test_a_plan_of_an_older_operator_is_found_under_its_name() -> None:
    """Else an upgrade would restart the job: its plan would count as lost."""
    document = json.loads(PLAN.to_json())
    del document["spec"]["podTemplate"]["dataImage"]
    old = JobPlan.parse(json.dumps(document))
    body = render_plan(JOB, old)
    assert read_plan(body).hash == old.hash != PLAN.hash
    assert body["metadata"]["name"].endswith(old.hash)


def test_a_placement_comes_back_from_its_config_map() -> None:
    placement = place_on(JOB, PLAN, spares=1, node_selector={"pool": "a"}, units=((0, 1),))
    assert read_placement(render_placement(JOB, placement)) == placement


def test_the_same_plan_is_the_same_config_map() -> None:
    """A plan that is there already can be taken as it is."""
    assert render_plan(JOB, PLAN) == render_plan(job_state(DEMO), plan_of(DEMO))


def test_c37_the_placement_of_the_largest_job_fits_one_config_map() -> None:
    """10,000 nodes with names no compression helps against, seven levels of topology."""

    def name(what: object) -> str:
        return hashlib.sha256(str(what).encode()).hexdigest()[:20]

    paths = [
        tuple(name((level, i // 4**level)) for level in range(7, 0, -1)) for i in range(10_000)
    ]
    pods = tuple(
        PlacedPod(name=ObjectNames.of(JOB).pod(born=1, index=i), node=name(i), born=1, path=path)
        for i, path in enumerate(paths)
    )
    placement = JobPlacement(attempt=1, plan_hash=PLAN.hash, pods=pods)
    config_map = render_placement(JOB, placement)
    assert num_bytes(config_map) < LIMIT_BYTES
    assert read_placement(config_map) == placement


@pytest.mark.parametrize(
    "data",
    [
        {},
        {f"{PLACEMENT_FILE}.gz.000": "bm8gZ3ppcA=="},
        {f"{PLACEMENT_FILE}.gz.000": "not base64"},
        {f"{PLACEMENT_FILE}.gz.000": "H4sIAAAAAAAA"},
    ],
    ids=["nothing", "no gzip", "no base64", "cut short"],
)
def test_a_broken_config_map_is_named(data: dict[str, str]) -> None:
    config_map = render_placement(JOB, place_on(JOB, PLAN)) | {"binaryData": data}
    with pytest.raises(ValueError, match=rf"ConfigMap {config_map['metadata']['name']}: .*delete"):
        read_placement(config_map)


def test_a_placement_of_another_version_is_refused() -> None:
    newer = place_on(JOB, PLAN).model_copy(update={"version": 2})
    with pytest.raises(ValueError, match="version"):
        read_placement(render_placement(JOB, newer))


def test_rank_0_may_touch_its_lease_only() -> None:
    (rule,) = OBJECTS.role["rules"]
    assert rule["resourceNames"] == [OBJECTS.lease["metadata"]["name"]]
    assert rule["verbs"] == ["get", "patch"]
    assert OBJECTS.role_binding["roleRef"]["name"] == OBJECTS.role["metadata"]["name"]
    (subject,) = OBJECTS.role_binding["subjects"]
    assert subject["name"] == OBJECTS.service_account["metadata"]["name"]


def test_pods_find_each_other_before_they_are_ready() -> None:
    spec = OBJECTS.service["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
