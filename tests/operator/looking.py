"""A job of four pods and a spare that runs, as the operator sees it; tests then break it.

Pods are raw objects that `tests.cluster.pods` can break as on a real control plane.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.records import History, JobHeartbeat
from omni_contract.status import Condition, JobStatus, write_time
from omni_operator.faults.detect import find
from omni_operator.render.pod import render_pod
from omni_operator.state import JobState, NodeState, Observed, PodState, Progress, Taint
from omni_operator.status.life import open_attempt, place, release_gang
from omni_operator.status.live import refresh
from omni_operator.watch.observe import read_pod
from tests.cluster.api import Api, ApiError, Object, PatchType
from tests.cluster.pods import Pods, now
from tests.contract.jobs import changed
from tests.operator.rendering import SETTINGS, job_state, place_on, plan_of

NUM_PODS = 4
BEGIN = JobStatus()


def job_file(**restart: Any) -> dict[str, Any]:
    raw = changed("spec.resources", {"nodes": NUM_PODS, "device": "cpu", "spares": 1})
    raw["spec"]["restart"] = restart
    return raw


class HeldApi(Api):
    """The pods of one namespace in memory, behind the little that `Pods` asks of the API."""

    def __init__(self, pods: dict[str, Object]) -> None:
        self.pods = pods

    def get(self, path: str, **_: str) -> Object:
        name = path.rsplit("/", 1)[-1]
        if name not in self.pods:
            raise ApiError("GET", path, 404, "not found")
        return copy.deepcopy(self.pods[name])

    def request(self, method: str, path: str, body: object = None, **_: Any) -> Any:
        assert method == "PUT" and path.endswith("/status") and isinstance(body, dict)
        self.pods[body["metadata"]["name"]] = body
        return body

    def create(self, path: str, body: object) -> Object:
        assert path.endswith("/eviction") and isinstance(body, dict)
        name = body["metadata"]["name"]
        disruption = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
            "lastTransitionTime": now(),
        }
        self.pods[name]["status"]["conditions"].append(disruption)
        self.delete(path.removesuffix("/eviction"))
        return body

    def patch(self, path: str, body: object, *, kind: PatchType = "merge") -> Object:
        raise NotImplementedError

    def delete(self, path: str, *, grace_s: int | None = None) -> None:
        grace_s = 30 if grace_s is None else grace_s
        meta = self.pods[path.rsplit("/", 1)[-1]]["metadata"]
        ends = write_time(time.time() + grace_s).partition(".")[0] + "Z"
        meta |= {"deletionTimestamp": ends, "deletionGracePeriodSeconds": grace_s}


@dataclass
class Scene:
    """What there is to be seen. Everything may be changed before `look`."""

    job: JobState
    plan: JobPlan
    placement: JobPlacement
    raw: dict[str, Object]
    nodes: dict[str, NodeState]
    began_s: float
    progress: Progress | None = None
    strangers: list[PodState] = field(default_factory=list)
    watch_is_healthy: bool = True

    @property
    def pods(self) -> Pods:
        """What can befall the pods."""
        return Pods(HeldApi(self.raw), self.job.key.namespace)

    def name(self, index: int) -> str:
        return self.placement.all_pods[index].name

    def look(self, *, after_s: float = 5, status: JobStatus | None = None) -> Observed:
        """What is observed so long after now."""
        job = self.job if status is None else replace(self.job, status=status)
        return Observed(
            now_s=time.time() + after_s,
            job=job,
            pods=(*(read_pod(pod) for pod in self.raw.values()), *self.strangers),
            placement=self.placement,
            previous=None,
            plan=self.plan,
            progress=self.progress,
            nodes=self.nodes,
            used={},
            occupied={},
            watch_is_healthy=self.watch_is_healthy,
        )

    def change_node(self, index: int, **changes: Any) -> None:
        name = self.placement.all_pods[index].node
        self.nodes[name] = replace(self.nodes[name], **changes)

    def taint_node(self, index: int, key: str, *, value: str = "", effect: Any) -> None:
        taint = Taint(key=key, value=value, effect=effect, since_s=self.began_s)
        self.change_node(index, taints=(taint,))

    def beat(self, *, step: int, stands_s: float = 0, **rest: Any) -> None:
        """A heartbeat of the attempt that was renewed now; its step is so old."""
        now_s = time.time()
        beat = {"attempt": self.placement.attempt, "generation": 0, "phase": "training"} | rest
        self.progress = Progress(
            heartbeat=JobHeartbeat.model_validate(beat | {"step": step}),
            renewed_s=now_s,
            step_since_s=now_s - stands_s,
            fault_since_s=now_s - stands_s,
        )


def running_job(
    *, attempt: int = 1, is_released: bool = True, restart: dict[str, Any] | None = None
) -> Scene:
    """All pods run since a minute."""
    began_s = time.time() - 60
    raw = job_file(**(restart or {}))
    status = JobStatus(attempt=attempt, num_nodes=NUM_PODS, opened_at=write_time(began_s - 5))
    if is_released:
        released = Condition(
            type="GangReady",
            status="True",
            reason="Released",
            message="",
            last_transition_time=write_time(began_s),
        )
        status = status.model_copy(update={"conditions": [released]})
    job = replace(job_state(raw), status=status)
    plan = plan_of(raw)
    placement = place_on(job, plan, attempt=attempt, spares=1)
    pods = {}
    for index, placed in enumerate(placement.all_pods):
        pod = render_pod(job, plan, placement, index, SETTINGS, History())
        pods[placed.name] = _run(copy.deepcopy(pod), placed.node, began_s, is_released=is_released)
    nodes = {placed.node: ready_node(placed.node, began_s) for placed in placement.all_pods}
    return Scene(job=job, plan=plan, placement=placement, raw=pods, nodes=nodes, began_s=began_s)


def opened(scene: Scene, status: JobStatus = BEGIN, **changes: object) -> JobStatus:
    arguments: dict[str, object] = {
        "opened_by": None,
        "plan_hash": scene.plan.hash,
        "num_nodes": NUM_PODS,
    }
    return open_attempt(status, scene.look(), **(arguments | changes))  # type: ignore[arg-type]


def released(scene: Scene) -> JobStatus:
    """Attempt 1 is opened, placed and released."""
    status = place(opened(scene), scene.look(), scene.placement, config_map="p-1")
    return release_gang(status, scene.look())


def look(scene: Scene, status: JobStatus, *, after_s: float = 5) -> JobStatus:
    """One look at the pods."""
    observed = scene.look(after_s=after_s, status=status)
    return refresh(status, observed, scene.plan.spec, find(observed, scene.plan.spec))


def said(status: JobStatus, type_: str) -> tuple[str, str]:
    condition = status.condition(type_)
    assert condition is not None, type_
    return condition.status, condition.reason


def message(status: JobStatus, type_: str) -> str:
    condition = status.condition(type_)
    assert condition is not None, type_
    return condition.message


def ready_node(name: str, since_s: float) -> NodeState:
    return NodeState(
        name=name, uid=name, labels={}, allocatable={}, ready="True", ready_since_s=since_s
    )


def statuses_of(containers: Sequence[Object], began: str) -> list[Object]:
    return [
        {
            "name": container["name"],
            "image": container["image"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": began}},
        }
        for container in containers
    ]


def _run(pod: Object, node: str, began_s: float, *, is_released: bool) -> Object:
    began = write_time(began_s).partition(".")[0] + "Z"
    pod["metadata"] |= {
        "uid": pod["metadata"]["name"],
        "resourceVersion": "1",
        "creationTimestamp": began,
    }
    if not is_released:
        pod["status"] = {"phase": "Pending"}
        return pod
    del pod["spec"]["schedulingGates"]
    pod["spec"]["nodeName"] = node
    pod["status"] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": began}],
        "initContainerStatuses": statuses_of(pod["spec"]["initContainers"], began),
        "containerStatuses": statuses_of(pod["spec"]["containers"], began),
    }
    return pod
