"""Random walks: faults, people and crashes in any order; what must hold holds at every event."""

import random
from collections import defaultdict
from typing import Any

import pytest

from omni_contract.names import ANNOTATION_INDEX, ANNOTATION_NODE
from omni_contract.status import JobStatus
from omni_operator.api import Raw
from omni_operator.kinds import JOB, NODE, POD, Kind
from tests.fakes.fake_cluster import Killed
from tests.house.operations_page import reasons_by_condition
from tests.operator.world import GPU, World, job

NODES = [f"n{i}" for i in range(9)]
JOBS = {"a": 4, "b": 4, "c": 2}
EXPLAINED = reasons_by_condition()
"""By docs/operations.md."""
PATIENT = {
    "limit": 10_000, "infrastructureLimit": 100_000, "noProgressLimit": 1000,
    "hangAfterSeconds": 300, "startAfterSeconds": 300, "readyAfterSeconds": 120,
}  # fmt: skip


class Watchman:
    """Sees every change of the cluster as it happens and holds it to the invariants."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._statuses: dict[str, JobStatus] = {}
        self._unready_since: dict[str, float] = {}
        self.num_seen = 0

    def see(self, event: str, kind: Kind, raw: Raw) -> None:
        self.num_seen += 1
        if kind is NODE:
            self._see_node(raw)
        elif kind is JOB and event != "DELETED":
            self._see_job(raw)
        elif kind is POD and event == "MODIFIED":
            self._see_pods(raw)

    def _see_node(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        ready = all(c["status"] == "True" for c in raw["status"]["conditions"])
        if ready:
            self._unready_since.pop(name, None)
        else:
            self._unready_since.setdefault(name, self._world.cluster.now_s)

    def _is_lost(self, name: str | None) -> bool:
        since_s = self._unready_since.get(name or "")
        return since_s is not None and self._world.cluster.now_s - since_s >= 30

    def _see_job(self, raw: Raw) -> None:
        name = raw["metadata"]["name"]
        new = JobStatus.model_validate(raw.get("status") or {})
        old = self._statuses.get(name)
        self._statuses[name] = new
        if old is None:
            return
        assert (new.attempt, new.generation) >= (old.attempt, old.generation), name
        assert new.restarts >= old.restarts, name
        assert new.budget.user >= old.budget.user, name
        assert new.budget.infrastructure >= old.budget.infrastructure, name
        assert new.budget.highest_step >= old.budget.highest_step, name
        assert new.restarts - old.restarts <= new.attempt - old.attempt, name
        for end in ("Completed", "Failed"):
            assert new.holds(end) or not old.holds(end), name
        for condition in new.conditions:
            assert condition.reason in EXPLAINED[condition.type], condition

    def _see_pods(self, changed: Raw) -> None:
        """Never two ungated live pods of an index, unless the older one's node is lost; never two
        jobs of ours on the GPUs of one."""
        refs = changed["metadata"].get("ownerReferences")
        if not refs or _is_gated(changed) or _is_over(changed):
            return
        for raw in self._world.cluster.objects(POD):
            owner = raw["metadata"].get("ownerReferences")
            is_same = raw["metadata"]["uid"] == changed["metadata"]["uid"]
            if is_same or not owner or _is_gated(raw) or _is_over(raw):
                continue
            where = raw["spec"].get("nodeName") or raw["metadata"]["annotations"][ANNOTATION_NODE]
            mine = changed["spec"].get("nodeName")
            if self._is_lost(where) or self._is_lost(mine):
                continue
            if owner[0]["uid"] == refs[0]["uid"]:
                indices = [p["metadata"]["annotations"][ANNOTATION_INDEX] for p in (raw, changed)]
                assert indices[0] != indices[1] or not indices[0], (raw, changed)
            else:
                planned = mine or changed["metadata"]["annotations"][ANNOTATION_NODE]
                assert where != planned, (raw["metadata"]["name"], changed["metadata"]["name"])


def _is_gated(pod: Raw) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


def _is_over(pod: Raw) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


class Walk:
    """One random walk."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.random = random.Random(seed)
        self.steps: defaultdict[str, int] = defaultdict(int)
        self.deaths = 0

    def live(self, seconds: float) -> None:
        """Let time pass; whoever is killed is started again."""
        try:
            self.world.pass_s(seconds)
        except Killed:
            self.deaths += 1
            self.world.restart()

    def step(self) -> None:
        """Something happens."""
        name = self.random.choice(list(JOBS))
        act = self.random.choice(
            [
                self._fail_pod, self._delete_pod, self._force_pod, self._kill_node,
                self._revive_node, self._suspend, self._resume, self._resume, self._ask,
                self._steal, self._give_back, self._train, self._train, self._train,
                self._kill_operator, self._restart_operator, self._overlap, self._lag,
                self._cordon,
            ]
        )  # fmt: skip
        act(name)
        self.live(self.random.choice([0, 1, 3, 10, 40]))

    def finish(self) -> None:
        """Faults stop, and every job comes to its end."""
        self.world.cluster.revive()
        self.world.lags = lambda kind: False
        for each in NODES:
            self.world.revive_node(each)
            self.world.cluster.change(
                NODE, each, lambda raw: raw["spec"].update(unschedulable=False)
            )
        for raw in self.world.cluster.objects(POD):
            if not raw["metadata"].get("ownerReferences"):
                self.world.cluster.remove(POD, raw["metadata"]["name"])
        for name in JOBS:
            self._resume(name)
        for _ in range(60):
            self.live(30)
            for name in JOBS:
                if self.world.status(name).phase == "Running":
                    self.world.beat(name, step=123, phase="done", **self._kept(name))
                    self.world.complete(name)
        for name in JOBS:
            assert self.world.status(name).phase == "Completed", self.world.status(name)
        assert self.world.pods_of_all() == []

    def _pods(self, name: str) -> list[Raw]:
        return [pod for pod in self.world.pods(name) if pod["status"]["phase"] == "Running"]

    def _fail_pod(self, name: str) -> None:
        if pods := self._pods(name):
            pod = self.random.choice(pods)["metadata"]["name"]
            self.world.cluster.end_container(
                pod, exit_code=self.random.choice([1, 137]), reason=None
            )

    def _delete_pod(self, name: str) -> None:
        if pods := self.world.pods(name):
            pod = self.random.choice(pods)

            def mark(raw: dict[str, Any]) -> None:
                raw["metadata"].setdefault("deletionTimestamp", "2027-01-15T08:00:00Z")

            self.world.cluster.change(POD, pod["metadata"]["name"], mark)

    def _force_pod(self, name: str) -> None:
        if pods := self.world.pods(name):
            self.world.cluster.remove(POD, self.random.choice(pods)["metadata"]["name"])

    def _kill_node(self, name: str) -> None:
        if len(self.world.cluster.dead_nodes) < 3:
            self.world.kill_node(self.random.choice(NODES))

    def _revive_node(self, name: str) -> None:
        if dead := sorted(self.world.cluster.dead_nodes):
            self.world.revive_node(self.random.choice(dead))

    def _cordon(self, name: str) -> None:
        value = self.random.random() < 0.5
        self.world.cluster.change(
            NODE, self.random.choice(NODES), lambda raw: raw["spec"].update(unschedulable=value)
        )

    def _suspend(self, name: str) -> None:
        self.world.edit(name, lambda raw: raw["spec"].update(suspend=True))

    def _resume(self, name: str) -> None:
        self.world.edit(name, lambda raw: raw["spec"].update(suspend=False))

    def _ask(self, name: str) -> None:
        value = str(self.random.random())
        self.world.edit(
            name,
            lambda raw: raw["metadata"].update(annotations={"megascale-omni.dev/restart": value}),
        )

    def _steal(self, name: str) -> None:
        on = self.random.choice(NODES)
        held = [pod for pod in self.world.cluster.objects(POD) if pod["spec"].get("nodeName") == on]
        if not held:
            body = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": f"thief-{self.random.random()}", "namespace": "other"},
                "spec": {
                    "nodeName": on,
                    "containers": [{"name": "c", "resources": {"requests": {GPU: "2"}}}],
                },
                "status": {"phase": "Running"},
            }
            self.world.cluster.put(body)

    def _give_back(self, name: str) -> None:
        foreign = [
            raw["metadata"]["name"]
            for raw in self.world.cluster.objects(POD)
            if not raw["metadata"].get("ownerReferences")
        ]
        if foreign:
            self.world.cluster.remove(POD, self.random.choice(foreign))

    def _train(self, name: str) -> None:
        if self.world.status(name).phase == "Running":
            self.steps[name] += 1
            self.world.beat(name, step=self.steps[name], **self._kept(name))

    def _kept(self, name: str) -> dict[str, Any]:
        budget = self.world.status(name).budget
        return {
            "history": {
                "user_restarts": budget.user,
                "infrastructure_restarts": budget.infrastructure,
                "restarts_without_progress": budget.without_progress,
                "highest_step": budget.highest_step,
            }
        }

    def _kill_operator(self, name: str) -> None:
        self.world.cluster.kill_after(self.random.randint(1, 8))

    def _restart_operator(self, name: str) -> None:
        self.world.restart()

    def _overlap(self, name: str) -> None:
        """An operator that lost its lead goes on for a while with what it saw last."""
        before = self.world.reconciler
        keys = self.world.view.keys()
        self.world.restart()
        for _ in range(self.random.randint(1, 4)):
            self.live(self.random.choice([0, 0, 2]))
            for key in keys:
                try:
                    self.world.run(before.reconcile(key))
                except Killed:
                    self.world.restart()
                    return

    def _lag(self, name: str) -> None:
        share = self.random.choice([0.0, 0.0, 0.5, 0.9])
        self.world.lags = lambda kind: self.random.random() < share


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_the_invariants_hold_and_jobs_end_once_it_stops(seed: int) -> None:
    with World(nodes=len(NODES)) as world:
        watchman = Watchman(world)
        world.cluster.watch(watchman.see)
        for name, nodes in JOBS.items():
            world.apply(job(name, nodes=nodes, restart=PATIENT))
        walk = Walk(world, seed)
        for _ in range(60):
            walk.step()
        walk.finish()
        assert watchman.num_seen > 100
