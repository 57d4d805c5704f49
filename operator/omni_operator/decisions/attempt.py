"""Why a new attempt is opened, or the job given up: a start, a resume, a fault, a request, a slot
that was taken, too little room. Each opens it with one write that holds all it counts. Pure."""

from collections.abc import Iterator, Sequence

from omni_contract.faults import FAULTS
from omni_contract.names import ANNOTATION_RESTART, TRAINER_CONTAINER, Exit
from omni_contract.plan import JobPlan
from omni_contract.reasons import FailedReason
from omni_contract.records import History, JobHeartbeat
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import ExcludedNode, Incident, JobStatus, read_time, write_time
from omni_operator.decisions.case import Case
from omni_operator.decisions.ending import is_queued, is_suspended
from omni_operator.decisions.gang import pods_by_name
from omni_operator.decisions.placing import can_move
from omni_operator.decisions.steps import Step
from omni_operator.faults.detect import describe, find_cause, gave_up, released_since_s
from omni_operator.faults.nodes import lost_in_s
from omni_operator.state import PodFault, PodState
from omni_operator.status.conditions import clip, count, history_of, merge_history, with_budget
from omni_operator.status.incidents import add_incident, open_incident
from omni_operator.status.life import fail, open_attempt
from omni_planner.restart import Decision, decide_restart

_SETTLE_S = 10.0
"""Pods that only lost a peer are often told of before the one that fell first."""
_HANG_MARGIN_S = 60.0
"""The supervisors see a hang first; the operator only when they do not."""
_UNSCHEDULABLE_S = 30.0
"""The scheduler says at once that a pod has no room; what ends on its node may need a while."""
_REFUSED_S = 600.0
"""A node that took no pod, whatever it is short of, is left out this long."""
_NUM_EXCLUDED = 64
_ASKED_CHARACTERS = 256
_NEW_PODS = (RestartAction.REPLACE_POD, RestartAction.RESTART_GROUP)


def begin(case: Case) -> Step | None:
    """The first attempt, the one after a suspension, and one that somebody asks for."""
    status = case.status
    asked = _asked(case)
    if not status.attempt:
        return _open(case, None)
    if is_queued(case):
        return _open(case, None, message="its queue admitted it again")
    if is_suspended(case):
        return _open(case, None, message="a suspension")
    if asked is not None and asked != status.restart_handled:
        said = f"annotation {ANNOTATION_RESTART} was set to {asked!r}"
        return _open(case, RestartAction.RESTART_JOB, message=said)
    return None


def shrink(case: Case, plan: JobPlan, why: str) -> Step:
    """Go on with a plan of fewer nodes. The job keeps it when room for all returns, until its next
    start or RestartJob, which tries all of them again."""
    action = None if case.status.opened_by is None else RestartAction.RESTART_JOB
    return _open(case, action, plan=plan, message=why)


def replan(case: Case) -> Step:
    """Place the whole job anew, because the plan of its attempt is lost."""
    said = (
        f"the ConfigMap of plan {case.status.plan_hash} was deleted, and its spec or this "
        "operator's version makes another plan now"
    )
    return _open(case, RestartAction.RESTART_JOB, message=said)


def respond(case: Case) -> Step | None:
    """What follows the faults of the attempt; None: there are none to act upon, now."""
    faults = list(_to_act_upon(case))
    if not faults:
        return None
    cause = find_cause(faults)
    if _may_be_a_consequence(cause, case):
        return None
    refused = [f.node for f in faults if f.fault is FaultClass.PENDING_TIMEOUT and f.node]
    return answer(case, cause, faults, refusing=refused)


