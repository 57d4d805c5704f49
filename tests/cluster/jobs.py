"""A job in a test cluster as tests see and drive it: its status, pods and placement, and rank 0."""

import base64
import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

from omni_contract.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_INDEX,
    ANNOTATION_NODE,
    ANNOTATION_PROGRESS,
    LABEL_JOB,
    PLACEMENT_FILE,
    TRAINER_CONTAINER,
)
from omni_contract.packed import unpack
from omni_contract.placement import JobPlacement
from omni_contract.records import JobHeartbeat
from omni_contract.status import JobStatus
from tests.cluster.api import Api, Object, wait_for
from tests.cluster.job_kind import jobs_path
from tests.cluster.nodes import now
from tests.cluster.pods import Pods
from tests.contract.jobs import DEMO

RANKS_PER_NODE: Final = 2


def job_document(name: str, *, nodes: int = 2, **spec: Any) -> Object:
    """The demo's job under a name, on GPU nodes; `spec` replaces whole blocks of it, `resources` is
    merged."""
    body = copy.deepcopy(DEMO)
    body["metadata"]["name"] = name
    resources = {"nodes": nodes, "ranksPerNode": RANKS_PER_NODE, "device": "cuda"}
    resources |= spec.pop("resources", {})
    body["spec"] |= {"resources": resources, **spec}
    return body


