"""Whether a run of `make e2e` came to what was expected: a record in, a summary out. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from omni_contract.spec_run import RestartAction
from omni_contract.status import STAGES, Incident, JobStatus, read_time
from tests.e2e.cluster.expected import EXPECTED
from tests.e2e.cluster.history import (
    DoneStep,
    Pair,
    Window,
    accepted,
    done_steps,
    incidents_of,
    status_of,
    windows_of,
)
from tests.e2e.cluster.record import Check, Fault, Record, Seen

TOLD_WITHIN_S: Final = 20.0
"""Between the first step as the incident tells it and as the trainer wrote it: heartbeats come
every 5 s and are read every 10 s, and what was over before the incident was seen took 0 s."""


class FaultResult(BaseModel):
    """What became of one fault."""

    model_config = ConfigDict(frozen=True)

    name: Fault
    detect_s: float | None
    """From the injection to the time of its incident; None: it has none."""
    resume_s: float | None
    """From the injection to the end of the first step after it, which is of the new generation or
    attempt; without a restart, after what broke was back."""
    recover_s: float | None
    """From the injection to the end of the first step that had never been done before."""
    lost_steps: int
    """Steps that were done again."""
    right_class: bool
    """Whether it made the one incident of the class that was expected, or none, as expected."""
    right_action: bool
    """The same of the action."""
    stages: Mapping[str, float]
    """Seconds of each stage of the recovery, as the incident tells them."""


class Summary(BaseModel):
    """The content of summary.json."""

    model_config = ConfigDict(frozen=True)

    faults: Sequence[FaultResult]
    samples_lost: int
    """Pieces that the undisturbed job consumed and the history of this one lacks."""
    samples_repeated: int
    """Pieces that this history has more often than the undisturbed job."""
    loss_equal_to_undisturbed: bool
    """At every step, to the last bit."""
    restarts_counted: int
    """By the status."""
    final_phase: str
    leftover_pods: int
    goodput: float | None
    """By the status: useful seconds over all."""
    breaches: Sequence[str]
    """Whatever is not as it must be, in sentences; none: the run passed."""


def summarize(record: Record) -> Summary:
    """The numbers of a run, and every breach of what was expected."""
    windows, done = windows_of(record), done_steps(record.steps)
    history, wanted = accepted(done), accepted(done_steps(record.undisturbed))
    taken = Counter(piece for one in history.values() for piece in one.samples)
    planned = Counter(piece for one in wanted.values() for piece in one.samples)
    final = status_of(record.seen[-1]) if record.seen else JobStatus()
    results = [result_of(window, done) for window in windows]
    return Summary(
        faults=results,
        samples_lost=(planned - taken).total(),
        samples_repeated=(taken - planned).total(),
        loss_equal_to_undisturbed=bool(wanted)
        and {step: one.loss for step, one in history.items()}
        == {step: one.loss for step, one in wanted.items()},
        restarts_counted=final.restarts,
        final_phase=final.phase,
        leftover_pods=len(record.leftover_pods),
        goodput=final.goodput,
        breaches=[
            *_run_breaches(record, final),
            *_incident_breaches(record, windows, final),
            *(f"{w.injection.name}: {said}" for w in windows for said in _breaches(w)),
            *(
                f"{window.injection.name}: {said}"
                for window, result in zip(windows, results, strict=True)
                for said in _recovery_breaches(window, result)
            ),
            *_training_breaches(record, done, history, wanted),
            *_check_breaches(record),
        ],
    )


def result_of(window: Window, done: Sequence[DoneStep]) -> FaultResult:
    """What became of one fault."""
    began_s, expectation = window.injection.began_s, window.expectation
    incident = window.incident
    later = sorted((d for d in done if began_s < d.at_s <= window.end_s), key=lambda d: d.at_s)
    if incident is not None:
        later = [one for one in later if one.pair > window.pair]
    else:  # what ranks had in hand they train without what broke
        since_s = window.injection.recovered_s
        later = [one for one in later if since_s is not None and one.at_s >= since_s]
    fresh = (
        one.at_s
        for one in later
        if not any(d.step >= one.step for d in done if d.pair <= one.pair and d.at_s < one.at_s)
    )
    new_pairs = {one.pair for one in later if one.pair > window.pair}
    again = [one for one in done if one.pair in new_pairs and _was_done_before(one, done)]
    is_one = len(window.incidents) == 1
    is_none = not window.incidents
    return FaultResult(
        name=window.injection.name,
        detect_s=None if incident is None else _seconds(read_time(incident.time) - began_s),
        resume_s=_seconds(later[0].at_s - began_s) if later else None,
        recover_s=next((_seconds(at_s - began_s) for at_s in fresh), None),
        lost_steps=len(again),
        right_class=is_none
        if expectation.fault is None
        else is_one and incident is not None and incident.fault is expectation.fault,
        right_action=is_none and window.restarts == 0
        if expectation.action is None
        else is_one and incident is not None and incident.action is expectation.action,
        stages={} if incident is None else dict(incident.seconds),
    )


def _was_done_before(one: DoneStep, done: Sequence[DoneStep]) -> bool:
    return any(d.step == one.step and d.pair < one.pair and d.at_s < one.at_s for d in done)


def _run_breaches(record: Record, final: JobStatus) -> Iterator[str]:
    if record.error is not None:
        yield f"the run was broken off: {record.error}"
    injected = [injection.name for injection in record.injections]
    if injected != [row.name for row in EXPECTED]:
        yield f"the faults injected are not those of the table, in its order: {_list(injected)}"
    times = [injection.began_s for injection in record.injections]
    if times != sorted(times):
        yield "the faults do not stand in the order in which they were injected"
    if final.phase != "Completed":
        yield f"the job ended {final.phase} ({final.reason}), not Completed"
    if final.goodput is None or not 0 < final.goodput <= 1:
        yield f"the goodput is {final.goodput}, not a share"
    if record.leftover_pods:
        yield f"pods are left: {_list(record.leftover_pods)}"


def _incident_breaches(
    record: Record, windows: Sequence[Window], final: JobStatus
) -> Iterator[str]:
    incidents = incidents_of(record)
    caused = [incident for window in windows for incident in window.incidents]
    for incident in incidents:
        if incident not in caused:
            yield f"an incident before any fault: {_told(incident)}"
        if incident not in final.incidents:
            yield f"an incident that the last status has no more: {_told(incident)}"
    pairs = Counter((incident.attempt, incident.generation) for incident in incidents)
    for (attempt, generation), times in pairs.items():
        if times > 1:
            yield f"attempt {attempt}.{generation} ended {times} times, by as many incidents"
    wanted = {
        "user": sum(row.counter == "user" for row in EXPECTED),
        "infrastructure": sum(row.counter == "infrastructure" for row in EXPECTED),
    }
    counted = {"user": final.budget.user, "infrastructure": final.budget.infrastructure}
    if counted != wanted:
        yield f"the last status counts {counted}, not {wanted}"
    if final.restarts != (restarts := sum(row.restarts for row in EXPECTED)):
        yield f"the last status counts {final.restarts} restarts, not {restarts}"


def _breaches(window: Window) -> Iterator[str]:
    """What the cluster showed in the time of one fault."""
    expectation, told = window.expectation, [_told(incident) for incident in window.incidents]
    if expectation.fault is None:
        if told:
            yield f"no incident was expected, but there is {_list(told)}"
    elif len(told) != 1:
        yield f"one incident was expected, {expectation.incident}, not {len(told)}: {_list(told)}"
    else:
        (incident,) = window.incidents
        if incident.fault is not expectation.fault:
            yield f"its class is {incident.fault}, not {expectation.fault}: {incident.message}"
        if incident.action is not expectation.action:
            yield f"its action is {incident.action}, not {expectation.action}"
        ended = (incident.attempt, incident.generation)
        if ended != window.pair:
            yield f"it ended {_dotted(ended)}, but struck {_dotted(window.pair)}"
    yield from _count_breaches(window)
    yield from _pod_breaches(window)
    if expectation.partitions and window.incidents:
        yield from _node_breaches(window, window.incidents[0])


def _count_breaches(window: Window) -> Iterator[str]:
    before, after = status_of(window.before), status_of(window.last)
    counter = window.expectation.counter
    grown = {
        "user": after.budget.user - before.budget.user,
        "infrastructure": after.budget.infrastructure - before.budget.infrastructure,
    }
    wanted = {name: int(name == counter) for name in grown}
    if grown != wanted:
        yield f"the counters grew by {grown}, not by {wanted}"
    if window.restarts != window.expectation.restarts:
        yield f"restarts grew by {window.restarts}, not by {window.expectation.restarts}"
    pair, last = window.pair, (after.attempt, after.generation)
    action = window.expectation.action
    if action is None:
        following = pair
    elif action is RestartAction.RESTART_IN_PLACE:
        following = (pair[0], pair[1] + 1)
    else:
        following = (pair[0] + 1, 0)
    if last != following:
        yield f"{_dotted(pair)} was followed by {_dotted(last)}, not by {_dotted(following)}"


def _pod_breaches(window: Window) -> Iterator[str]:
    expectation = window.expectation
    before, after = _ranked(window.before), _ranked(window.last)
    new = after - before
    if expectation.pods == "stay":
        ever = {pod.uid for seen in window.looks for pod in seen.pods.values()}
        known = {pod.uid for pod in window.before.pods.values()}
        # A job that ends takes its pods along.
        if ever - known or (before - after and status_of(window.last).phase != "Completed"):
            yield "pods were to stay, but some are new or gone"
    elif not new:
        yield f"{expectation.action} was to make a new pod, but the same ones train"
    elif expectation.pods == "one is new" and len(new) != 1:
        yield f"{expectation.action} was to make one new pod, not {len(new)}"


def _node_breaches(window: Window, incident: Incident) -> Iterator[str]:
    """What is wrong with a node that was cut off and came back."""
    node = incident.kubernetes_node
    old = {pod.uid: name for name, pod in window.before.pods.items() if pod.node == node}
    if not any(pod.node == node and pod.index == 0 for pod in window.before.pods.values()):
        yield f"the rendezvous host did not run on {node}, which was lost"
    left = [old[pod.uid] for pod in window.last.pods.values() if pod.uid in old]
    if left:
        yield f"{node} is back and still has {_list(left)} of the attempt before"
    attempt = status_of(window.last).attempt
    strange = [n for n, pod in window.last.pods.items() if pod.attempt != attempt]
    if strange:
        yield f"pods of other attempts than {attempt} are left: {_list(strange)}"


def _recovery_breaches(window: Window, result: FaultResult) -> Iterator[str]:
    """Whether it trained on, and whether the incident tells of that what the trainer wrote."""
    incident = window.incident
    if window.injection.recovered_s is None or result.recover_s is None:
        yield "the job did not train on to a new step"
    if incident is None:
        if result.lost_steps:
            yield f"{result.lost_steps} steps were done again without a restart"
        return
    in_place = incident.action is RestartAction.RESTART_IN_PLACE
    missing = {"firstStep"} if in_place else set(STAGES)
    missing -= incident.seconds.keys()
    # Kubernetes cuts its times to whole seconds.
    if result.detect_s is not None and incident.seconds.get("detect", 0) > result.detect_s + 1:
        yield (
            f"its incident tells of {incident.seconds['detect']:.1f} s until it was seen, but the "
            f"fault was {result.detect_s:.1f} s before"
        )
    if missing:
        yield f"its incident tells nothing of {_list(sorted(missing, key=STAGES.index))}"
    elif result.resume_s is not None:
        after_s = sum(s for stage, s in incident.seconds.items() if stage != "detect")
        told_s = read_time(incident.time) + after_s - window.injection.began_s
        if abs(told_s - result.resume_s) > TOLD_WITHIN_S:
            yield (
                f"its incident tells of the first step {told_s:.1f} s after the fault, but it was "
                f"{result.resume_s:.1f} s"
            )


def _training_breaches(
    record: Record,
    done: Sequence[DoneStep],
    history: Mapping[int, DoneStep],
    wanted: Mapping[int, DoneStep],
) -> Iterator[str]:
    """Whether the same was trained as without faults, by the bit: ranks, plan and order of sums are
    the same, wherever they run."""
    if len(record.undisturbed) != 1:
        yield f"the undisturbed job trained as {len(record.undisturbed)} pairs, not as one"
    steps = set(range(1, record.num_steps + 1))
    for name, found in (("undisturbed job", wanted), ("job", history)):
        if found.keys() != steps:
            wrong = _in_short(found.keys() ^ steps)
            yield f"the {name} did not do steps 1 to {record.num_steps} and no others: {wrong}"
    for step, one in wanted.items():
        if not one.samples or not math.isfinite(one.loss):
            yield f"the undisturbed job has no samples, or no finite loss, at step {step}"
    others = [d for d in done if d.step in wanted and d.loss != wanted[d.step].loss]
    for one in others:
        yield (
            f"the loss of step {one.step} of {_dotted(one.pair)} is {one.loss!r}, undisturbed "
            f"{wanted[one.step].loss!r}"
        )
    for step in sorted(history.keys() & wanted.keys()):
        if list(history[step].samples) != list(wanted[step].samples):
            yield f"step {step} consumed other samples, or in another order, than undisturbed"
    for one in done:
        # One that was done again may have lost what some ranks had yet to write.
        if one.step in wanted and Counter(one.samples) - Counter(wanted[one.step].samples):
            yield f"step {one.step} of {_dotted(one.pair)} consumed samples that are not its own"
    reached = 0
    for of_pair in sorted(record.steps, key=lambda s: (s.attempt, s.generation)):
        own = sorted(of_pair.losses)
        if own and (own[0] > reached + 1 or own != list(range(own[0], own[-1] + 1))):
            pair = of_pair.attempt, of_pair.generation
            yield f"{_dotted(pair)} left out steps: it did {own[0]} to {own[-1]} after {reached}"
        reached = max([reached, *own])


def _check_breaches(record: Record) -> Iterator[str]:
    made = Counter(result.name for result in record.checks)
    for name in Check:
        wanted = sum(row.partitions for row in EXPECTED) if name is Check.NODE_CLEAN else 1
        if made[name] < wanted:
            yield f"check {name} was made {made[name]} times, not {wanted}"
    for result in record.checks:
        if not result.holds:
            yield f"check {result.name} does not hold: {result.detail}"


def _ranked(seen: Seen) -> set[str]:
    """Pods with ranks, by uid."""
    return {pod.uid for pod in seen.pods.values() if pod.index is not None}


def _told(incident: Incident) -> str:
    pair = incident.attempt, incident.generation
    return f"{incident.fault}, {incident.action} of {_dotted(pair)} at {incident.time}"


def _dotted(pair: Pair) -> str:
    return f"attempt {pair[0]}.{pair[1]}"


def _list(parts: Sequence[object]) -> str:
    return ", ".join(map(str, parts)) if parts else "none"


def _in_short(steps: Iterable[int]) -> str:
    """Steps, each row of them as its first and last."""
    rows: list[list[int]] = []
    for step in sorted(steps):
        if rows and step == rows[-1][-1] + 1:
            rows[-1] = [rows[-1][0], step]
        else:
            rows.append([step])
    return _list([" to ".join(map(str, row)) for row in rows])


def _seconds(span_s: float) -> float:
    return round(span_s, 3)
