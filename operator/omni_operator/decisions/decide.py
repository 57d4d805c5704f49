"""What is to be done about a job now: the order in which its life is looked at. Pure, and safe to
ask again at any point: whatever was done before, the answer is the next step."""

from dataclasses import replace

from omni_contract.errors import SpecError
from omni_contract.placement import JobPlacement
from omni_contract.spec import JobSpec
from omni_operator.decisions import ending
from omni_operator.decisions.attempt import (
    answer,
    begin,
    end_late,
    find_hang,
    find_parting,
    respond,
    withdraw,
)
from omni_operator.decisions.case import Case, edited_fields, read_file
from omni_operator.decisions.gang import find_taken
from omni_operator.decisions.starting import end_strangers, find_place, start
from omni_operator.decisions.steps import Step
from omni_operator.faults.detect import find, next_look_s, released_since_s
from omni_operator.settings import Settings
from omni_operator.state import Observed
from omni_operator.status.conditions import count
from omni_operator.status.life import accept, refuse
from omni_operator.status.progress import absorb_heartbeat
from omni_planner.compile import compile_plan

REFUSED_S = 60.0
"""The API server is asked again this long after it refused the pods of a spec: whoever mends what
it goes by need not edit the job."""
_STARTING_S = 10.0
"""While containers start. Their events come sooner."""


def decide(observed: Observed, settings: Settings) -> Step:
    """The next step of a job."""
    if observed.job.is_deleting:
        # All that belongs to the job goes with it, also while no operator runs.
        return Step(status=observed.job.status)
    case = read_case(observed, settings)
    if isinstance(case, Step):
        return case
    if ending.is_over(case):
        return ending.clean_up(case)
    for look in (ending.end_completed, ending.stop, ending.end_overdue, begin):
        step = look(case)
        if step is not None:
            return step
    placement = case.observed.placement
    if placement is None:
        return find_place(case)
    case = replace(case, faults=tuple(find(case.observed, case.spec)))
    step = respond(case)
    if step is not None:
        return step
    if released_since_s(case.observed) is None:
        return start(case, placement)
    return _run(case, placement)


def read_case(observed: Observed, settings: Settings) -> Case | Step:
    """The case of a job by its spec of now; while that is invalid by the spec its plan was made
    of, and without one nothing is done but saying so."""
    job = observed.job
    file = None
    try:
        file = read_file(job)
        if not job.status.attempt:
            compile_plan(file)  # Some mistakes show only here.
    except SpecError as error:
        status = refuse(job.status, observed, error)
        if observed.plan is None:
            return Step(status=status)
        spec, file = observed.plan.spec, None
    else:
        spec = file.spec
        if observed.refusal:
            status = refuse(job.status, observed, observed.refusal, reason="PodRefused")
            if observed.plan is None:
                return Step(status=status, requeue_after_s=REFUSED_S)
            file = None  # Restarts go by it, pods by the plan they have.
        else:
            status = accept(job.status, observed, _valid(observed, spec))
    status = absorb_heartbeat(status, observed)
    return Case(observed=observed, settings=settings, spec=spec, file=file).tell(status)


def _valid(observed: Observed, spec: JobSpec) -> str:
    """What a valid spec asks for, and what of it waits."""
    job, resources = observed.job, spec.resources
    size = f"{count(resources.nodes, 'node')} with {count(resources.ranks_per_node, 'rank')}"
    said = f"the spec is valid: {size} each"
    waits = [] if observed.plan is None else edited_fields(spec, observed.plan.spec)
    if not waits or job.status.holds("Completed") or job.status.holds("Failed"):
        return said
    edited = f"{', '.join(waits)} {'was' if len(waits) == 1 else 'were'} edited"
    return (
        f"{said}; {edited} after attempt {job.status.attempt} was planned, and its pods go by what "
        f"was: it counts from the next restart of all pods: kubectl mmtj restart {job.key.name}"
    )


def _run(case: Case, placement: JobPlacement) -> Step:
    """Look after an attempt that was released."""
    observed, spec = case.observed, case.spec
    plan = case.plan()
    taken = None if plan is None else find_taken(observed, placement, spec, plan)
    if taken is not None:
        return withdraw(case, *taken)
    late = end_late(case)
    if late is not None:
        return late
    parting, parts_in_s = find_parting(case)
    hang, hangs_in_s = find_hang(case)
    if (found := parting or hang) is not None:
        return answer(case, found, [found])
    status = case.look()
    ends = end_strangers(case, placement)
    is_running = status.holds("Running")
    times = [
        next_look_s(observed, spec),
        parts_in_s,
        hangs_in_s,
        case.settings.progress_poll_s if is_running else _STARTING_S,
    ]
    return Step(
        status=status,
        plan=plan,
        writes=(ends,),
        needs_objects=True,
        requeue_after_s=min(time for time in times if time is not None),
    )
