"""What chaos does to a cluster. Each fault is a generator: it strikes, yields what it struck, waits
as long as it likes, and mends what does not mend by itself."""

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omni_contract.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_HISTORY,
    ANNOTATION_NODE,
    ANNOTATION_RESTART,
    DATA_CONTAINER,
    TRAINER_CONTAINER,
    Exit,
)
from omni_contract.records import History as Spent
from omni_contract.records import PodEnd
from omni_contract.spec_run import FaultClass
from tests.cluster.api import ApiError, Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.history import History
from tests.cluster.job_kind import jobs_path
from tests.cluster.jobs import is_gated, is_living, name_of
from tests.cluster.nodes import GPU, Nodes, NodeSpec
from tests.cluster.operator_pair import OperatorPair
from tests.cluster.pods import Pods

LABEL_FOREIGN: Final = "test.megascale-omni.dev/foreign"
URGENT: Final = "chaos-urgent"
"""Priority class that preempts."""


class NothingThere(Exception):
    """There is nothing that the fault could strike now."""


@dataclass(slots=True, kw_only=True)
class Grounds:
    """What faults act upon."""

    control_plane: ControlPlane
    namespace: str
    nodes: Nodes
    specs: Mapping[str, NodeSpec]
    operators: OperatorPair
    history: History
    pods: Pods
    dark: set[str]
    """Nodes without power: nothing on them does anything."""
    is_over: threading.Event
    """Set when all is to be mended: waits end."""
    user_faults: dict[str, int] = field(default_factory=dict)
    """Faults of the user's program, by uid of the job."""
    _held: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.is_over.wait(seconds)

    @contextlib.contextmanager
    def held(self, *names: str) -> Iterator[None]:
        """Keep other faults off nodes, pods, jobs, programs."""
        with self._lock:
            if self._held & set(names):
                raise NothingThere
            self._held |= set(names)
        try:
            yield
        finally:
            with self._lock:
                self._held -= set(names)

    def jobs(self) -> list[Object]:
        """Jobs that are under way."""
        found = [job for job in self.history.now("job") if _is_under_way(job)]
        return sorted(found, key=name_of)

    def running(self) -> list[Object]:
        """Pods of jobs whose containers run on nodes that answer."""
        found = [pod for pod in self._owned() if _is_running(pod) and _node(pod) not in self.dark]
        return sorted(found, key=name_of)

    def living(self) -> list[Object]:
        """Pods of jobs, gated or not."""
        return sorted((pod for pod in self._owned() if is_living(pod)), key=name_of)

    def whole_nodes(self) -> list[str]:
        """Nodes that nothing befalls, those in use first."""
        with self._lock:
            free = [name for name in self.nodes.names if name not in self._held]
        used = {_node(pod) for pod in self._owned() if is_living(pod)}
        return sorted(free, key=lambda name: (name not in used, name))

    def _owned(self) -> list[Object]:
        return [
            pod
            for pod in self.history.now("pod")
            if pod["metadata"].get("ownerReferences")
            and pod["metadata"]["namespace"] == self.namespace
        ]


Fault = Callable[[Grounds, random.Random], Iterator[str]]


def _is_under_way(job: Object) -> bool:
    phase = job.get("status", {}).get("phase")
    return phase not in ("Completed", "Failed") and "deletionTimestamp" not in job["metadata"]


def _is_running(pod: Object) -> bool:
    return is_living(pod) and pod["status"].get("phase") == "Running"


def _node(pod: Object) -> str | None:
    node: str | None = pod["spec"].get("nodeName")
    return node


def _one(draw: random.Random, of: Sequence[Any]) -> Any:
    if not of:
        raise NothingThere
    return draw.choice(of)


