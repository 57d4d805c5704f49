"""What befalls pods, written into the API as a real kubelet, scheduler or user writes it.

KWOK makes every pod bound to a living node run; what goes wrong comes from here.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tests.cluster.api import Api, ApiError, Object, wait_for
from tests.cluster.kwok import ANNOTATION_STARTS_AFTER, ANNOTATION_TERMINATES_AFTER

NEVER: Final = "100000h"
"""For annotations that say how long something takes."""
_TRIES: Final = 10
_KILLED: Final = 137


class Pods:
    """The pods of one namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, pod: Object) -> Object:
        """Create a pod as it is given."""
        return self._api.create(self._path, pod)

    def get(self, name: str) -> Object:
        """The pod as it is."""
        return self._api.get(f"{self._path}/{name}")

    def list(self, selector: str = "") -> list[Object]:
        """All pods, or those with these labels."""
        return self._api.list(self._path, **({"labelSelector": selector} if selector else {}))

    def exists(self, name: str) -> bool:
        """Whether there is such a pod, terminating or not."""
        return self._api.exists(f"{self._path}/{name}")

    def wait_until_running(self, *names: str, timeout_s: float = 30) -> None:
        """Wait until these pods are Running and Ready."""
        for name in names:
            wait_for(lambda name=name: is_ready(self.get(name)), f"pod {name} Ready", timeout_s)  # type: ignore[misc]

    def wait_until_gone(self, *names: str, timeout_s: float = 30) -> None:
        """Wait until there are no such pods."""
        for name in names:
            wait_for(lambda name=name: not self.exists(name), f"pod {name} gone", timeout_s)  # type: ignore[misc]

    def end_container(
        self,
        name: str,
        *,
        exit_code: int,
        container: str | None = None,
        reason: str | None = None,
        message: str = "",
        sidecar_exit_code: int = 0,
    ) -> None:
        """A main container (the first, if not named) ends: Completed for code 0, else Error.

        `message` is its termination message. With the last main container the sidecars end and the
        pod is Succeeded or Failed. An out-of-memory kill is reason="OOMKilled" with exit code 137.
        """

        def end(pod: Object) -> None:
            status = pod["status"]
            statuses = status["containerStatuses"]
            ended = _by_name(statuses, container or statuses[0]["name"])
            _terminate(ended, exit_code, reason, message)
            codes = [_exit_code(one) for one in statuses]
            if None in codes:
                _set_conditions(pod, {"Ready": "ContainersNotReady"})
                return
            for sidecar in _sidecars(pod):
                _terminate(sidecar, sidecar_exit_code, None, "")
            _finish(pod, "Failed" if any(codes) else "Succeeded")

        self._update(name, end)

    def restart_sidecar(self, name: str, *, container: str, exit_code: int = _KILLED) -> None:
        """A native sidecar ended and was started again by the kubelet; the pod goes on."""

        def restart(pod: Object) -> None:
            sidecar = _by_name(pod["status"]["initContainerStatuses"], container)
            _terminate(sidecar, exit_code, None, "")
            sidecar["lastState"] = sidecar["state"]
            sidecar["state"] = {"running": {"startedAt": now()}}
            sidecar |= {"restartCount": sidecar["restartCount"] + 1, "ready": True, "started": True}
            sidecar["containerID"] = _container_id()

        self._update(name, restart)

    def wait_in_container(
        self, name: str, *, container: str, reason: str, message: str = ""
    ) -> None:
        """A container cannot start: ImagePullBackOff, CreateContainerConfigError, CrashLoopBackOff.

        The pod's node must have `Nodes.freeze_pods`, or KWOK makes the pod run.
        """

        def wait(pod: Object) -> None:
            status = pod["status"]
            status["phase"] = "Pending"
            for kind in ("initContainers", "containers"):
                key = kind.removesuffix("s") + "Statuses"
                status[key] = [
                    _waiting(one, "PodInitializing", "") for one in pod["spec"].get(kind, [])
                ]
                for one in status[key]:
                    if one["name"] == container:
                        one["state"] = {"waiting": {"reason": reason, "message": message}}
            _set_conditions(
                pod, {"Ready": "ContainersNotReady", "ContainersReady": "ContainersNotReady"}
            )

        self._update(name, wait)

    def fail(self, name: str, *, reason: str, message: str = "", disruption: bool = False) -> None:
        """The kubelet fails the whole pod: Evicted, UnexpectedAdmissionError, NodeShutdown, ...

        `disruption` adds the condition of an eviction by the kubelet; its containers were killed.
        """

        def fail(pod: Object) -> None:
            for one in pod["status"].get("containerStatuses", []) + _sidecars(pod):
                _terminate(one, _KILLED, "Error", "")
            if disruption:
                _add_condition(pod, "DisruptionTarget", "True", "TerminationByKubelet", message)
            _finish(pod, "Failed")
            pod["status"] |= {"reason": reason, "message": message}

        self._update(name, fail)

    def evict(self, name: str) -> None:
        """Ask for an eviction, as `kubectl drain` does; a disruption budget may refuse it."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        self._api.create(f"{self._path}/{name}/eviction", eviction)

    def disrupt(self, name: str, *, reason: str, message: str = "") -> None:
        """Mark the pod with DisruptionTarget and delete it: PreemptionByScheduler, and the like."""
        self._update(
            name, lambda pod: _add_condition(pod, "DisruptionTarget", "True", reason, message)
        )
        self.delete(name)

    def delete(self, *names: str, grace_s: int | None = None) -> None:
        """Delete pods as `kubectl delete` does; grace_s=0 is --force."""
        for name in names:
            self._api.delete(f"{self._path}/{name}", grace_s=grace_s)

    def start(self, name: str) -> None:
        """Let a pod start whose ANNOTATION_STARTS_AFTER held it back, if it is still there."""
        self._let_go(name, ANNOTATION_STARTS_AFTER)

    def terminate_slowly(self, name: str, after_s: float) -> None:
        """Once deleted, the pod takes this long to go."""
        self._annotate(name, {ANNOTATION_TERMINATES_AFTER: f"{int(after_s * 1000)}ms"})

    def stick(self, name: str) -> None:
        """Once deleted, the pod stays Terminating until `unstick`, as one that cannot be killed."""
        self._annotate(name, {ANNOTATION_TERMINATES_AFTER: NEVER})

    def unstick(self, name: str) -> None:
        """Undo `stick` and `terminate_slowly`; a pod that is deleted goes at once."""
        self._let_go(name, ANNOTATION_TERMINATES_AFTER)

    def _annotate(self, name: str, annotations: Mapping[str, str | None]) -> None:
        self._api.patch(f"{self._path}/{name}", {"metadata": {"annotations": dict(annotations)}})

    def _let_go(self, name: str, annotation: str) -> None:
        try:
            self._annotate(name, {annotation: None})
        except ApiError as exc:
            if exc.status != 404:
                raise

    def _update(self, name: str, change: Callable[[Object], None]) -> None:
        for left in reversed(range(_TRIES)):
            pod = self.get(name)
            change(pod)
            try:
                self._api.request("PUT", f"{self._path}/{name}/status", pod)
                return
            except ApiError as exc:
                if exc.status != 409 or not left:
                    raise


def is_ready(pod: Object) -> bool:
    """Whether the pod's condition Ready is True and it is not being deleted."""
    return "deletionTimestamp" not in pod["metadata"] and any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod["status"].get("conditions", [])
    )