def answer(
    case: Case, cause: PodFault, faults: Sequence[PodFault], *, refusing: Sequence[str] = ()
) -> Step:
    """Open the attempt that mends a fault, or give the job up. `refusing` are nodes that did not
    take their pods."""
    status = case.status
    ends = [fault.end for fault in faults if fault.end is not None]
    ends = [end for end in ends if end.attempt == status.attempt]
    budget = status.budget
    for end in ends:
        budget = merge_history(budget, end.history)
    status = with_budget(status, budget)
    step = max([status.progress.step, *(end.step for end in ends)])
    decision = decide_restart(
        cause.fault,
        step=step,
        history=history_of(budget),
        spec=case.spec.restart,
        where="by_operator",
        previous=previous_action(status, cause.fault, step=step),
    )
    action = decision.action
    if action in _NEW_PODS and not cause.pod:
        action = RestartAction.RESTART_JOB  # Nobody knows which pod it was.
    if action is RestartAction.RESTART_IN_PLACE and cause.pod:
        action = RestartAction.REPLACE_POD  # Nothing is left in that one to restart.
    if gave_up(cause):
        is_final = action is RestartAction.FAIL_JOB or not _are_limits_raised(case)
        action = RestartAction.FAIL_JOB if is_final else RestartAction.RESTART_JOB
    told = case.tell(status)
    incident = open_incident(cause, action, observed=told.observed)
    said = f"{cause.fault}: {describe(cause)}"
    if action is not RestartAction.FAIL_JOB:
        told = told.tell(_exclude_nodes(told, faults, refusing))
        return _open(told, action, history=decision.history, incident=incident)
    message = f"{said}; {decision.message}" if decision.message else said
    status = add_incident(status, incident)
    return case.transition(fail(status, told.observed, _why_failed(cause, decision), message))


def previous_action(status: JobStatus, fault: FaultClass, *, step: int) -> RestartAction | None:
    """What was done about the same class when it struck last; None where a step was made since.

    The last `without_progress` restarts that were counted are those since the last new step. What
    costs nothing, as it only moves the job, gets no dearer.
    """
    if step > status.budget.highest_step or FAULTS[fault].budget == "none":
        return None
    left = status.budget.without_progress
    for incident in reversed(status.incidents):
        if FAULTS[incident.fault].budget != "none":
            if not left:
                return None
            left -= 1
        if incident.fault is fault:
            return incident.action
    return None


def end_late(case: Case) -> Step | None:
    """Withdraw a released attempt of which not all pods run in time, or to which the scheduler
    gives a node not at all: it is short of something else than what the placement counts."""
    observed, spec = case.observed, case.spec
    released_s, placement = released_since_s(observed), observed.placement
    if released_s is None or placement is None:
        return None
    waited_s = observed.now_s - released_s
    longest_s = spec.restart.ready_after_seconds
    if waited_s < min(_UNSCHEDULABLE_S, longest_s):
        return None
    pods = pods_by_name(observed)
    late = [
        (index, placed, pods.get(placed.name))
        for index, placed in enumerate(placement.pods)
        if not _has_started(pods.get(placed.name))
    ]
    homeless = [at for at in late if _is_unschedulable(at[2])]
    if not homeless and (not late or waited_s < longest_s):
        return None
    index, placed, pod = (homeless or late)[0]
    said = "" if pod is None or pod.scheduled is None else pod.scheduled[2]
    limit = "" if homeless else f" (restart.readyAfterSeconds {longest_s:g})"
    fault = PodFault(
        fault=FaultClass.PENDING_TIMEOUT,
        pod=placed.name,
        index=index,
        node=placed.node,
        time_s=released_s,
        message=f"{len(late)} of {count(len(placement.pods), 'pod')} do not run {waited_s:.0f} s "
        f"after they were released{limit}, such as this one{': ' if said else ''}{said}",
    )
    return answer(case, fault, [fault], refusing=[placed.node for _, placed, _ in homeless])


def find_hang(case: Case) -> tuple[PodFault | None, float | None]:
    """A job that makes no step, by the operator's clock; else the seconds until it would be one."""
    observed, restart = case.observed, case.spec.restart
    running = case.status.condition("Running")
    if running is None or running.status != "True" or not observed.watch_is_healthy:
        return None, None
    progress = observed.progress
    if progress is None or progress.heartbeat.attempt != case.status.attempt:
        since_s, field = read_time(running.last_transition_time), "startAfterSeconds"
        said = "no heartbeat came"
    else:
        beat = progress.heartbeat
        since_s = progress.step_since_s
        field = "hangAfterSeconds" if beat.phase == "training" else "startAfterSeconds"
        said = f"the job is {beat.phase} at step {beat.step}"
    allowed = {
        "hangAfterSeconds": restart.hang_after_seconds,
        "startAfterSeconds": restart.start_after_seconds,
    }
    limit_s = allowed[field] + _HANG_MARGIN_S
    stood_s = observed.now_s - since_s
    if stood_s < limit_s:
        return None, limit_s - stood_s
    fault = PodFault(
        fault=FaultClass.HANG,
        pod="",
        index=None,
        node=None,
        time_s=since_s,
        message=f"{said} and nothing changed for {stood_s:.0f} s "
        f"(restart.{field} {allowed[field]:g} and {_HANG_MARGIN_S:g} s for the supervisors)",
    )
    return fault, None


