"""How a job comes to rest: Completed, Failed, Suspended, and what is left of it then. Pure."""

from collections.abc import Sequence

from omni_contract.status import read_time
from omni_operator.decisions.case import Case
from omni_operator.decisions.gang import end_pods, pods_by_name
from omni_operator.decisions.steps import Delete, Step, Write
from omni_operator.faults.nodes import is_node_lost
from omni_operator.kinds import JOB
from omni_operator.state import QUEUE_REASONS, PodState
from omni_operator.status.conditions import active_s, count
from omni_operator.status.life import complete, fail, suspend, wait_in_queue

_LOOK_AGAIN_S = 10.0
"""While pods end. Their events come sooner, unless their node is lost."""


def is_over(case: Case) -> bool:
    """Whether the job has ended for ever."""
    return case.status.holds("Completed") or case.status.holds("Failed")


def clean_up(case: Case) -> Step:
    """What is done about a job that is over: pods go, unless they are kept to be looked at, and
    after its time to live the job itself. Nothing is ever made again."""
    observed, spec, status = case.observed, case.spec, case.status
    kept = {"None": (), "Failed": ("Failed",), "All": ("Failed", "Succeeded")}
    phases = kept[spec.keep_pods or "Failed"]
    rest = [pod for pod in observed.pods if pod.phase not in phases]
    deletes: tuple[Write, ...] = end_pods(observed, spec, rest)
    times = [_LOOK_AGAIN_S] if rest else []
    if spec.ttl_seconds_after_finished is not None and status.completion_time is not None:
        ends_s = read_time(status.completion_time) + spec.ttl_seconds_after_finished
        if ends_s <= observed.now_s:
            job = observed.job
            deletes = (Delete(kind=JOB, name=job.key.name, uid=job.uid),)
        else:
            times.append(ends_s - observed.now_s)
    return Step(status=status, writes=(deletes,), requeue_after_s=min(times, default=None))


def end_completed(case: Case) -> Step | None:
    """Completed, when every ranked pod ended well. After the last step, which the heartbeat tells,
    a pod that is gone or on a lost node has done its work, too."""
    observed = case.observed
    placement, progress = observed.placement, observed.progress
    if placement is None:
        return None
    is_done = (
        progress is not None
        and progress.heartbeat.attempt == placement.attempt
        and progress.heartbeat.phase == "done"
    )
    pods = pods_by_name(observed)
    for placed in placement.pods:
        pod = pods.get(placed.name)
        if pod is not None and pod.phase == "Succeeded":
            continue
        if not is_done or not (pod is None or is_node_lost(placed.node, observed, case.spec)):
            return None
    steps = case.status.progress.step
    said = f"all {count(len(placement.pods), 'pod')} ended well"
    message = f"{said} after {count(steps, 'step')}" if steps else said
    return case.transition(complete(case.status, observed, message))


def end_overdue(case: Case) -> Step | None:
    """Failed, when the job ran longer than it may."""
    limit_s = case.spec.active_deadline_seconds
    ran_s = active_s(case.status, case.observed.now_s)
    if limit_s is None or ran_s < limit_s:
        return None
    message = f"the job ran {ran_s:.0f} s, longer than activeDeadlineSeconds {limit_s}"
    return case.transition(fail(case.status, case.observed, "DeadlineExceeded", message))


def is_suspended(case: Case) -> bool:
    """Whether the job was told to stop and has not begun anew."""
    said = case.status.condition("Suspended")
    return said is not None and (said.status == "True" or said.reason == "Suspending")


def is_queued(case: Case) -> bool:
    """Whether the job's queue held it back and it has not begun since."""
    said = case.status.condition("Placed")
    return said is not None and said.reason in QUEUE_REASONS


def stop(case: Case) -> Step | None:
    """End the pods of a job that is suspended or that its queue holds back, and wait. Pods get
    their time to save a checkpoint.

    That it stops is written before the first pod is deleted, so that nobody takes that for a fault.
    """
    observed, status = case.observed, case.status
    num_left = len(living_pods(case))
    admission = observed.admission
    if case.spec.suspend:
        if num_left and status.holds("Suspended"):
            stopped = status  # Pods that came back from a lost node.
        else:
            stopped = suspend(status, observed, num_left=num_left)
    elif admission is not None and admission.reason is not None:
        stopped = wait_in_queue(
            status, observed, admission.reason, admission.message, num_left=num_left
        )
    else:
        return None
    if status.attempt and not is_suspended(case) and not is_queued(case):
        return case.transition(stopped)
    return Step(
        status=stopped,
        writes=(end_pods(observed, case.spec, observed.pods),),
        requeue_after_s=_LOOK_AGAIN_S if observed.pods else None,
    )


def living_pods(case: Case) -> Sequence[PodState]:
    """Pods of the job that still hold something: not over, and not on a lost node."""
    observed, spec = case.observed, case.spec
    return [
        pod
        for pod in observed.pods
        if not pod.is_terminal
        and not (pod.node is not None and is_node_lost(pod.node, observed, spec))
    ]
