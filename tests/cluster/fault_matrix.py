"""What can befall a pod or node of a job, and how the job must end: one row per carrier of a fault.

Data alone. `act` and `arguments` name a method of `Pods` or `Nodes` (or of the test itself) that
writes the carrier as a kubelet, a controller or a person writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal

from omni_contract.faults import Budget
from omni_contract.names import DATA_CONTAINER, TRAINER_CONTAINER, Exit
from omni_contract.records import PodEnd
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import Phase

Act = Literal[
    "pods.end_container",
    "pods.wait_in_container",
    "pods.fail",
    "pods.evict",
    "pods.disrupt",
    "pods.delete",
    "nodes.kill",
    "nodes.delete_object",
    "nodes.taint",
    "nodes.cordon",
    "stop_heartbeat",
    "part",
    "fill_node",
]

Stage = Literal["running", "starting", "restarting"]

_F, _A = FaultClass, RestartAction
_ALL: Final[tuple[Stage, ...]] = ("running", "starting", "restarting")
_NEW: Final[tuple[Stage, ...]] = ("starting", "restarting")
_TRACEBACK: Final = "Traceback (most recent call last):\n  File ...\nRuntimeError: out of luck\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One carrier of a fault."""

    case: str
    """Name for test ids."""
    fault: FaultClass
    """Class that the operator must find."""
    act: Act
    """What happens: to one ranked pod (`pods.`), or to its node (`nodes.`)."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, besides the name of pod or node."""
    end: Mapping[str, Any] | None = None
    """Fields of the `PodEnd` that the container leaves; attempt and generation are the pod's."""
    action: RestartAction
    """What the operator must do, with no rule of the job in the way and nodes free."""
    counter: Budget
    """Which counter must grow by one."""
    phase: Phase = "Running"
    """How the job must end up."""
    excludes_node: bool = False
    """Whether the node must be left out afterwards."""
    stages: tuple[Stage, ...] = _ALL
    """Of a job at which it can strike: a container that runs waits for no image, and a slot that is
    used cannot be taken."""

    def message(self, *, attempt: int, generation: int = 0) -> str:
        """The termination message of the container."""
        if self.end is None:
            return str(self.arguments.get("message", ""))
        code = self.arguments["exit_code"]
        pair = {"attempt": attempt, "generation": generation, "exit_code": code}
        return PodEnd.model_validate({**pair, **self.end}).model_dump_json()


def _trainer(exit_code: int, **more: Any) -> Mapping[str, Any]:
    return MappingProxyType({"exit_code": exit_code, "container": TRAINER_CONTAINER, **more})


def _waits(reason: str, message: str, *, container: str = TRAINER_CONTAINER) -> Mapping[str, Any]:
    return MappingProxyType({"container": container, "reason": reason, "message": message})


