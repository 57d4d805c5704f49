"""The way of an attempt from a number in the status to pods that are released together. Pure."""

from typing import Final

from omni_contract.errors import SpecError
from omni_contract.placement import JobPlacement
from omni_contract.plan import JobPlan
from omni_contract.reasons import RoomReason
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import read_time
from omni_operator.decisions.attempt import backoff_s, replan, shrink, withdraw
from omni_operator.decisions.case import Case, plan_on
from omni_operator.decisions.gang import (
    end_pods,
    find_hold,
    find_taken,
    missing_pods,
    releases,
    strangers,
)
from omni_operator.decisions.placing import place_attempt, place_plan, survey
from omni_operator.decisions.steps import Create, Delete, Step
from omni_operator.kinds import CONFIG_MAP
from omni_operator.render.log_reader import with_log_reader
from omni_operator.render.names import ObjectNames
from omni_operator.render.objects import render_placement
from omni_operator.state import Observed
from omni_operator.status.life import fail, hold_gang, place, release_gang, wait_for_room
from omni_planner.placement.types import NoPlacement, Placement
from omni_planner.placement.units import shrink_candidates

QUOTA_EXCEEDED: Final = "QuotaExceeded"
_QUOTA_S = 30.0
"""A namespace's quota is tried again this long after it refused a pod."""
_ROOM_S = (5.0, 60.0)
"""A job that waits for room looks again this often, rarer the longer it waits. Room that is freed
wakes it at once."""
_ENDING_S = 5.0
"""While pods of the attempt before end. Their events come sooner, but for nodes that get lost."""


def find_place(case: Case) -> Step:
    """Choose the nodes of an attempt that has none.

    What is chosen is reserved before any other job is looked at, so two never hold half each. Small
    jobs may pass a large one that waits: order and fairness are a queue's.
    """
    observed, status = case.observed, case.status
    waited_s = observed.now_s - (read_time(status.opened_at) if status.opened_at else 0)
    if (left_s := backoff_s(status) - waited_s) > 0:
        said = f"its nodes were taken by others; others are chosen {backoff_s(status):.0f} s later"
        return _wait(case, "BackingOff", said, left_s)
    plan = case.plan()
    if plan is None:
        return replan(case)
    found = place_attempt(observed, plan, case.settings)
    if isinstance(found, JobPlacement):
        bare = render_placement(observed.job, found)
        body = with_log_reader(bare, observed.job, plan, found, case.settings)
        return Step(
            status=status,
            plan=plan,
            placement=found,
            writes=((Create(kind=CONFIG_MAP, body=body),),),
            requeue_after_s=0,
        )
    how = case.spec.topology.on_unsatisfied
    if how == "Fail":
        message = f"{found.message}; topology.onUnsatisfied is Fail"
        return case.transition(fail(status, observed, found.reason, message))
    if how == "Shrink" and (smaller := _find_smaller(case, plan)) is not None:
        return shrink(case, smaller, found.message)
    shortest_s, longest_s = _ROOM_S
    again_s = min(longest_s, max(shortest_s, waited_s / 2))
    return _wait(case, found.reason, found.message, again_s)


def start(case: Case, placement: JobPlacement) -> Step:
    """Make the pods of an attempt, end those of older ones, and open all gates when nothing is in
    the way any more."""
    observed = case.observed
    config_map = ObjectNames.of(observed.job).placement(placement.attempt)
    plan = case.plan()
    if plan is None:
        return replan(case)
    placed = place(case.status, observed, placement, config_map=config_map)
    if (left_s := _quota_wait_s(case)) is not None:
        if left_s > 0:
            return _leave_quota(case, left_s)
        # By itself: the time of the next refusal is taken from this.
        return Step(status=placed, requeue_after_s=0)
    case = case.tell(placed)
    taken = find_taken(observed, placement, case.spec, plan)
    if taken is not None:
        return withdraw(case, *taken)
    ends = end_strangers(case, placement)
    made = missing_pods(observed, placement, plan, case.settings)
    held = find_hold(observed, placement, case.spec)
    if made or held is not None:
        if held is not None:
            case = case.tell(hold_gang(case.status, observed, held.reason, held.message))
        return Step(
            status=case.look(),
            plan=plan,
            writes=((*ends, *made),),
            goes_on=bool(made),
            needs_objects=True,
            requeue_after_s=0 if made else _ENDING_S,
        )
    opened = releases(observed, placement, case.settings)
    if opened:
        return Step(status=case.status, writes=(ends, opened), goes_on=True, requeue_after_s=0)
    case = case.tell(release_gang(case.status, observed))
    return Step(status=case.look(), writes=(ends,), requeue_after_s=0)