def now() -> str:
    """The time as a kubelet writes it, in whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _by_name(statuses: Sequence[Object], name: str) -> Object:
    found = [one for one in statuses if one["name"] == name]
    assert found, f"no container {name}; there are {[one['name'] for one in statuses]}"
    return found[0]


def _sidecars(pod: Object) -> list[Object]:
    names = {
        one["name"]
        for one in pod["spec"].get("initContainers", [])
        if one.get("restartPolicy") == "Always"
    }
    return [one for one in pod["status"].get("initContainerStatuses", []) if one["name"] in names]


def _exit_code(status: Object) -> int | None:
    code: int | None = status["state"].get("terminated", {}).get("exitCode")
    return code


def _terminate(status: Object, exit_code: int, reason: str | None, message: str) -> None:
    if _exit_code(status) is not None:
        return
    terminated: dict[str, Any] = {
        "exitCode": exit_code,
        "reason": reason or ("Error" if exit_code else "Completed"),
        "startedAt": status["state"].get("running", {}).get("startedAt"),
        "finishedAt": now(),
        "containerID": status.get("containerID") or _container_id(),
    }
    if message:
        terminated["message"] = message
    status |= {"state": {"terminated": terminated}, "ready": False, "started": False}


def _waiting(container: Object, reason: str, message: str) -> Object:
    waiting = {"reason": reason, **({"message": message} if message else {})}
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": "",
        "ready": False,
        "started": False,
        "restartCount": 0,
        "state": {"waiting": waiting},
    }


def _finish(pod: Object, phase: str) -> None:
    pod["status"]["phase"] = phase
    reason = "PodFailed" if phase == "Failed" else "PodCompleted"
    _set_conditions(pod, {"Ready": reason, "ContainersReady": reason})


def _set_conditions(pod: Object, reasons: Mapping[str, str]) -> None:
    for kind, reason in reasons.items():
        _add_condition(pod, kind, "False", reason, "")


def _add_condition(pod: Object, kind: str, status: str, reason: str, message: str) -> None:
    conditions = pod["status"].setdefault("conditions", [])
    conditions[:] = [one for one in conditions if one["type"] != kind]
    added = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": now()}
    conditions.append(added | ({"message": message} if message else {}))


def _container_id() -> str:
    return f"containerd://{secrets.token_hex(32)}"
