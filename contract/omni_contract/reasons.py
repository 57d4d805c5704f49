"""Every reason that a condition of a job can have, by what it answers.

The operator's functions take no others, which the type checker sees to; docs/operations.md explains
each of them, which a test sees to.
"""

from typing import Literal

from omni_contract.spec_run import FaultClass, RestartAction

AcceptedReason = Literal["Valid", "InvalidSpec", "PodRefused"]
"""What is known of the spec."""
PlacementReason = Literal[
    "NotEnoughNodes", "NoRoomUnderTopology", "TopologyLabelsMissing", "UnknownTopologyLevel"
]
"""Why there is no placement."""
RoomReason = PlacementReason | Literal["BackingOff", "QuotaExceeded"]
"""What an attempt without a place waits for."""
QueueReason = Literal["QueueWaiting", "QueueEvicted", "NoQueueSystem"]
"""Why condition Placed of a job that its queue holds back is False."""
TopologyReason = Literal["Satisfied", "Relaxed", "NotPlaced"]
"""How close the placement is to what was asked."""
HoldReason = Literal["CreatingPods", "WritesRefused", "WaitingForOldPods", "NodeNotReady"]
"""What the gates of an attempt wait for."""
PodsReason = Literal["AllPodsRun", "PodsWait", "PodsAreDone", "AllReady", "NotReady"]
"""What the pods and their data services do."""
ConcernReason = Literal[
    "ImageCannotBePulled",
    "ContainerCannotStart",
    "ContainerRestarts",
    "NodeNotReady",
    "SpareLost",
    "NodeTainted",
    "NoHeartbeat",
    "Shrunk",
    "RecordUnreadable",
]
"""What is wrong and does not stop the job, or not yet."""
SuspendedReason = Literal["Suspending", "Suspended", "Resumed"]
"""How far a suspension is."""
FailedReason = (
    PlacementReason
    | FaultClass
    | Literal[
        "GaveUp", "Rule", "UserLimit", "InfrastructureLimit", "NoProgress", "DeadlineExceeded"
    ]
)
"""Why the job was given up; a class of fault where no restart mends it."""

ConditionReason = (
    AcceptedReason
    | RoomReason
    | QueueReason
    | TopologyReason
    | HoldReason
    | PodsReason
    | ConcernReason
    | SuspendedReason
    | FailedReason
    | RestartAction
    | Literal[
        "Opened", "Placing", "Placed", "Released", "Healthy", "Restarted",
        "AllStepsDone", "Completed", "Failed",
    ]
)  # fmt: skip
"""Any of them, and those of one condition alone."""