def end_strangers(case: Case, placement: JobPlacement) -> tuple[Delete, ...]:
    """Delete what older attempts left. Of keepPods, All keeps those that have ended."""
    keeps_ended = case.spec.keep_pods == "All"
    old = [
        pod for pod in strangers(case.observed, placement) if not (keeps_ended and pod.is_terminal)
    ]
    return end_pods(case.observed, case.spec, old)


def refuse_for_quota(case: Case, message: str) -> Step:
    """What follows when the namespace's quota took no more pods: those that were made go, so that
    they do not hold what other jobs need, and all are made again later."""
    said = f"{message}; tried again every {_QUOTA_S:.0f} s; raise the quota or free some of it"
    status = wait_for_room(case.status, case.observed, QUOTA_EXCEEDED, said)
    again_s = _QUOTA_S if case.observed.placement is None else 0
    return Step(status=status, requeue_after_s=again_s)


def refuse_for_good(case: Case, name: str, message: str) -> Step:
    """What follows when the API server takes an object of the job under no circumstances."""
    said = (
        f"the API server refused {name}: {message}; mend podTemplate or what refuses it, and "
        "create the job anew"
    )
    return case.transition(fail(case.status, case.observed, FaultClass.START_ERROR, said))


def tell_hindrance(step: Step, observed: Observed, message: str) -> Step:
    """What is told when the API server did not take a step's writes. They are tried again, perhaps
    for long: of a webhook that is away not only the operator's log should tell."""
    status = step.status
    if step.goes_on or step.placement is not None:
        said = f"the API server does not take what the attempt needs: {message}; it is tried again"
        status = hold_gang(status, observed, "WritesRefused", said)
    return Step(status=status)


def _wait(case: Case, reason: RoomReason, message: str, again_s: float) -> Step:
    """Wait for room. Pods that will not live on in the attempt free theirs."""
    observed = case.observed
    lives_on = case.status.opened_by not in (None, RestartAction.RESTART_JOB)
    ends = () if lives_on else end_pods(observed, case.spec, observed.pods)
    case = case.tell(wait_for_room(case.status, observed, reason, message))
    return Step(
        status=case.look(),
        writes=(ends,),
        gives_up_room=True,
        requeue_after_s=again_s,
    )


def _find_smaller(case: Case, plan: JobPlan) -> JobPlan | None:
    """The largest plan with fewer nodes that has room."""
    room = survey(case.observed, case.spec)
    if case.file is None or isinstance(room, NoPlacement):
        return None
    for nodes in shrink_candidates(case.spec):
        if nodes < plan.layout.num_nodes and nodes <= len(room.free):
            try:
                smaller = plan_on(case.file, nodes)
            except SpecError:
                continue  # Its pipelines cannot be scheduled.
            if isinstance(place_plan(smaller, room), Placement):
                return smaller
    return None


def _quota_wait_s(case: Case) -> float | None:
    """Seconds until a quota that refused is tried again; None: none did."""
    placed = case.status.condition("Placed")
    if placed is None or placed.status != "False" or placed.reason != QUOTA_EXCEEDED:
        return None
    return read_time(placed.last_transition_time) + _QUOTA_S - case.observed.now_s


def _leave_quota(case: Case, left_s: float) -> Step:
    """Wait with nothing held. What gets taken meanwhile is noticed before the gates open."""
    pods = [pod for pod in case.observed.pods if pod.is_gated]
    ends = end_pods(case.observed, case.spec, pods)
    return Step(status=case.status, writes=(ends,), gives_up_room=True, requeue_after_s=left_s)
