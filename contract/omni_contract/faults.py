"""The table of faults: who notices a class, what is done about it, which budget pays.

Launcher, supervisors, operator, docs and tests all read this one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from omni_contract.spec_run import FaultClass, RestartAction

Budget = Literal["user", "infrastructure", "none"]
"""Which limit a restart counts against: restart.limit, restart.infrastructureLimit, neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """What is known about one class of fault."""

    detector: str
    """How it is noticed, in a phrase for the docs."""
    in_pod: RestartAction | None
    """What supervisors (or the launcher) do by themselves; None: they cannot notice it."""
    by_operator: RestartAction
    """What the operator does first where it falls to it; it escalates when the class returns."""
    budget: Budget
    excludes_node: bool = False
    """Whether the node is left out of later placements for a time."""


_A = RestartAction
FAULTS: Final[Mapping[FaultClass, FaultRow]] = MappingProxyType(
    {
        FaultClass.APP_ERROR: FaultRow(
            detector="a rank or the trainer container ends with an exit code of its own",
            in_pod=_A.RESTART_IN_PLACE,
            by_operator=_A.REPLACE_POD,
            budget="user",
        ),
        FaultClass.OOM: FaultRow(
            detector="the kernel kills for memory: a rank (cgroup v1) or the container (OOMKilled)",
            in_pod=_A.RESTART_IN_PLACE,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
        FaultClass.HANG: FaultRow(
            detector="no new step in time, by the ranks' progress files or the progress Lease",
            in_pod=_A.RESTART_IN_PLACE,
            by_operator=_A.RESTART_IN_PLACE,
            budget="infrastructure",
        ),
        FaultClass.NODE_LOST: FaultRow(
            detector="the node is not Ready for nodeLostAfterSeconds, or gone, and no step is made",
            in_pod=None,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
        FaultClass.NODE_TAINTED: FaultRow(
            detector="the node is cordoned, drained or has a NoExecute taint the pod tolerates not",
            in_pod=None,
            by_operator=_A.REPLACE_POD,
            budget="none",  # nothing failed, and it only moves where there is another node
        ),
        FaultClass.GPU_HARDWARE: FaultRow(
            detector="the supervisor finds the device broken and says so when it ends",
            in_pod=None,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
            excludes_node=True,
        ),
        FaultClass.DATA_SERVICE: FaultRow(
            detector="the data service dies again and again, or the object store does not answer",
            in_pod=_A.RESTART_IN_PLACE,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
        FaultClass.RENDEZVOUS: FaultRow(
            detector="the supervisors lose each other and none of them has a cause",
            in_pod=_A.RESTART_JOB,
            by_operator=_A.RESTART_JOB,
            budget="infrastructure",
        ),
        FaultClass.PREEMPTED: FaultRow(
            detector="the pod's DisruptionTarget condition: PreemptionByScheduler",
            in_pod=None,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
        FaultClass.EVICTED: FaultRow(
            detector="DisruptionTarget: EvictionByEvictionAPI, DeletionByTaintManager, "
            "TerminationByKubelet; pod reason Evicted",
            in_pod=None,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
        FaultClass.POD_DELETED: FaultRow(
            detector="a pod of the attempt is gone or being deleted, and not by the operator",
            in_pod=None,
            by_operator=_A.RESTART_GROUP,
            budget="infrastructure",
        ),
        FaultClass.START_ERROR: FaultRow(
            detector="image, secret or admission refused; exit code 2: a mistake in job or data",
            in_pod=_A.FAIL_JOB,
            by_operator=_A.FAIL_JOB,
            budget="user",  # where a rule restarts it all the same
        ),
        FaultClass.PENDING_TIMEOUT: FaultRow(
            detector="not all pods run within readyAfterSeconds, or a slot was taken by others",
            in_pod=None,
            by_operator=_A.RESTART_JOB,
            budget="none",
        ),
        FaultClass.UNKNOWN: FaultRow(
            detector="a process was killed and nobody says why",
            in_pod=_A.RESTART_IN_PLACE,
            by_operator=_A.REPLACE_POD,
            budget="infrastructure",
        ),
    }
)
"""Every class has its row."""