class JobHandle:
    """One job by name. Everything is read when it is asked for, or taken from `seen`."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        seen: Callable[[str], tuple[Object | None, list[Object]]] | None = None,
    ) -> None:
        self._api = api
        self._namespace = namespace
        self.name = name
        """Of the job."""
        self.path = f"{jobs_path(namespace)}/{name}"
        """In the API."""
        self.act = Pods(api, namespace)
        """What may befall its pods."""
        self._seen = seen or self._read

    def create(self, body: Object) -> None:
        """Create the job; `body` has another name at will."""
        body = copy.deepcopy(body)
        body["metadata"]["name"] = self.name
        self._api.create(jobs_path(self._namespace), body)

    def patch(self, body: Object) -> None:
        """Merge into the job."""
        self._api.patch(self.path, body)

    def delete(self) -> None:
        """As `kubectl delete` does."""
        self._api.delete(self.path)

    def exists(self) -> bool:
        """Whether it is in the API."""
        return self._seen(self.name)[0] is not None

    @property
    def raw(self) -> Object:
        """The job."""
        raw = self._seen(self.name)[0]
        assert raw is not None, f"there is no job {self.name}"
        return raw

    @property
    def uid5(self) -> str:
        """What its objects' names hold of its uid."""
        return str(self.raw["metadata"]["uid"])[:5]

    @property
    def status(self) -> JobStatus:
        """Its status."""
        raw = self._seen(self.name)[0]
        return JobStatus.model_validate((raw or {}).get("status") or {})

    def is_phase(self, *phases: str) -> bool:
        """Whether it is in one of these."""
        return self.exists() and self.status.phase in phases

    def reason(self, type_: str) -> str:
        """Reason of a condition."""
        found = self.status.condition(type_)
        return "" if found is None else found.reason

    def message(self, type_: str) -> str:
        """Message of a condition."""
        found = self.status.condition(type_)
        return "" if found is None else found.message

    @property
    def pods(self) -> list[Object]:
        """All its pods."""
        return self._seen(self.name)[1]

    @property
    def living(self) -> list[Object]:
        """Its pods that neither are over nor being deleted."""
        return [pod for pod in self.pods if is_living(pod)]

    def pod(self, index: int | None) -> Object:
        """The living pod that hosts a node of the plan (None: a spare) in the newest attempt."""
        found = [pod for pod in self.living if index_of(pod) == index]
        assert found, f"no living pod {index} of {self.name}: {list(map(name_of, self.pods))}"
        return max(found, key=attempt_of)

    @property
    def node_of(self) -> Mapping[int, str]:
        """Where its living ranked pods are bound, by index."""
        return {
            index: pod["spec"]["nodeName"]
            for pod in self.living
            if (index := index_of(pod)) is not None and pod["spec"].get("nodeName")
        }

    @property
    def placement(self) -> JobPlacement:
        """Of the newest attempt."""
        name = f"{self.name}-{self.uid5}-placement-{self.status.attempt}"
        path = f"/api/v1/namespaces/{self._namespace}/configmaps/{name}"
        packed = {
            key: base64.b64decode(piece) for key, piece in self._api.get(path)["binaryData"].items()
        }
        return JobPlacement.model_validate_json(unpack(PLACEMENT_FILE, packed))

    def wait(self, is_so: Callable[[], object], what: str, timeout_s: float = 60) -> None:
        """Wait until something holds; fails with the status."""
        try:
            wait_for(lambda: bool(is_so()), what, timeout_s)
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.describe()}") from None

    def wait_for_phase(
        self, phase: str, *, attempt: int | None = None, timeout_s: float = 60
    ) -> None:
        """Wait for a phase, and an attempt of at least this number."""

        def is_so() -> bool:
            return self.is_phase(phase) and self.status.attempt >= (attempt or 0)

        self.wait(is_so, f"job {self.name} {phase}", timeout_s)

    def beat(self, step: int, **fields: Any) -> None:
        """Renew the progress Lease as rank 0's supervisor does."""
        beat = {"attempt": self.status.attempt, "generation": 0, "phase": "training", "step": step}
        text = JobHeartbeat.model_validate(beat | fields).model_dump_json()
        lease = f"{self.name}-{self.uid5}-progress"
        self._api.patch(
            f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases/{lease}",
            {
                "metadata": {"annotations": {ANNOTATION_PROGRESS: text}},
                "spec": {"renewTime": now()},
            },
        )

    def complete(self) -> None:
        """All ranked pods end well."""
        for pod in self.living:
            if index_of(pod) is not None:
                self.act.end_container(name_of(pod), exit_code=0, container=TRAINER_CONTAINER)

    def describe(self) -> str:
        """All that is seen of it, for a failure."""
        if not self.exists():
            return f"job {self.name} is gone"
        status = self.status
        told = [f"  {c.type}={c.status} {c.reason}: {c.message}" for c in status.conditions]
        happened = [f"  {i.fault} {i.action} of {i.attempt}: {i.message}" for i in status.incidents]
        pods = [
            f"  pod {name_of(pod)} on {pod['spec'].get('nodeName')} {pod['status'].get('phase')}"
            f"{' gated' if pod['spec'].get('schedulingGates') else ''}"
            f"{' Terminating' if 'deletionTimestamp' in pod['metadata'] else ''}"
            for pod in self.pods
        ]
        head = f"job {self.name}: {status.phase}, attempt {status.attempt}, {status.budget}"
        return "\n".join([head, *told, *happened, *pods])

    def _read(self, name: str) -> tuple[Object | None, list[Object]]:
        found = self._api.list(jobs_path(self._namespace), fieldSelector=f"metadata.name={name}")
        return (found[0] if found else None), self.act.list(f"{LABEL_JOB}={name}")


def name_of(pod: Object) -> str:
    """Name of an object."""
    return str(pod["metadata"]["name"])


def uid_of(pod: Object) -> str:
    """Uid of an object."""
    return str(pod["metadata"]["uid"])


def index_of(pod: Object) -> int | None:
    """The node of the plan that a pod hosts; None: a spare."""
    text = pod["metadata"]["annotations"][ANNOTATION_INDEX]
    return int(text) if text else None


def attempt_of(pod: Object) -> int:
    """The attempt that a pod was told to belong to."""
    return int(pod["metadata"]["annotations"][ANNOTATION_ATTEMPT])


def planned_node(pod: Object) -> str:
    """The node that is reserved for a pod."""
    return str(pod["metadata"]["annotations"][ANNOTATION_NODE])


def is_living(pod: Object) -> bool:
    """Whether a pod is neither over nor being deleted."""
    is_over = pod["status"].get("phase") in ("Succeeded", "Failed")
    return not is_over and "deletionTimestamp" not in pod["metadata"]


def is_gated(pod: Object) -> bool:
    """Whether its scheduling gate is shut."""
    return bool(pod["spec"].get("schedulingGates"))
