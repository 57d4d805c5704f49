"""How the status follows what was decided about a job: each decision tells its conditions. Pure."""

from typing import Literal

from omni_contract.errors import SpecError
from omni_contract.placement import JobPlacement
from omni_contract.reasons import (
    ConditionReason,
    FailedReason,
    HoldReason,
    QueueReason,
    RoomReason,
)
from omni_contract.records import History
from omni_contract.spec_run import RestartAction
from omni_contract.status import Incident, JobStatus, write_time
from omni_operator.state import Observed
from omni_operator.status.conditions import (
    active_s,
    budget_of,
    count,
    set_condition,
    with_budget,
    with_goodput,
    with_phase,
)
from omni_operator.status.incidents import add_incident
from omni_operator.status.placement import describe_placement, summarize

_Told = tuple[str, bool | None, ConditionReason, str]
"""A condition: its type, whether it holds, why, and the sentence."""


def accept(status: JobStatus, observed: Observed, message: str) -> JobStatus:
    """The spec is valid; `message` says what it asks for."""
    return _tell(status, observed, ("Accepted", True, "Valid", message))


def refuse(
    status: JobStatus,
    observed: Observed,
    error: SpecError | str,
    *,
    reason: Literal["InvalidSpec", "PodRefused"] = "InvalidSpec",
) -> JobStatus:
    """The spec is not valid, or makes pods that the API server refuses. What already runs goes on
    by the plan it has."""
    runs_on = "" if not status.attempt else f"\nattempt {status.attempt} goes on as it was planned"
    return _tell(status, observed, ("Accepted", False, reason, f"{error}{runs_on}"))


def open_attempt(
    status: JobStatus,
    observed: Observed,
    *,
    opened_by: RestartAction | None,
    plan_hash: str,
    num_nodes: int,
    history: History | None = None,
    incident: Incident | None = None,
    message: str = "",
) -> JobStatus:
    """A new attempt begins. All that counts it stands in one status, so it counts once.

    `history` is what is spent with this restart counted (None: this one costs nothing), `message`
    why there is one where no incident says so.
    """
    number = status.attempt + 1
    status = status.model_copy(
        update={
            "attempt": number,
            "generation": 0,
            "opened_by": opened_by,
            "opened_at": write_time(observed.now_s),
            "plan_hash": plan_hash,
            "num_nodes": num_nodes,
            "placement": None,
        }
    )
    if history is not None:
        status = with_budget(status, budget_of(history))
    if incident is not None:
        status = add_incident(status, incident)
        message = f"{incident.fault}: {incident.message}"
    why = f" after {message}" if message else ""
    opened = f"attempt {number} with {count(num_nodes, 'pod')} is opened"
    status = _tell(
        status,
        observed,
        ("Placed", False, "Placing", f"{opened}; nodes are being looked for"),
        ("GangReady", False, "Opened", f"{opened}; no pod of it is released"),
        ("DataServiceReady", False, "Opened", f"{opened}; no data service of it runs"),
        ("Running", False, "Opened", f"{opened}; no pod of it runs"),
    )
    if opened_by is not None:
        text = f"{opened} by {opened_by}{why}"
        status = _tell(status, observed, ("Restarting", True, opened_by, text))
    elif status.condition("Restarting") is not None:
        status = _tell(status, observed, ("Restarting", False, "Opened", f"{opened}{why}"))
    suspended = status.condition("Suspended")
    if suspended is not None and suspended.reason != "Resumed":
        status = _tell(status, observed, ("Suspended", False, "Resumed", f"{opened}{why}"))
    return status


def place(
    status: JobStatus, observed: Observed, placement: JobPlacement, *, config_map: str
) -> JobStatus:
    """Every pod of the attempt has a node."""
    summary = summarize(placement, config_map=config_map)
    status = status.model_copy(update={"placement": summary})
    said = describe_placement(summary)
    topology: _Told
    if placement.group_within is None and placement.satisfied:
        topology = ("TopologySatisfied", True, "Satisfied", f"nothing is asked of groups; {said}")
    elif placement.satisfied:
        topology = ("TopologySatisfied", True, "Satisfied", said)
    else:
        wide = f"looser than spec.topology asks, as its onUnsatisfied allows: {said}"
        topology = ("TopologySatisfied", False, "Relaxed", wide)
    return _tell(status, observed, ("Placed", True, "Placed", said), topology)


def wait_for_room(
    status: JobStatus, observed: Observed, reason: RoomReason, message: str
) -> JobStatus:
    """The attempt has no place yet, and why."""
    return _tell(
        status,
        observed,
        ("Placed", False, reason, message),
        ("TopologySatisfied", None, "NotPlaced", "no placement is made yet"),
    )


