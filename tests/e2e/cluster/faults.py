"""The faults of `make e2e`, as they are done to a job that trains, and what is looked at each time.

Every one returns when the job has recovered from it and what it broke around the job is mended.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_contract.names import DATA_CONTAINER
from tests.cluster.chart import CHART, helm
from tests.e2e.cluster.checks import check_stored_logs
from tests.e2e.cluster.containers import (
    DATA_SERVICE,
    OPERATOR,
    S3_SERVER,
    first_process,
    rank_process,
)
from tests.e2e.cluster.cut_off import cut_off_from_api, cut_off_wholly
from tests.e2e.cluster.play import Play
from tests.e2e.cluster.record import Check, Fault
from tests.e2e.cluster.stage import NAMESPACE, SYSTEM


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """One whose first process is killed."""

    namespace: str
    name: str
    program: str
    listed_in: str
    """Field of the pod's status."""


_DATA: Final = _Container(
    namespace=NAMESPACE,
    name=DATA_CONTAINER,
    program=DATA_SERVICE,
    listed_in="initContainerStatuses",
)
_S3: Final = _Container(
    namespace=SYSTEM, name="seaweedfs", program=S3_SERVER, listed_in="containerStatuses"
)
_RANK: Final = 3
_NODE: Final = 1
"""Of the plan; has that rank."""


def kill_rank(play: Play) -> None:
    """All ranks restart in place."""
    name, pod = play.observer.pod_of(_NODE)
    process = rank_process(name, play.progress(pod, _RANK))
    play.begin(Fault.RANK_KILLED, f"SIGKILL to rank {_RANK} in pod {name}")
    process.kill()
    play.wait_for_restart()


def delete_pod(play: Play) -> None:
    """Its reorder group gets new pods. What the deleted one said can still be read."""
    name, pod = play.observer.pod_of(_NODE)
    play.begin(Fault.POD_DELETED, f"kubectl delete pod {name}")
    _delete(play, name)
    play.wait_for_restart()
    check_stored_logs(play, pod.attempt, _NODE)


def kill_sidecar(play: Play) -> None:
    """The kubelet starts it again and nobody else notices."""
    name, _ = play.observer.pod_of(_NODE)
    _kill_container(play, Fault.SIDECAR_KILLED, name, _DATA)


def kill_leader(play: Play) -> None:
    """Another replica finishes what the one that led has begun."""
    name, _ = play.observer.pod_of(_NODE)
    leader = _leader(play)
    operator = leader.partition("_")[0]
    process = first_process(operator, OPERATOR)
    fault = play.begin(
        Fault.LEADER_KILLED,
        f"kubectl delete pod {name}, then SIGKILL to the operator that leads, {operator}",
    )
    _delete(play, name)
    play.wait(lambda: play.observer.status.attempt > fault.attempt, "another attempt", 60)
    process.kill()
    killed_s = time.time()
    others = play.wait(
        lambda: (now := _leader(play)).partition("_")[0] not in ("", operator) and now,
        "another leader",
        90,
    )
    changed_s = time.time()
    play.wait_for_restart()
    recovered_s = play.injections[-1].recovered_s
    play.check(
        Check.LEADER_CHANGED,
        recovered_s is not None and changed_s < recovered_s,
        f"{others} led {changed_s - killed_s:.0f} s after {leader} was killed",
    )


def restart_store(play: Play) -> None:
    """Training goes on, and what it asks of the store is asked again."""
    _kill_container(play, Fault.STORE_RESTARTED, play.stage.s3_pod, _S3)


def upgrade_chart(play: Play) -> None:
    """As docs/install.md says. The operator's pods are replaced, those of the job are not."""
    before = {name: pod.uid for name, pod in play.observer.pods.items()}
    play.begin(Fault.CHART_UPGRADED, "helm upgrade with logLevel DEBUG")
    crds = helm("show", "crds", str(CHART))
    apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-")
    play.stage.kubectl(*apply, stdin=crds)
    play.stage.helm("upgrade", logLevel="DEBUG")
    play.stage.wait_for_rollout()
    play.wait_for_steps_after(time.time())
    path = f"/apis/apps/v1/namespaces/{SYSTEM}/deployments/{play.stage.operator}"
    deployment = play.stage.real.control_plane.api.get(path)
    has_value = "--log-level=DEBUG" in json.dumps(deployment["spec"]["template"])
    num_new = deployment["status"].get("updatedReplicas", 0)
    after = {name: pod.uid for name, pod in play.observer.pods.items()}
    play.check(
        Check.UPGRADED,
        has_value and num_new == 2 and before == after,
        f"{num_new} replicas run with the new log level; pods of the job before and after: "
        f"{sorted(before)}, {sorted(after)}",
    )


FAULTS: Final[Mapping[Fault, Callable[[Play], None]]] = {
    Fault.RANK_KILLED: kill_rank,
    Fault.POD_DELETED: delete_pod,
    Fault.SIDECAR_KILLED: kill_sidecar,
    Fault.NODE_CUT_OFF: cut_off_wholly,
    Fault.API_CUT_OFF: cut_off_from_api,
    Fault.LEADER_KILLED: kill_leader,
    Fault.STORE_RESTARTED: restart_store,
    Fault.CHART_UPGRADED: upgrade_chart,
}
"""In the order in which they are done."""


def _delete(play: Play, pod: str) -> None:
    play.stage.kubectl("delete", "pod", pod, f"--namespace={NAMESPACE}", "--wait=false")


def _kill_container(play: Play, fault: Fault, pod: str, container: _Container) -> None:
    """Kill the first process of a container, and wait until its kubelet has started it again."""
    path = f"/api/v1/namespaces/{container.namespace}/pods/{pod}"
    api = play.stage.real.control_plane.api

    def state() -> dict[str, Any]:
        found = api.get(path)["status"][container.listed_in]
        return next(one for one in found if one["name"] == container.name)

    restarts = state()["restartCount"]
    process = first_process(pod, container.program)
    play.begin(fault, f"SIGKILL to the first process of container {container.name} in {pod}")
    process.kill()

    def is_back() -> bool:
        now = state()
        return bool(now["restartCount"] > restarts and now["ready"])

    play.wait(is_back, f"container {container.name} started again", 120)
    play.wait_for_steps_after(time.time())


def _leader(play: Play) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{play.stage.operator}"
    holder = play.stage.real.control_plane.api.get(path)["spec"].get("holderIdentity", "")
    return str(holder)
