"""How fast a running job is whole again after a fault, beside JobSet on the same control plane."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.operator.figures import Figure
from benchmarks.operator.jobset import (
    LABEL_NAME,
    LABEL_RESTART,
    jobset_of,
    jobsets_path,
    running_jobset,
)
from benchmarks.operator.scene import NAMESPACE, Scene
from benchmarks.operator.start import (
    bare_pod,
    delete_job,
    is_of_attempt,
    start_big_job,
)
from omni_contract.names import TRAINER_CONTAINER
from tests.cluster.api import Object
from tests.cluster.history import OUT_OF_SERVICE
from tests.cluster.jobs import JobHandle, index_of, name_of, uid_of
from tests.cluster.nodes import Nodes
from tests.cluster.pods import Pods

NUM_LOST: Final = 30
JOBSET: Final = "peer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One recovery, from the moment when the fault was brought about."""

    detect_s: float
    """Until it was seen: the new attempt is in the status, the JobSet says that it restarts."""
    total_s: float
    """Until all pods run again."""

    @property
    def mend_s(self) -> float:
        """From being seen to being mended."""
        return self.total_s - self.detect_s

    def __str__(self) -> str:
        return f"{self.total_s:.1f} s (seen after {self.detect_s:.1f} s)"


def measure_faults(scene: Scene, *, num_nodes: int, times: int) -> Iterator[Figure]:
    """A failed container, a lost node, many lost nodes; then the first two with JobSet."""
    nodes, pods = Nodes(scene.control_plane), Pods(scene.api, NAMESPACE)
    job = _Job(scene, nodes, pods, num_nodes)
    failed = [job.fail_container() for _ in range(times)]
    scene.say(f"one failed container: {', '.join(map(str, failed))}")
    lost = [job.lose_nodes(1) for _ in range(min(2, times))]
    scene.say(f"one lost node: {', '.join(map(str, lost))}")
    many = job.lose_nodes(min(NUM_LOST, num_nodes // 4))
    scene.say(f"{NUM_LOST} lost nodes: {many}")
    template = bare_pod(scene.pods(is_of_attempt(job.uid, None))[0])
    delete_job(scene, job.name)
    with running_jobset(scene.control_plane):
        peer = _JobSet(scene, nodes, pods, num_nodes, template)
        peer_failed = [peer.fail_container() for _ in range(min(2, times))]
        scene.say(f"JobSet, one failed container: {', '.join(map(str, peer_failed))}")
        peer_lost = [peer.lose_node()]
        scene.say(f"JobSet, one lost node: {', '.join(map(str, peer_lost))}")
        peer.delete()
    yield Figure(
        name=f"JobSet, to start {num_nodes} pods",
        value=peer.start_s,
        unit="s",
        how="JobSet 0.11.1 on the same control plane; it binds no pod to a node",
    )
    yield from _beside("one failed container", failed, peer_failed, waits=False)
    yield from _beside("one lost node", lost, peer_lost, waits=True)
    yield Figure(
        name=f"{NUM_LOST} lost nodes at once, to all running",
        value=many.total_s,
        unit="s",
        how=f"from the moment when their Leases end, at the node controller's own pace; {many}",
    )


def _beside(
    what: str, ours: list[Recovery], peers: list[Recovery], *, waits: bool
) -> Iterator[Figure]:
    """Both recoveries. Where all have to wait for the control plane to see the fault, the goal is
    about what comes then."""
    told = f"ours {', '.join(map(str, ours))}; JobSet {', '.join(map(str, peers))}"

    def median(recoveries: list[Recovery], part: str) -> float:
        return float(statistics.median(getattr(one, part) for one in recoveries))

    for name, part in (("seen", "detect_s"), ("running again", "total_s")):
        yield Figure(
            name=f"{what}, to {name}", value=median(ours, part), unit="s", how=f"medians; {told}"
        )
    for name, part, has_goal in (
        ("from the fault on", "total_s", not waits),
        ("from being seen", "mend_s", waits),
    ):
        yield Figure(
            name=f"{what}, JobSet's time over ours {name}",
            value=median(peers, part) / median(ours, part),
            unit="times",
            goal=5 if has_goal else None,
            is_least=True,
            how=f"medians; {told}",
        )


class _Job:
    """The large job."""

    name = "struck"

    def __init__(self, scene: Scene, nodes: Nodes, pods: Pods, num_nodes: int) -> None:
        self._scene, self._nodes, self._pods = scene, nodes, pods
        self._num_nodes = num_nodes
        self._attempt, self._step = 1, 0
        self._handle = JobHandle(scene.api, NAMESPACE, self.name)
        self.uid = start_big_job(scene, self.name, num_nodes)

    def fail_container(self) -> Recovery:
        """A trainer container ends with code 1."""
        name = name_of(self._running()[self._num_nodes // 2])
        self._make_steps()
        begin_s = time.time()
        self._pods.end_container(name, exit_code=1, container=TRAINER_CONTAINER)
        return self._recovery(begin_s)

    def lose_nodes(self, count: int) -> Recovery:
        """Nodes lose power, neighbours first: ranks of one group are in one rack, and as many nodes
        of as many racks would leave too few whole racks for the job."""
        names = sorted(pod["spec"]["nodeName"] for pod in self._running())[:count]
        self._make_steps()
        begin_s = time.time()
        self._nodes.kill(*names)
        recovery = self._recovery(begin_s, lost=frozenset(names))
        self._nodes.revive(*names)
        return recovery

    def _make_steps(self) -> None:
        """Else the same fault would be answered in a dearer way each time."""
        self._step += 10
        self._handle.beat(self._step)

    def _running(self) -> list[Object]:
        found = self._scene.pods(is_of_attempt(self.uid, self._attempt))
        return sorted(found, key=lambda pod: index_of(pod) or 0)

    def _recovery(self, begin_s: float, lost: frozenset[str] = frozenset()) -> Recovery:
        """Wait for an attempt in which all pods run, none of them on a lost node."""
        scene, before = self._scene, self._attempt

        def is_seen() -> bool:
            (job,) = [job for job in scene.jobs() if uid_of(job) == self.uid]
            self._attempt = job["status"]["attempt"]
            return self._attempt > before

        seen_s = scene.when(is_seen, "a new attempt")

        def is_whole() -> bool:
            is_seen()
            pods = scene.pods(is_of_attempt(self.uid, self._attempt))
            well = [pod for pod in pods if pod["status"].get("phase") == "Running"]
            return len(well) == self._num_nodes and not any(
                pod["spec"].get("nodeName") in lost or "deletionTimestamp" in pod["metadata"]
                for pod in well
            )

        end_s = scene.when(is_whole, f"{self._num_nodes} pods after a fault")
        return Recovery(detect_s=seen_s - begin_s, total_s=end_s - begin_s)


class _JobSet:
    """The same pods as a JobSet."""

    def __init__(
        self, scene: Scene, nodes: Nodes, pods: Pods, num_nodes: int, template: Object
    ) -> None:
        self._scene, self._nodes, self._pods = scene, nodes, pods
        self._num_nodes = num_nodes
        self._path = f"{jobsets_path(NAMESPACE)}/{JOBSET}"
        self._restarts = 0
        begin_s = time.time()
        body = jobset_of(JOBSET, NAMESPACE, template, num_pods=num_nodes)
        scene.api.create(jobsets_path(NAMESPACE), body)
        self._wait_until_running()
        self.start_s = time.time() - begin_s
        scene.say(f"JobSet runs {num_nodes} pods after {self.start_s:.1f} s")

    def fail_container(self) -> Recovery:
        """A trainer container ends with code 1: its Job fails, and all pods are made anew."""
        name = name_of(self._running()[self._num_nodes // 2])
        begin_s = time.time()
        self._pods.end_container(name, exit_code=1, container=TRAINER_CONTAINER)
        return self._recovery(begin_s)

    def lose_node(self) -> Recovery:
        """A node loses power. By itself JobSet goes on 300 s later, when the pod is evicted, and
        then waits for ever for the pod's end. So somebody who watches marks the node out of service
        in the very moment in which it is not Ready, and that counts as seen."""
        node = self._running()[self._num_nodes // 2]["spec"]["nodeName"]
        begin_s = time.time()
        self._nodes.kill(node)
        seen_s = self._scene.when(lambda: not self._nodes.is_ready(node), "the node not Ready")
        self._nodes.taint(node, OUT_OF_SERVICE, value="nodeshutdown", effect="NoExecute")
        self._restarts += 1
        end_s = self._wait_until_running()
        self._nodes.untaint(node, OUT_OF_SERVICE, effect="NoExecute")
        self._nodes.revive(node)
        return Recovery(detect_s=seen_s - begin_s, total_s=end_s - begin_s)

    def delete(self) -> None:
        """Take it away."""
        self._scene.api.delete(self._path)
        self._scene.when_gone(lambda pod: LABEL_NAME in (pod["metadata"].get("labels") or {}))

    def _recovery(self, begin_s: float) -> Recovery:
        self._restarts += 1

        def is_seen() -> bool:
            status = self._scene.api.get(self._path).get("status") or {}
            return int(status.get("restarts", 0)) >= self._restarts

        seen_s = self._scene.when(is_seen, "JobSet restarts")
        end_s = self._wait_until_running()
        return Recovery(detect_s=seen_s - begin_s, total_s=end_s - begin_s)

    def _running(self) -> list[Object]:
        return self._scene.pods(self._is_mine)

    def _wait_until_running(self) -> float:
        return self._scene.when_running(
            self._num_nodes, self._is_mine, f"JobSet after {self._restarts} restarts"
        )

    def _is_mine(self, pod: Object) -> bool:
        labels = pod["metadata"].get("labels") or {}
        return labels.get(LABEL_RESTART) == str(self._restarts)