ROWS: Final = (
    # The trainer container ends.
    Row(
        case="app-error",
        fault=_F.APP_ERROR,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR),
        end={"fault": "AppError", "step": 7, "rank": 3, "message": "loss is not a number"},
        action=_A.REPLACE_POD,
        counter="user",
    ),
    Row(
        case="app-error-that-left-only-its-log",
        fault=_F.APP_ERROR,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR, message=_TRACEBACK),
        action=_A.REPLACE_POD,
        counter="user",
    ),
    Row(
        case="app-error-with-half-a-message",
        fault=_F.APP_ERROR,
        act="pods.end_container",
        arguments=_trainer(3, message='{"attempt":1,"generation":0,"exit_code":3,"fault":"OO'),
        action=_A.REPLACE_POD,
        counter="user",
    ),
    Row(
        case="out-of-memory-of-the-container",
        fault=_F.OOM,
        act="pods.end_container",
        arguments=_trainer(137, reason="OOMKilled"),
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="out-of-memory-of-a-rank",
        fault=_F.OOM,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR),
        end={"fault": "OOM", "message": "rank 1 was killed for memory"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="killed-and-nobody-says-why",
        fault=_F.UNKNOWN,
        act="pods.end_container",
        arguments=_trainer(137),
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="ended-by-a-signal-from-nowhere",
        fault=_F.UNKNOWN,
        act="pods.end_container",
        arguments=_trainer(143),
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="container-runtime-error",
        fault=_F.UNKNOWN,
        act="pods.end_container",
        arguments=_trainer(128, reason="StartError", message="OCI runtime create failed"),
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="broken-gpu",
        fault=_F.GPU_HARDWARE,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR),
        end={"fault": "GpuHardware", "rank": 5, "message": "device 5 fell off the bus"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
        excludes_node=True,
    ),
    Row(
        case="data-service-is-no-use",
        fault=_F.DATA_SERVICE,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR),
        end={"fault": "DataService", "message": "the data service died 5 times"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="supervisor-hung",
        fault=_F.HANG,
        act="pods.end_container",
        arguments=_trainer(Exit.ERROR),
        end={"fault": "Hang", "rank": 0, "message": "no new step in 600 s"},
        action=_A.REPLACE_POD,  # not in place: the pod is over
        counter="infrastructure",
    ),
    Row(
        case="supervisors-lost-each-other",
        fault=_F.RENDEZVOUS,
        act="pods.end_container",
        arguments=_trainer(Exit.PEER_LOST),
        action=_A.RESTART_JOB,
        counter="infrastructure",
    ),
    Row(
        case="mistake-in-the-job",
        fault=_F.START_ERROR,
        act="pods.end_container",
        arguments=_trainer(Exit.USER),
        end={"fault": "StartError", "message": "data.sources.text: no such bucket"},
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
    ),
    Row(
        case="another-job-holds-the-run",
        fault=_F.START_ERROR,
        act="pods.end_container",
        arguments=_trainer(Exit.STALE),
        end={"message": "another attempt holds this run"},
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
    ),
    Row(
        case="supervisors-gave-up",
        fault=_F.APP_ERROR,
        act="pods.end_container",
        arguments=_trainer(Exit.GAVE_UP),
        end={"fault": "AppError", "message": "gave up: 3 restarts used up restart.limit 3"},
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
    ),
    # A container cannot start.
    Row(
        case="image-that-is-not-there",
        fault=_F.START_ERROR,
        act="pods.wait_in_container",
        arguments=_waits("ImagePullBackOff", 'Back-off pulling image "omni:none"'),
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
        stages=_NEW,
    ),
    Row(
        case="secret-that-is-not-there",
        fault=_F.START_ERROR,
        act="pods.wait_in_container",
        arguments=_waits("CreateContainerConfigError", 'secret "s3" not found'),
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
        stages=_NEW,
    ),
    Row(
        case="image-name-that-is-none",
        fault=_F.START_ERROR,
        act="pods.wait_in_container",
        arguments=_waits(
            "InvalidImageName", 'Failed to apply default image tag "a b"', container=DATA_CONTAINER
        ),
        action=_A.FAIL_JOB,
        counter="none",
        phase="Failed",
        stages=_NEW,
    ),
    # The kubelet ends the whole pod or takes none.
    Row(
        case="evicted-by-the-kubelet",
        fault=_F.EVICTED,
        act="pods.fail",
        arguments={
            "reason": "Evicted",
            "message": "The node was low on resource: memory.",
            "disruption": True,
        },
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="evicted-for-ephemeral-storage",  # no DisruptionTarget: it was the pod's own limit
        fault=_F.EVICTED,
        act="pods.fail",
        arguments={"reason": "Evicted", "message": "Usage of EmptyDir volume exceeds the limit."},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="node-shutdown",
        fault=_F.EVICTED,
        act="pods.fail",
        arguments={
            "reason": "Terminated",
            "message": "Pod was terminated in response to imminent node shutdown.",
            "disruption": True,
        },
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="device-plugin-has-no-gpus",
        fault=_F.EVICTED,
        act="pods.fail",
        arguments={
            "reason": "UnexpectedAdmissionError",
            "message": "Allocate failed due to requested number of devices unavailable",
        },
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="kubelet-found-no-room",
        fault=_F.PENDING_TIMEOUT,
        act="pods.fail",
        arguments={"reason": "OutOfnvidia.com/gpu", "message": "Node didn't have enough resource"},
        action=_A.RESTART_JOB,
        counter="none",
        excludes_node=True,
    ),
    # Somebody takes the pod away.
    Row(
        case="preempted",
        fault=_F.PREEMPTED,
        act="pods.disrupt",
        arguments={"reason": "PreemptionByScheduler", "message": "default-scheduler: preempting"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="evicted-by-the-api",
        fault=_F.EVICTED,
        act="pods.evict",
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="deleted-by-the-taint-manager",
        fault=_F.EVICTED,
        act="pods.disrupt",
        arguments={"reason": "DeletionByTaintManager", "message": "Taint manager: deleting"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="collected-with-its-node",
        fault=_F.NODE_LOST,
        act="pods.disrupt",
        arguments={"reason": "DeletionByPodGC", "message": "PodGC: node no longer exists"},
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="deleted-by-hand",
        fault=_F.POD_DELETED,
        act="pods.delete",
        action=_A.RESTART_GROUP,
        counter="infrastructure",
    ),
    # The node.
    Row(
        case="node-dies",
        fault=_F.NODE_LOST,
        act="nodes.kill",
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="node-is-deleted",
        fault=_F.NODE_LOST,
        act="nodes.delete_object",
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="node-out-of-service",
        fault=_F.NODE_LOST,
        act="nodes.taint",
        arguments={
            "key": "node.kubernetes.io/out-of-service",
            "value": "nodeshutdown",
            "effect": "NoExecute",
        },
        action=_A.REPLACE_POD,
        counter="infrastructure",
    ),
    Row(
        case="node-cordoned",
        fault=_F.NODE_TAINTED,
        act="nodes.cordon",
        action=_A.REPLACE_POD,
        counter="none",
    ),
    Row(
        case="node-tainted",
        fault=_F.NODE_TAINTED,
        act="nodes.taint",
        arguments={"key": "example.com/repair", "value": "soon", "effect": "NoExecute"},
        action=_A.REPLACE_POD,
        counter="none",
    ),
    # Nothing in the pod's own record.
    Row(
        case="no-step-any-more",
        fault=_F.HANG,
        act="stop_heartbeat",
        action=_A.RESTART_IN_PLACE,
        counter="infrastructure",
    ),
    Row(
        case="supervisors-wait-for-another-attempt",  # only the heartbeat says so
        fault=_F.RENDEZVOUS,
        act="part",
        action=_A.RESTART_JOB,
        counter="infrastructure",
    ),
    Row(
        case="slot-short-of-what-nobody-counts",  # the scheduler knows, the placement does not
        fault=_F.PENDING_TIMEOUT,
        act="fill_node",
        arguments={"resource": "cpu", "amount": 128},
        action=_A.RESTART_JOB,
        counter="none",
        excludes_node=True,
        stages=("starting",),
    ),
    Row(
        case="slot-taken-by-a-foreign-pod",  # while the gang waits for pods that still end
        fault=_F.PENDING_TIMEOUT,
        act="fill_node",
        arguments={"resource": "nvidia.com/gpu", "amount": 2},
        action=_A.RESTART_JOB,
        counter="none",
        stages=("restarting",),
    ),
)
"""Every class has a row; unit tests of `omni_operator.faults.detect` read those of single pods."""