def find_parting(case: Case) -> tuple[PodFault | None, float | None]:
    """Supervisors that lost each other and wait for another attempt, as only the heartbeat tells;
    else the seconds until that is believed. Whatever took one of them down may still be told."""
    observed, progress = case.observed, case.observed.progress
    if progress is None or not case.status.holds("Running") or not observed.watch_is_healthy:
        return None, None
    beat = progress.heartbeat
    has_parted = beat.attempt == case.status.attempt and beat.last_fault is FaultClass.RENDEZVOUS
    if not has_parted or _was_mended_in_place(case.status, beat):
        return None, None
    since_s = max(progress.fault_since_s, progress.step_since_s)
    left_s = since_s + _SETTLE_S - observed.now_s
    if left_s > 0 or _is_a_node_in_doubt(case):
        return None, max(left_s, 1.0)
    fault = PodFault(
        fault=FaultClass.RENDEZVOUS,
        pod="",
        index=None,
        node=None,
        time_s=since_s,
        message=beat.last_message or "the supervisors lost each other",
    )
    return fault, None


def withdraw(case: Case, index: int, message: str) -> Step:
    """Give the attempt up before it ran, because a slot of it is taken."""
    placement, now_s = case.observed.placement, case.observed.now_s
    assert placement is not None
    placed = placement.all_pods[index]
    fault = PodFault(
        fault=FaultClass.PENDING_TIMEOUT,
        pod=placed.name,
        index=index if index < len(placement.pods) else None,
        node=placed.node,
        time_s=now_s,
        message=message,
    )
    return answer(case, fault, [fault])


def backoff_s(status: JobStatus) -> float:
    """Seconds an attempt waits before it is placed: more after each one that was withdrawn in a
    row, as others seem to want the same nodes."""
    withdrawn = 0
    for incident in reversed(status.incidents):
        is_next = incident.attempt == status.attempt - 1 - withdrawn
        if not is_next or incident.fault is not FaultClass.PENDING_TIMEOUT:
            break
        withdrawn += 1
    return 0.0 if withdrawn < 2 else min(300.0, 5.0 * 2.0 ** (withdrawn - 2))


def _open(
    case: Case,
    action: RestartAction | None,
    *,
    plan: JobPlan | None = None,
    message: str = "",
    history: History | None = None,
    incident: Incident | None = None,
) -> Step:
    observed, status = case.observed, case.status
    if action is not None and status.plan_hash is None:
        action = RestartAction.RESTART_JOB  # Somebody took out what the pods go by.
    if plan is None and action in (None, RestartAction.RESTART_JOB):
        plan = case.new_plan()
    # Else the plan stays: the data services that live on hold it.
    plan_hash = status.plan_hash if plan is None else plan.hash
    assert plan_hash is not None
    opened = open_attempt(
        status,
        observed,
        opened_by=action,
        plan_hash=plan_hash,
        num_nodes=(status.num_nodes or 0) if plan is None else plan.layout.num_nodes,
        history=history,
        incident=incident,
        message=message,
    )
    # Whoever asked for a restart has got one, whatever it was for.
    opened = opened.model_copy(update={"restart_handled": _asked(case)})
    return case.transition(opened, plan)


def _why_failed(cause: PodFault, decision: Decision) -> FailedReason:
    if decision.action is not RestartAction.FAIL_JOB:
        return "GaveUp"  # The supervisors did, and their word is final.
    match decision.reason:
        case "NotRestartable":
            return cause.fault
        case "Default" | "Escalated":
            raise AssertionError("no restart escalates to giving up")
        case reason:
            return reason


def _asked(case: Case) -> str | None:
    """What the annotation says that asks for a restart, as far as a status can hold it."""
    said = case.observed.job.annotations.get(ANNOTATION_RESTART)
    return None if said is None else said[:_ASKED_CHARACTERS]