def hold_gang(status: JobStatus, observed: Observed, reason: HoldReason, message: str) -> JobStatus:
    """The pods of the attempt may not start yet, and why."""
    return _tell(status, observed, ("GangReady", False, reason, message))


def release_gang(status: JobStatus, observed: Observed) -> JobStatus:
    """All pods of the attempt may start now."""
    pods = () if observed.placement is None else observed.placement.all_pods
    said = f"{count(len(pods), 'pod')} of attempt {status.attempt} were released together"
    return _tell(status, observed, ("GangReady", True, "Released", said))


def tell_unreadable(status: JobStatus, observed: Observed, message: str) -> JobStatus:
    """Its plan or placement cannot be read. Pods that run go on, and what befalls them is not
    seen."""
    said = f"the operator does nothing about the job: {message}"
    return _tell(status, observed, ("Degraded", True, "RecordUnreadable", said))


def suspend(status: JobStatus, observed: Observed, *, num_left: int) -> JobStatus:
    """The job is being suspended, or is, once no pod is left. Suspended time does not count."""
    why = "spec.suspend is true"
    if num_left:
        said = f"{why}; {count(num_left, 'pod')} still save and end"
        return _tell(status, observed, ("Suspended", False, "Suspending", said))
    said = f"{why} and all pods have ended; set it to false to resume"
    status = set_condition(status, "Suspended", True, "Suspended", said, observed=observed)
    return _stop(_pause(status, observed), observed, "Suspended", said, "Placed", "GangReady")


def wait_in_queue(
    status: JobStatus, observed: Observed, reason: QueueReason, message: str, *, num_left: int
) -> JobStatus:
    """The job's queue holds it back. The time does not count. Condition Suspended is the user's."""
    if (suspended := status.condition("Suspended")) is not None and (
        suspended.status == "True" or suspended.reason == "Suspending"
    ):
        # It stays while the job runs again.
        said = "spec.suspend was set to false, and the job went to its queue"
        status = set_condition(status, "Suspended", False, "Resumed", said, observed=observed)
    if num_left:
        said = f"{message}; {count(num_left, 'pod')} still save and end"
        return _tell(status, observed, ("Placed", False, reason, said))
    status = set_condition(status, "Placed", False, reason, message, observed=observed)
    return _stop(_pause(status, observed), observed, reason, message, "GangReady")


def complete(status: JobStatus, observed: Observed, message: str) -> JobStatus:
    """All steps are done. This is for ever."""
    return _end(status, observed, "Completed", "AllStepsDone", message)


def fail(status: JobStatus, observed: Observed, reason: FailedReason, message: str) -> JobStatus:
    """The job is given up. This is for ever."""
    return _end(status, observed, "Failed", reason, message)


def _pause(status: JobStatus, observed: Observed) -> JobStatus:
    """The clock of the job stands still until it begins anew, and nothing of it has a place."""
    if status.condition("TopologySatisfied") is not None:
        said = "nothing is placed while the job rests"
        status = set_condition(
            status, "TopologySatisfied", None, "NotPlaced", said, observed=observed
        )
    return status.model_copy(
        update={
            "active_seconds": round(active_s(status, observed.now_s), 3),
            "start_time": None,
            "placement": None,
        }
    )


def _end(
    status: JobStatus,
    observed: Observed,
    type_: Literal["Completed", "Failed"],
    reason: ConditionReason,
    message: str,
) -> JobStatus:
    status = status.model_copy(update={"completion_time": write_time(observed.now_s)})
    status = with_goodput(status, observed.now_s)
    status = set_condition(status, type_, True, reason, message, observed=observed)
    waited = [one for one in ("Placed", "GangReady") if not status.holds(one)]
    return _stop(
        status, observed, type_, f"the job is {type_}; condition {type_} says why", *waited
    )


def _stop(
    status: JobStatus, observed: Observed, reason: ConditionReason, message: str, *more: str
) -> JobStatus:
    """Nothing of the job runs any more, or is about to."""
    for type_ in (*more, "DataServiceReady", "Running", "Degraded", "Restarting"):
        if status.condition(type_) is not None:
            status = set_condition(status, type_, False, reason, message, observed=observed)
    return with_phase(status, observed)


def _tell(status: JobStatus, observed: Observed, *told: _Told) -> JobStatus:
    for type_, holds, reason, message in told:
        status = set_condition(status, type_, holds, reason, message, observed=observed)
    return with_phase(status, observed)
