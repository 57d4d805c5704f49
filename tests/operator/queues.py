"""Kueue, as tests play it, and a job that it admitted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omni_contract.status import write_time
from omni_operator.api import Raw
from omni_operator.kinds import JOB, PRIORITY_CLASS, RESOURCE_FLAVOR, WORKLOAD
from tests.operator.world import SETTINGS, World, job

WITH_KUEUE = replace(SETTINGS, with_kueue=True, priority_class="standard")


class Queues:
    """Kueue, as tests play it."""

    def __init__(self, world: World) -> None:
        self.world = world
        for name, value in (("standard", 0), ("urgent", 1000)):
            kind = {"apiVersion": PRIORITY_CLASS.api_version, "kind": PRIORITY_CLASS.kind}
            world.cluster.put({**kind, "metadata": {"name": name}, "value": value})

    def add_flavor(self, name: str, **spec: Any) -> None:
        kind = {"apiVersion": RESOURCE_FLAVOR.api_version, "kind": RESOURCE_FLAVOR.kind}
        self.world.cluster.put({**kind, "metadata": {"name": name}, "spec": spec})

    def workload(self, name: str = "stamps") -> Raw:
        """Of a job."""
        owner = self.world.cluster.find(JOB, name)["metadata"]["uid"]
        (found,) = [
            raw
            for raw in self.world.cluster.objects(WORKLOAD)
            if raw["metadata"]["ownerReferences"][0]["uid"] == owner
        ]
        return found

    def told(self, type_: str, name: str = "stamps") -> tuple[str, str]:
        """Status and reason of a condition of a Workload."""
        for one in self.workload(name).get("status", {}).get("conditions", []):
            if one["type"] == type_:
                return one["status"], one["reason"]
        return "", ""

    def say(self, name: str = "stamps", *told: tuple[str, bool, str, str]) -> None:
        """Set conditions: type, whether it holds, reason, message."""

        def change(raw: dict[str, Any]) -> None:
            status = raw.setdefault("status", {})
            kept = {one["type"]: one for one in status.get("conditions", [])}
            for type_, holds, reason, message in told:
                kept[type_] = {
                    "type": type_,
                    "status": str(holds),
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": write_time(self.world.cluster.now_s),
                }
            status["conditions"] = list(kept.values())

        self.change(change, name)

    def admit(self, *flavors: str, name: str = "stamps") -> None:
        """Give a job its quota."""
        assigned = {f"resource-{flavor}": flavor for flavor in flavors}
        sets = [{"name": "main", "flavors": assigned}]
        admission = {"clusterQueue": "all", "podSetAssignments": sets}
        self.change(lambda raw: raw.setdefault("status", {}).update(admission=admission), name)
        self.say(
            name,
            ("QuotaReserved", True, "QuotaReserved", ""),
            ("Evicted", False, "QuotaReserved", ""),
            ("Admitted", True, "Admitted", ""),
        )

    def evict(self, reason: str = "Preempted", *, message: str = "for another") -> None:
        """Take it back."""
        self.say("stamps", ("Evicted", True, reason, message))

    def change(self, change: Callable[[dict[str, Any]], None], name: str = "stamps") -> None:
        self.world.cluster.change(WORKLOAD, self.workload(name)["metadata"]["name"], change)


def start(world: World, *flavors: str, **spec: Any) -> Queues:
    """A job in a queue that was admitted and runs."""
    queues = Queues(world)
    for flavor in flavors:
        queues.add_flavor(flavor)
    world.apply(job(queueName="team", **spec))
    world.pass_s(2)
    queues.admit(*flavors)
    world.pass_s(5)
    assert world.status().phase == "Running"
    return queues