def _to_act_upon(case: Case) -> Iterator[PodFault]:
    """Faults of ranked pods. A node that is only to be left is left when there is another one."""
    observed = case.observed
    found = [fault for fault in case.faults if fault.index is not None]
    yield from _gated_again(case)
    unwanted = [fault for fault in found if fault.fault is FaultClass.NODE_TAINTED]
    yield from (fault for fault in found if fault.fault is not FaultClass.NODE_TAINTED)
    plan = observed.plan
    if unwanted and plan is not None and can_move(observed, plan, {f.pod for f in unwanted}):
        yield from unwanted


def _gated_again(case: Case) -> Iterator[PodFault]:
    """Pods that were deleted after the release and made again by an operator that did not know."""
    observed = case.observed
    if released_since_s(observed) is None or observed.placement is None:
        return
    pods = pods_by_name(observed)
    for index, placed in enumerate(observed.placement.pods):
        pod = pods.get(placed.name)
        if pod is not None and pod.is_gated:
            yield PodFault(
                fault=FaultClass.POD_DELETED,
                pod=placed.name,
                index=index,
                node=placed.node,
                time_s=pod.created_s,
                message="the pod was deleted after it was released, and not by the operator",
            )


def _are_limits_raised(case: Case) -> bool:
    """Whether the spec allows more restarts than the pods knew of, which go by their plan."""
    plan, now = case.observed.plan, case.spec.restart
    if plan is None:
        return False
    then = plan.spec.restart
    return (
        now.limit > then.limit
        or now.infrastructure_limit > then.infrastructure_limit
        or now.no_progress_limit > then.no_progress_limit
    )


def _may_be_a_consequence(cause: PodFault, case: Case) -> bool:
    """Whether the pod only lost a peer, and what happened to that one may still be told: now, or
    when a node that is not ready counts as lost."""
    if cause.fault is not FaultClass.RENDEZVOUS or cause.exit_code != Exit.PEER_LOST:
        return False
    return case.observed.now_s < cause.time_s + _SETTLE_S or _is_a_node_in_doubt(case)


def _is_a_node_in_doubt(case: Case) -> bool:
    """Whether a node of the attempt may yet count as lost."""
    observed, placement = case.observed, case.observed.placement
    nodes = {placed.node for placed in placement.pods} if placement is not None else set()
    return any(lost_in_s(node, observed, case.spec) is not None for node in nodes)


def _was_mended_in_place(status: JobStatus, beat: JobHeartbeat) -> bool:
    """Whether what a heartbeat tells is what its generation was started for, as a rule may say."""
    return any(
        incident.action is RestartAction.RESTART_IN_PLACE
        and (incident.attempt, incident.generation) == (beat.attempt, beat.generation - 1)
        and incident.fault is beat.last_fault
        and incident.message.startswith(clip(beat.last_message))
        for incident in status.incidents
    )


def _has_started(pod: PodState | None) -> bool:
    trainer = None if pod is None else pod.container(TRAINER_CONTAINER)
    return trainer is not None and (trainer.running_since_s is not None or trainer.is_terminated)


def _is_unschedulable(pod: PodState | None) -> bool:
    return (
        pod is not None
        and pod.node is None
        and pod.scheduled is not None
        and (pod.scheduled[:2] == (False, "Unschedulable"))
    )


def _exclude_nodes(case: Case, faults: Sequence[PodFault], refusing: Sequence[str]) -> JobStatus:
    """Leave nodes with broken devices, or that take no pod, out for a time; those whose time is
    over come back."""
    now_s, status = case.observed.now_s, case.status
    broken_s = case.spec.restart.exclude_node_seconds
    times: dict[str, tuple[float, str]] = {
        fault.node: (broken_s, fault.message)
        for fault in faults
        if FAULTS[fault.fault].excludes_node and fault.node is not None
    }
    times |= {node: (_REFUSED_S, "it took no pod of the job") for node in refusing}
    added = [
        ExcludedNode(name=name, until=write_time(now_s + seconds), reason=clip(reason))
        for name, (seconds, reason) in times.items()
    ]
    kept = [
        node
        for node in status.excluded_nodes
        if read_time(node.until) > now_s and node.name not in times
    ]
    return status.model_copy(update={"excluded_nodes": [*kept, *added][-_NUM_EXCLUDED:]})
