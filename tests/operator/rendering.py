"""A job as the operator sees it, its plan and a placement of its pods, for tests."""

from typing import Any

from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.status import JobStatus
from omni_operator.render.names import ObjectNames
from omni_operator.settings import Settings
from omni_operator.state import JobKey, JobState
from omni_planner.compile import compile_plan
from tests.contract.jobs import changed

UID = "0a1b2c3d-0000-4000-8000-000000000000"
SETTINGS = Settings(image="registry.example/omni:1")


def job_state(raw: dict[str, Any], *, namespace: str = "team", uid: str = UID) -> JobState:
    return JobState(
        key=JobKey(namespace=namespace, name=raw["metadata"]["name"]),
        uid=uid,
        generation=1,
        resource_version="1",
        created_s=0,
        is_deleting=False,
        raw_spec=raw["spec"],
        annotations={},
        status=JobStatus(),
    )


def with_template(template: dict[str, Any], *, device: str = "auto") -> dict[str, Any]:
    """The demo job with this pod template."""
    raw = changed("spec.podTemplate", template)
    raw["spec"]["resources"]["device"] = device
    return raw


def plan_of(raw: dict[str, Any]) -> JobPlan:
    return compile_plan(Job.read(raw))


def place_on(
    job: JobState, plan: JobPlan, *, attempt: int = 1, spares: int = 0, **rest: Any
) -> JobPlacement:
    """Pods born in this attempt on node-0, node-1, ..."""
    names, num_nodes = ObjectNames.of(job), plan.layout.num_nodes
    pods = [
        PlacedPod(name=names.pod(born=attempt, index=i), node=f"node-{i}", born=attempt)
        for i in range(num_nodes + spares)
    ]
    return JobPlacement(
        attempt=attempt,
        plan_hash=plan.hash,
        pods=tuple(pods[:num_nodes]),
        spares=tuple(pods[num_nodes:]),
        **rest,
    )
