"""What a scheduler and kubelets write into a pod."""

from collections.abc import Iterator
from typing import Any

from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER
from omni_operator.api import Raw


def unscheduled(gated: bool) -> list[dict[str, str]]:
    """The conditions of a pod that was just made."""
    if not gated:
        return []
    return [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
        }
    ]


def _set_condition(pod: dict[str, Any], kind: str, status: str, at: str) -> None:
    conditions = [c for c in pod["status"].get("conditions", []) if c["type"] != kind]
    pod["status"]["conditions"] = [
        *conditions, {"type": kind, "status": status, "lastTransitionTime": at},
    ]  # fmt: skip


def bind(pod: dict[str, Any], node: str, at: str) -> None:
    """The scheduler gives a pod its node."""
    pod["spec"]["nodeName"] = node
    _set_condition(pod, "PodScheduled", "True", at)


def _containers(pod: Raw) -> Iterator[tuple[str, str]]:
    for container in pod["spec"].get("initContainers", []):
        yield "initContainerStatuses", container["name"]
    for container in pod["spec"]["containers"]:
        yield "containerStatuses", container["name"]


def start(pod: dict[str, Any], at: str) -> None:
    """All containers run."""
    pod["status"] |= {"phase": "Running", "startTime": at}
    for field, name in _containers(pod):
        pod["status"].setdefault(field, []).append(
            {
                "name": name,
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": at}},
                "lastState": {},
            }
        )
    _set_condition(pod, "Ready", "True", at)


def end(
    pod: dict[str, Any], container: str, *, exit_code: int, reason: str, message: str, at: str
) -> None:
    """A container ended, and with the trainer its pod."""
    ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": at}
    statuses = [
        status
        for field in ("initContainerStatuses", "containerStatuses")
        for status in pod["status"].get(field, [])
    ]
    over = statuses if container == TRAINER_CONTAINER else []
    for status in statuses:
        if status["name"] == container:
            status |= {"ready": False, "started": False, "state": {"terminated": ended}}
        elif status in over and status["name"] == DATA_CONTAINER:
            # A sidecar is ended when the main containers are over.
            calm = {"exitCode": 0, "reason": "Completed", "finishedAt": at}
            status |= {"ready": False, "started": False, "state": {"terminated": calm}}
    if container == TRAINER_CONTAINER:
        pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"
        _set_condition(pod, "Ready", "False", at)
