"""An API server in memory: what `omni_operator.cluster.Cluster` does, with the same refusals.

It has no admission but quotas, no schema, and garbage collection by owner references. `play` stands
in for scheduler and kubelets.
"""

import asyncio
import datetime
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from omni_contract.names import TRAINER_CONTAINER
from omni_operator.api import (
    AlreadyExists,
    Api,
    ApiError,
    Conflict,
    NotFound,
    QuotaExceeded,
    Raw,
    Refused,
)
from omni_operator.kinds import JOB, NODE, POD, Kind, kind_of
from tests.fakes.kubelet import bind, end, start, unscheduled
from tests.fakes.patches import copied, merge, operate

Change = Callable[[dict[str, Any]], None]
Watcher = Callable[[Literal["ADDED", "MODIFIED", "DELETED"], Kind, Raw], None]


class Killed(BaseException):
    """Stands for the end of the operator's process: nothing in it may catch this."""


class FakeCluster(Api):
    """Objects by (plural, namespace, name). `now_s` is the API server's clock; tests move it."""

    def __init__(self, *, now_s: float = 1_800_000_000.0) -> None:
        self.now_s = now_s
        self.writes: list[tuple[str, str, str]] = []
        """(verb, plural, name) of every write that was done, in order."""
        self.reads: list[tuple[str, str, str]] = []
        """(verb, plural, name) of every read; the name of a list is empty."""
        self.dry_runs: list[tuple[str, str]] = []
        """(plural, name) of every object that was only to be judged."""
        self.quotas: dict[str, dict[str, int]] = {}
        """By namespace: most of `pods` and of `requests.RESOURCE`."""
        self.refuses: Callable[[str, Kind, str], ApiError | None] = lambda verb, kind, name: None
        """What a test has the server say instead of doing (verb, kind, name)."""
        self.dead_nodes: set[str] = set()
        """Nodes whose kubelet does nothing more."""
        self._objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._kinds: dict[str, Kind] = {}
        self._watchers: list[Watcher] = []
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)
        self._writes_to_live: int | None = None
        self._is_killed = False

    # What tests see and do; none of it counts as a write of the operator.

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` on every change from now on."""
        self._watchers.append(watcher)

    def kill_after(self, num_writes: int) -> None:
        """Raise Killed right after that many further writes were done, and on every call then."""
        self._writes_to_live = num_writes

    def revive(self) -> None:
        """Let a new process use it."""
        self._writes_to_live, self._is_killed = None, False

    def objects(self, kind: Kind) -> list[Raw]:
        """All objects of a kind, by namespace and name."""
        return [copied(self._objects[at]) for at in sorted(self._objects) if at[0] == kind.plural]

    def names(self, kind: Kind) -> list[str]:
        """Names of all objects of a kind."""
        return [body["metadata"]["name"] for body in self.objects(kind)]

    def find(self, kind: Kind, name: str) -> Raw:
        """The one object of this name, in any namespace."""
        (found,) = [body for body in self.objects(kind) if body["metadata"]["name"] == name]
        return found

    def put(self, body: Raw) -> Raw:
        """Create an object as somebody else."""
        return self._create(kind_of(body), body)

    def change(self, kind: Kind, name: str, change: Change) -> Raw:
        """Change an object in place, as somebody else."""
        at = self._only(kind, name)
        changed = copied(self._objects[at])
        change(changed)
        return self._store(at, changed)

    def remove(self, kind: Kind, name: str) -> None:
        """Take an object out, as somebody else, at once."""
        self._drop(self._only(kind, name))

    def play(self) -> int:
        """Do what scheduler and kubelets do next: bind pods without gates to the node they select,
        start their containers, take away those whose deletion was asked for. Returns the number of
        pods that moved."""
        moved = 0
        for at, pod in [(at, pod) for at, pod in self._objects.items() if at[0] == POD.plural]:
            node = pod["spec"].get("nodeName")
            if node in self.dead_nodes:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._drop(at)
            elif node is None and not pod["spec"].get("schedulingGates"):
                selected = self._node_selected_by(pod)
                if selected is None:
                    continue
                self.change(POD, at[2], lambda pod, node=selected: bind(pod, node, self._time()))  # type: ignore[misc]
            elif node is not None and pod["status"]["phase"] == "Pending":
                self.change(POD, at[2], lambda pod: start(pod, self._time()))
            else:
                continue
            moved += 1
        return moved

    def end_container(
        self,
        pod: str,
        *,
        exit_code: int,
        container: str = TRAINER_CONTAINER,
        message: str = "",
        reason: str | None = None,
    ) -> None:
        """End a container as a kubelet writes it. The pod ends with its trainer."""
        why = reason or ("Completed" if exit_code == 0 else "Error")

        def change(pod: dict[str, Any]) -> None:
            end(pod, container, exit_code=exit_code, reason=why, message=message, at=self._time())

        self.change(POD, pod, change)

    # What the operator does.

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Raw | None:
        await self._begin()
        self.reads.append(("get", kind.plural, name))
        self._refuse("get", kind, name)
        found = self._objects.get(_at(kind, namespace, name))
        return copied(found) if found is not None else None

    async def list(
        self, kind: Kind, namespace: str | None = None, *, label_selector: str | None = None
    ) -> Sequence[Raw]:
        await self._begin()
        self.reads.append(("list", kind.plural, ""))
        self._refuse("list", kind, "")
        return [
            body
            for body in self.objects(kind)
            if namespace in (None, body["metadata"].get("namespace"))
            and _selects(label_selector, body["metadata"].get("labels", {}))
        ]

    async def create(self, kind: Kind, body: Raw, *, dry_run: bool = False) -> Raw:
        await self._begin()
        name = body["metadata"]["name"]
        if dry_run:
            self.dry_runs.append((kind.plural, name))
            self._refuse("dry-run", kind, name)
            return copied(body)
        self._refuse("create", kind, name)
        return self._written("create", kind, self._create(kind, body))

    async def apply(self, body: Raw) -> Raw:
        await self._begin()
        kind, meta = kind_of(body), body["metadata"]
        self._refuse("apply", kind, meta["name"])
        at = _at(kind, meta.get("namespace"), meta["name"])
        old = self._objects.get(at)
        if old is None:
            return self._written("apply", kind, self._create(kind, body))
        merged = copied(old)
        merge(merged, body)
        return self._written("apply", kind, self._store(at, merged) if merged != old else old)

    async def json_patch(
        self, kind: Kind, namespace: str | None, name: str, operations: Sequence[Raw]
    ) -> Raw:
        await self._begin()
        self._refuse("patch", kind, name)
        at = _at(kind, namespace, name)
        old = self._found(at)
        changed = copied(old)
        for operation in operations:
            operate(changed, operation)
        if kind is POD:
            _check_pod_change(old, changed)
        return self._written("patch", kind, self._store(at, changed) if changed != old else old)

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str | None,
        grace_s: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> None:
        await self._begin()
        self._refuse("delete", kind, name)
        at = _at(kind, namespace, name)
        old = self._objects.get(at)
        if old is None or uid not in (None, old["metadata"]["uid"]):
            return
        # An unbound or ended pod has no kubelet that must be waited for.
        is_held = kind is POD and bool(old["spec"].get("nodeName"))
        is_held = is_held and old["status"]["phase"] not in ("Succeeded", "Failed")
        if not is_held or grace_s == 0:
            self._drop(at)
        elif "deletionTimestamp" not in old["metadata"]:
            grace = old["spec"].get("terminationGracePeriodSeconds", 30)
            grace = grace if grace_s is None else grace_s
            marked = copied(old)
            marked["metadata"]["deletionTimestamp"] = _time(self.now_s + grace)
            marked["metadata"]["deletionGracePeriodSeconds"] = grace
            self._store(at, marked)
        self._written("delete", kind, old)

    async def patch_status(
        self, kind: Kind, namespace: str, name: str, status: Raw, *, resource_version: str
    ) -> Raw:
        await self._begin()
        self._refuse("patch_status", kind, name)
        at = _at(kind, namespace, name)
        old = self._found(at)
        _check_version(old, resource_version)
        changed = copied(old)
        merge(changed, {"status": status})
        stored = self._store(at, changed) if changed != old else old
        return self._written("patch_status", kind, stored)

    async def replace(self, kind: Kind, body: Raw) -> Raw:
        await self._begin()
        meta = body["metadata"]
        self._refuse("update", kind, meta["name"])
        at = _at(kind, meta.get("namespace"), meta["name"])
        _check_version(self._found(at), meta["resourceVersion"])
        return self._written("update", kind, self._store(at, copied(dict(body))))

    # Inside.

    async def _begin(self) -> None:
        """Let other tasks run in between, as a real request does."""
        if self._is_killed:
            raise Killed
        await asyncio.sleep(0)
        if self._is_killed:
            raise Killed

    def _written(self, verb: str, kind: Kind, body: Raw) -> Raw:
        self.writes.append((verb, kind.plural, body["metadata"]["name"]))
        if self._writes_to_live is not None:
            self._writes_to_live -= 1
            if self._writes_to_live <= 0:
                self._is_killed = True
                raise Killed
        return copied(body)

    def _refuse(self, verb: str, kind: Kind, name: str) -> None:
        if error := self.refuses(verb, kind, name):
            raise error

    def _create(self, kind: Kind, body: Raw) -> Raw:
        made: dict[str, Any] = copied(dict(body))
        meta = made["metadata"]
        at = _at(kind, meta.get("namespace"), meta["name"])
        if at in self._objects:
            message = f'{kind.plural} "{meta["name"]}" already exists'
            raise AlreadyExists(reason="AlreadyExists", message=message, code=409)
        made |= {"apiVersion": kind.api_version, "kind": kind.kind}
        meta["uid"] = meta.get("uid") or f"{next(self._uids):08x}-0000-4000-8000-000000000000"
        meta["creationTimestamp"] = self._time()
        meta["generation"] = 1
        if kind is POD:
            _default_requests(made)
            gated = bool(made["spec"].get("schedulingGates"))
            made.setdefault("status", {"phase": "Pending", "conditions": unscheduled(gated)})
            self._check_quota(made)
        elif kind is JOB:
            made.setdefault("status", {})
        self._kinds[kind.plural] = kind
        return self._store(at, made, event="ADDED")

    def _check_quota(self, pod: Raw) -> None:
        namespace = pod["metadata"]["namespace"]
        if namespace not in self.quotas:
            return
        pods = [
            other
            for other in self.objects(POD)
            if other["metadata"]["namespace"] == namespace
            and other["status"]["phase"] not in ("Succeeded", "Failed")
        ]
        for name, most in self.quotas[namespace].items():
            asked = _counts_as(pod, name)
            used = sum(_counts_as(other, name) for other in pods)
            if asked and used + asked > most:
                message = (
                    f'pods "{pod["metadata"]["name"]}" is forbidden: exceeded quota: quota, '
                    f"requested: {name}={asked}, used: {name}={used}, limited: {name}={most}"
                )
                raise QuotaExceeded(reason="Forbidden", message=message, code=403)

    def _store(
        self,
        at: tuple[str, str, str],
        body: dict[str, Any],
        event: Literal["ADDED", "MODIFIED"] = "MODIFIED",
    ) -> Raw:
        old = self._objects.get(at)
        if old is not None and old.get("spec") != body.get("spec"):
            body["metadata"]["generation"] = old["metadata"]["generation"] + 1
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[at] = body
        self._tell(event, at, body)
        return copied(body)

    def _drop(self, at: tuple[str, str, str]) -> None:
        body = self._objects.pop(at)
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self._tell("DELETED", at, body)
        for other, dependent in list(self._objects.items()):
            owners = dependent["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == body["metadata"]["uid"] for owner in owners):
                self._drop(other)

    def _tell(
        self,
        event: Literal["ADDED", "MODIFIED", "DELETED"],
        at: tuple[str, str, str],
        body: Raw,
    ) -> None:
        for watcher in self._watchers:
            watcher(event, self._kinds[at[0]], copied(body))

    def _found(self, at: tuple[str, str, str]) -> dict[str, Any]:
        if at not in self._objects:
            raise NotFound(reason="NotFound", message=f'{at[0]} "{at[2]}" not found', code=404)
        return self._objects[at]

    def _only(self, kind: Kind, name: str) -> tuple[str, str, str]:
        (at,) = [at for at in self._objects if (at[0], at[2]) == (kind.plural, name)]
        return at

    def _node_selected_by(self, pod: Raw) -> str | None:
        selector = pod["spec"].get("nodeSelector", {}).items()
        for node in self.objects(NODE):
            labels = {"kubernetes.io/hostname": node["metadata"]["name"]}
            labels |= node["metadata"].get("labels", {})
            if selector <= labels.items() and node["metadata"]["name"] not in self.dead_nodes:
                return str(node["metadata"]["name"])
        return None

    def _time(self) -> str:
        return _time(self.now_s)


def _at(kind: Kind, namespace: str | None, name: str) -> tuple[str, str, str]:
    return (kind.plural, (namespace or "") if kind.is_namespaced else "", name)


def _time(now_s: float) -> str:
    return datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _check_version(old: Raw, version: str) -> None:
    if old["metadata"]["resourceVersion"] != version:
        message = (
            f'Operation cannot be fulfilled on "{old["metadata"]["name"]}": the object has been '
            "modified; please apply your changes to the latest version and try again"
        )
        raise Conflict(reason="Conflict", message=message, code=409)


def _selects(selector: str | None, labels: Mapping[str, str]) -> bool:
    for part in filter(None, (selector or "").split(",")):
        key, is_equal, value = part.partition("=")
        if key not in labels or (is_equal and labels[key] != value):
            return False
    return True


def _check_pod_change(old: Raw, new: Raw) -> None:
    """What a real one refuses: new gates, and a node selector that loses a key or is changed on a
    pod without gates."""
    had = [gate["name"] for gate in old["spec"].get("schedulingGates", [])]
    has = [gate["name"] for gate in new["spec"].get("schedulingGates", [])]
    before, after = (spec["spec"].get("nodeSelector", {}) for spec in (old, new))
    if not set(has) <= set(had) or (
        before != after and (not had or not before.items() <= after.items())
    ):
        message = f'Pod "{old["metadata"]["name"]}" is invalid: spec: Forbidden'
        raise Refused(reason="Invalid", message=message, code=422)


def _default_requests(pod: dict[str, Any]) -> None:
    for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
        if limits := container.get("resources", {}).get("limits"):
            requests = limits | container["resources"].get("requests", {})
            container["resources"]["requests"] = requests


def _counts_as(pod: Raw, quota: str) -> int:
    if quota == "pods":
        return 1
    resource = quota.removeprefix("requests.")
    return sum(
        int(requests[resource])
        for container in pod["spec"]["containers"]
        if resource in (requests := container.get("resources", {}).get("requests", {}))
    )