def _some_node(grounds: Grounds, draw: random.Random) -> str:
    # One in use, mostly.
    nodes = grounds.whole_nodes()
    return str(_one(draw, nodes[: max(1, len(nodes) * 2 // 3)]))


def lose_node(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A node loses power for a while."""
    yield from _lose(grounds, [_some_node(grounds, draw)], draw.uniform(5, 40))


def lose_rack(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """Half a rack loses power for a while."""
    rack = _some_node(grounds, draw).rpartition("-")[0]
    names = [name for name in grounds.whole_nodes() if name.startswith(f"{rack}-")]
    yield from _lose(grounds, names[: max(1, len(names) // 2)], draw.uniform(15, 40))


def flap(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A node loses power again and again, for about as long as it takes to notice."""
    node = _some_node(grounds, draw)
    for turn in range(draw.choice((2, 3))):
        for struck in _lose(grounds, [node], draw.uniform(4, 14)):
            if not turn:
                yield struck
        grounds.wait(draw.uniform(0, 5))


def _lose(grounds: Grounds, nodes: Sequence[str], seconds: float) -> Iterator[str]:
    with grounds.held(*nodes):
        grounds.dark.update(nodes)
        grounds.nodes.kill(*nodes)
        yield ", ".join(nodes)
        grounds.wait(seconds)
        grounds.nodes.revive(*nodes)
        grounds.dark.difference_update(nodes)


def remove_node(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A machine is taken away, with its pods, and comes back empty."""
    node = _some_node(grounds, draw)
    with grounds.held(node):
        grounds.dark.add(node)
        grounds.nodes.remove(node)
        yield node
        grounds.wait(draw.uniform(5, 30))
        grounds.nodes.add([grounds.specs[node]])
        grounds.dark.discard(node)


def freeze_node(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A kubelet answers, but its pods neither start nor end."""
    node = _some_node(grounds, draw)
    with grounds.held(node):
        grounds.nodes.freeze_pods(node)
        yield node
        grounds.wait(draw.uniform(5, 25))
        grounds.nodes.thaw_pods(node)


def cordon(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A node is cordoned for a while."""
    node = _some_node(grounds, draw)
    with grounds.held(node):
        grounds.nodes.cordon(node)
        yield node
        grounds.wait(draw.uniform(5, 30))
        grounds.nodes.uncordon(node)


def taint(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A node is tainted, so that the taint manager evicts its pods."""
    node = _some_node(grounds, draw)
    key = "test.megascale-omni.dev/repair"
    with grounds.held(node):
        grounds.nodes.taint(node, key, effect="NoExecute")
        yield node
        grounds.wait(draw.uniform(5, 30))
        grounds.nodes.untaint(node, key, effect="NoExecute")


def restart_api_server(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """The API server goes away, and comes back after a while."""
    how = draw.choice((signal.SIGTERM, signal.SIGKILL))
    with grounds.held("kube-apiserver"):
        yield how.name
        grounds.control_plane.restart_api_server(down_s=draw.uniform(0, 5), with_signal=how)


def kill_operator(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """An operator is killed, mostly the one that leads."""
    leader = grounds.operators.leader() if draw.random() < 0.8 else None
    name = leader or draw.choice(grounds.operators.names)
    with grounds.held(name):
        yield f"{name}{' (leading)' if leader else ''}"
        grounds.operators.kill(name, down_s=draw.uniform(0, 6))


def steal_slots(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """Foreign pods take the GPUs of nodes that a job was just promised."""
    gated = [pod for pod in grounds.living() if is_gated(pod)]
    promised = [pod["metadata"]["annotations"][ANNOTATION_NODE] for pod in gated]
    wanted = promised or grounds.whole_nodes()
    yield from _take(grounds, draw, sorted(set(wanted)), priority=None)


def preempt(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A pod of high priority drives others from a node."""
    yield from _take(grounds, draw, [_some_node(grounds, draw)], priority=URGENT)


def _take(
    grounds: Grounds, draw: random.Random, nodes: Sequence[str], *, priority: str | None
) -> Iterator[str]:
    node = _one(draw, nodes)
    name = f"foreign-{draw.randrange(10**9)}"
    gpus = str(draw.choice((2, 4, 8)))
    grounds.pods.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LABEL_FOREIGN: "true"}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "terminationGracePeriodSeconds": 1,
                **({"priorityClassName": priority} if priority else {}),
                "containers": [
                    {
                        "name": "main",
                        "image": "foreign",
                        "resources": {"requests": {GPU: gpus}, "limits": {GPU: gpus}},
                    }
                ],
            },
        }
    )
    yield f"{node} ({gpus} GPUs)"
    grounds.wait(draw.uniform(5, 30))
    grounds.pods.delete(name, grace_s=0)


def delete_pods(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """Somebody deletes pods of a job by hand, at times with force, at times all of them."""
    pod = _one(draw, grounds.living())
    mates = [one for one in grounds.living() if _owner(one) == _owner(pod)]
    chosen = mates if draw.random() < 0.2 else [pod]
    grace_s = 0 if draw.random() < 0.3 else None
    yield f"{', '.join(map(name_of, chosen))}{' with force' if grace_s == 0 else ''}"
    grounds.pods.delete(*map(name_of, chosen), grace_s=grace_s)


def delete_slowly(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A pod is deleted and takes its time, or hangs until somebody kills it."""
    name = name_of(_one(draw, grounds.running()))
    seconds = draw.uniform(3, 20)
    with grounds.held(name):
        grounds.pods.stick(name)
        grounds.pods.delete(name)
        yield f"{name} for {seconds:.0f} s"
        grounds.wait(seconds)
        grounds.pods.unstick(name)


def end_container(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A trainer container ends, with or without a word of its supervisor."""
    pod = _one(draw, grounds.running())
    kinds: Sequence[tuple[int, FaultClass | None]] = (
        (1, FaultClass.APP_ERROR),
        (137, None),
        (Exit.UNAVAILABLE, FaultClass.DATA_SERVICE),
        (Exit.PEER_LOST, FaultClass.RENDEZVOUS),
        (1, None),
    )
    code, fault = draw.choice(kinds)
    _end(grounds, pod, code, fault, is_oom=code == 137 and draw.random() < 0.5)
    yield f"{name_of(pod)} with {code}"


def end_many(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """One pod of a job fails, and its peers end because they lost it, in any order."""
    pod = _one(draw, grounds.running())
    mates = [one for one in grounds.running() if _owner(one) == _owner(pod)]
    draw.shuffle(mates)
    for one in mates:
        is_first = one is pod or name_of(one) == name_of(pod)
        code, fault = (1, FaultClass.APP_ERROR) if is_first else (Exit.PEER_LOST, None)
        with contextlib.suppress(ApiError):
            _end(grounds, one, code, fault, is_oom=False)
    yield f"{name_of(pod)} and its {len(mates) - 1} peers"


def _end(
    grounds: Grounds, pod: Object, code: int, fault: FaultClass | None, *, is_oom: bool
) -> None:
    annotations = pod["metadata"]["annotations"]
    message = ""
    if fault is not None:
        end = PodEnd(
            attempt=int(annotations[ANNOTATION_ATTEMPT]),
            generation=0,
            exit_code=code,
            fault=fault,
            message="by chaos",
            history=Spent.model_validate_json(annotations[ANNOTATION_HISTORY]),
        )
        message = end.model_dump_json()
    owner = _owner(pod)
    grounds.user_faults[owner] = grounds.user_faults.get(owner, 0) + 1
    grounds.pods.end_container(
        name_of(pod),
        exit_code=code,
        container=TRAINER_CONTAINER,
        reason="OOMKilled" if is_oom else None,
        message=message,
    )


def restart_sidecar(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A data service is killed and comes back."""
    name = name_of(_one(draw, grounds.running()))
    grounds.pods.restart_sidecar(name, container=DATA_CONTAINER)
    yield name


def evict(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A pod is evicted, by the API or by its kubelet."""
    name = name_of(_one(draw, grounds.running()))
    if draw.random() < 0.5:
        grounds.pods.evict(name)
    else:
        grounds.pods.fail(name, reason="Evicted", message="low on memory", disruption=True)
    yield name


def suspend(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A job is suspended and resumed."""
    name = name_of(_one(draw, grounds.jobs()))
    path = f"{jobs_path(grounds.namespace)}/{name}"
    with grounds.held(name):
        grounds.control_plane.api.patch(path, {"spec": {"suspend": True}})
        yield name
        grounds.wait(draw.uniform(0, 15))
        grounds.control_plane.api.patch(path, {"spec": {"suspend": False}})


def ask_for_restart(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """Somebody asks for a restart of a job."""
    name = name_of(_one(draw, grounds.jobs()))
    body = {"metadata": {"annotations": {ANNOTATION_RESTART: str(time.time())}}}
    grounds.control_plane.api.patch(f"{jobs_path(grounds.namespace)}/{name}", body)
    yield name


def delete_job(grounds: Grounds, draw: random.Random) -> Iterator[str]:
    """A job is deleted and made again under the same name."""
    job = _one(draw, grounds.jobs())
    api, path = grounds.control_plane.api, jobs_path(grounds.namespace)
    with grounds.held(name_of(job)):
        how = draw.choice(("Background", "Foreground"))
        api.request("DELETE", f"{path}/{name_of(job)}", {"propagationPolicy": how})
        yield f"{name_of(job)} ({how})"
        while api.exists(f"{path}/{name_of(job)}"):
            time.sleep(0.2)
        body = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "metadata": {"name": name_of(job)},
            "spec": {key: value for key, value in job["spec"].items() if key != "suspend"},
        }
        api.create(path, body)


def _owner(pod: Object) -> str:
    return str(pod["metadata"]["ownerReferences"][0]["uid"])


FAULTS: Final[Mapping[Fault, int]] = {
    lose_node: 6,
    lose_rack: 2,
    flap: 4,
    remove_node: 3,
    freeze_node: 3,
    cordon: 2,
    taint: 2,
    restart_api_server: 3,
    kill_operator: 6,
    steal_slots: 6,
    preempt: 3,
    delete_pods: 5,
    delete_slowly: 4,
    end_container: 6,
    end_many: 3,
    restart_sidecar: 1,
    evict: 4,
    suspend: 4,
    ask_for_restart: 2,
    delete_job: 1,
}
"""Each fault and how often it comes, beside the others."""
