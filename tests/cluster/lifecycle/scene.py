"""Where the stories of a job's life are played, and what they wait for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from omni_contract.names import LABEL_JOB
from tests.cluster.api import Api, Object
from tests.cluster.control_plane import ControlPlane
from tests.cluster.jobs import RANKS_PER_NODE, JobHandle, index_of, job_document, name_of, uid_of
from tests.cluster.nodes import GPU, Nodes
from tests.cluster.operators import OperatorProcess
from tests.cluster.stories import Seen, Story, Wait

LABEL_POOL: Final = "test.megascale-omni.dev/pool"
WITHIN_S: Final = 90.0
NAMESPACE: Final = "lifecycle"
_OWNED: Final = (
    "/api/v1/namespaces/{}/pods",
    "/api/v1/namespaces/{}/configmaps",
    "/api/v1/namespaces/{}/services",
    "/api/v1/namespaces/{}/serviceaccounts",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "/apis/coordination.k8s.io/v1/namespaces/{}/leases",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a story is played: nodes of its own in one namespace for all."""

    name: str
    api: Api
    nodes: Nodes
    node_names: list[str]
    seen: Seen
    operator: OperatorProcess
    control_plane: ControlPlane

    def job(self, name: str = "") -> JobHandle:
        """A job of the story, by the end of its name."""
        return JobHandle(self.api, NAMESPACE, self.name + name, seen=self.seen)

    def document(self, *, nodes: int = 2, **spec: Any) -> Object:
        """A job on the nodes of the story."""
        template = {"nodeSelector": {LABEL_POOL: self.name}, **spec.pop("podTemplate", {})}
        restart = {"nodeLostAfterSeconds": 2, **spec.pop("restart", {})}
        return job_document(self.name, nodes=nodes, podTemplate=template, restart=restart, **spec)

    def fill(self, node: str) -> str:
        """A pod of somebody else takes a node's GPUs, past the scheduler."""
        name = f"foreign-{node}"
        limits = {"limits": {GPU: str(RANKS_PER_NODE)}, "requests": {GPU: str(RANKS_PER_NODE)}}
        container = {"name": "main", "image": "other:1", "resources": limits}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"nodeName": node, "containers": [container]},
        }
        self.job().act.create(pod)
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A story and the nodes it wants."""

    play: Callable[[Scene], Story[None]]
    nodes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the story, as tests are named."""
        return self.play.__name__


def story(
    cases: list[Case], **nodes: int
) -> Callable[[Callable[[Scene], Story[None]]], Callable[[Scene], Story[None]]]:
    """Have a story played with these cases, on a grid of nodes of its own."""

    def register(function: Callable[[Scene], Story[None]]) -> Callable[[Scene], Story[None]]:
        cases.append(Case(play=function, nodes=nodes))
        return function

    return register


def until(what: str, is_so: Callable[[], object], within_s: float = WITHIN_S) -> Wait:
    """Wait for something."""
    return Wait(what=what, is_so=is_so, within_s=within_s)


def running(job: JobHandle, attempt: int = 1) -> Wait:
    """Wait until a job runs in an attempt of at least this number."""

    def is_so() -> bool:
        return job.exists() and job.status.attempt >= attempt and job.status.holds("Running")

    return until(f"{job.name} running in attempt {attempt}", is_so)


def in_phase(job: JobHandle, phase: str) -> Wait:
    """Wait for a phase."""
    return until(f"{job.name} {phase}", lambda: job.is_phase(phase))


def some_seconds(seconds: float) -> Story[None]:
    """Let time pass."""
    until_s = time.monotonic() + seconds
    yield until("some seconds over", lambda: time.monotonic() > until_s, seconds + WITHIN_S)


def runs(job: JobHandle, attempt: int) -> bool:
    """Whether a job runs in this attempt."""
    return job.status.attempt == attempt and job.status.holds("Running")


def uids(job: JobHandle) -> Mapping[int | None, str]:
    """Living pods by index."""
    return {index_of(pod): uid_of(pod) for pod in job.living}


def left_of(api: Api, job: str) -> list[str]:
    """All that is in the API of a job and its own."""
    return [
        f"{path.rsplit('/', 1)[1]}/{name_of(found)}"
        for path in _OWNED
        for found in api.list(path.format(NAMESPACE), labelSelector=f"{LABEL_JOB}={job}")
    ]
