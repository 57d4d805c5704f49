"""What the judge of `make e2e` says of made-up runs, good ones and broken ones."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from omni_contract.status import STAGES, Incident, read_time, write_time
from tests.e2e.cluster.history import status_of
from tests.e2e.cluster.judge import Summary, summarize
from tests.e2e.cluster.record import Check, Fault, Pod, Record, Seen
from tests.e2e.made_record import NUM_STEPS, STRIKES, loss_of, made_record, with_status

Change = Callable[[Record], Record]


@pytest.fixture(scope="module")
def record() -> Record:
    return made_record()


@pytest.fixture(scope="module")
def summary(record: Record) -> Summary:
    return summarize(record)


def test_a_run_in_which_all_comes_as_it_must_has_no_breach(summary: Summary) -> None:
    assert summary.breaches == []
    assert [fault.name for fault in summary.faults] == list(Fault)
    assert all(fault.right_class and fault.right_action for fault in summary.faults)
    assert (summary.samples_lost, summary.samples_repeated) == (0, 0)
    assert summary.loss_equal_to_undisturbed
    assert (summary.restarts_counted, summary.leftover_pods) == (5, 0)
    assert (summary.final_phase, summary.goodput) == ("Completed", 0.61)


def test_seconds_run_from_the_injection(summary: Summary) -> None:
    for fault, strike in zip(summary.faults, STRIKES, strict=True):
        assert fault.detect_s == (strike.detect_s or None)
        assert fault.resume_s == pytest.approx(strike.resume_s)


def test_steps_done_again_are_lost_and_recovered_is_the_first_step_beyond_them(
    summary: Summary,
) -> None:
    lost = {fault.name: fault.lost_steps for fault in summary.faults}
    assert lost == {
        Fault.RANK_KILLED: 3,  # after step 13, saved was step 10
        Fault.POD_DELETED: 6,
        Fault.SIDECAR_KILLED: 0,
        Fault.NODE_CUT_OFF: 2,
        Fault.API_CUT_OFF: 5,
        Fault.LEADER_KILLED: 8,
        Fault.STORE_RESTARTED: 0,
        Fault.CHART_UPGRADED: 0,
    }
    killed, deleted = summary.faults[0], summary.faults[1]
    assert killed.recover_s == pytest.approx(14 + 3 * 2)
    assert deleted.recover_s == pytest.approx(32 + 6 * 2)


def test_steps_that_a_fenced_trainer_does_too_late_are_no_steps_done_again(record: Record) -> None:
    """The trainer of before, let go after the new attempt trained on."""
    late = {step: record.steps[4].times_s[step] + 1 for step in (66, 67)}
    assert not late.keys() & record.steps[3].losses.keys()
    found = summarize(with_steps(record, 3, times_s=late, losses={s: loss_of(s) for s in late}))
    assert [fault.lost_steps for fault in found.faults] == [3, 6, 0, 2, 5, 8, 0, 0]
    assert found.breaches == []


def test_a_record_that_was_saved_and_read_is_judged_alike(
    record: Record, summary: Summary, tmp_path: Any
) -> None:
    record.save(tmp_path / "record.json")
    assert summarize(Record.load(tmp_path / "record.json")) == summary


def test_a_run_that_was_broken_off_is_judged_as_far_as_it_went(record: Record) -> None:
    cut_s = record.injections[3].began_s
    found = summarize(
        record.model_copy(
            update={
                "error": "Ctrl-C",
                "injections": record.injections[:3],
                "seen": [seen for seen in record.seen if seen.at_s < cut_s],
                "steps": record.steps[:3],
                "checks": [],
            }
        )
    )
    assert [fault.right_class for fault in found.faults] == [True] * 3
    assert "the run was broken off: Ctrl-C" in found.breaches
    assert f"the job did not do steps 1 to {NUM_STEPS} and no others: 53 to {NUM_STEPS}" in (
        found.breaches
    )


def test_a_run_without_anything_is_judged_too(record: Record) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("injections", "seen", "steps", "checks"), [])
    found = summarize(record.model_copy(update={**nothing, "undisturbed": [], "error": "no image"}))
    assert found.faults == []
    assert not found.loss_equal_to_undisturbed
    assert "the run was broken off: no image" in found.breaches


# What must be seen, one by one: a change of the record, and a part of the breach that it must make.


def with_steps(record: Record, number: int, **changes: dict[int, Any]) -> Record:
    """Further or other steps of a pair."""
    of_pair = record.steps[number]
    update = {field: {**getattr(of_pair, field), **new} for field, new in changes.items()}
    steps = [*record.steps]
    steps[number] = of_pair.model_copy(update=update)
    return record.model_copy(update={"steps": steps})


def without_steps(record: Record, number: int, field: str, step: int) -> Record:
    """A step less of a pair."""
    of_pair = record.steps[number]
    rest = {s: value for s, value in getattr(of_pair, field).items() if s != step}
    steps = [*record.steps]
    steps[number] = of_pair.model_copy(update={field: rest})
    return record.model_copy(update={"steps": steps})


def each_look(record: Record, change: Callable[[Seen], Seen]) -> Record:
    return record.model_copy(update={"seen": [change(seen) for seen in record.seen]})


def after(record: Record, fault: Fault, change: Callable[[Seen], Seen]) -> Record:
    """Change every look after a fault's injection."""
    at_s = next(i.began_s for i in record.injections if i.name is fault)
    return each_look(record, lambda seen: change(seen) if seen.at_s > at_s else seen)


def between(record: Record, fault: Fault, change: Callable[[Seen], Seen]) -> Record:
    """Change every look in a fault's window."""
    times = [i.began_s for i in record.injections] + [math.inf]
    at = list(Fault).index(fault)
    return each_look(
        record, lambda seen: change(seen) if times[at] < seen.at_s <= times[at + 1] else seen
    )


def with_incident(seen: Seen, number: int, **changes: Any) -> Seen:
    """A look in which an incident has other fields."""
    incidents = [i.model_dump(mode="json", by_alias=True) for i in status_of(seen).incidents]
    if number < len(incidents):
        incidents[number] = {**incidents[number], **changes}
    return with_status(seen, incidents=incidents)


def one_more_incident(record: Record, fault: Fault, *, after_s: float = 9) -> Record:
    """A Hang that nobody made, some time after a fault."""
    at_s = next(i.began_s for i in record.injections if i.name is fault) + after_s
    more = Incident.model_validate(
        {
            "time": write_time(at_s), "fault": "Hang", "action": "RestartInPlace", "attempt": 99,
            "generation": 0, "message": "stood", "seconds": {"firstStep": 3.0},
        }
    )  # fmt: skip

    def add(seen: Seen) -> Seen:
        if seen.at_s < at_s:
            return seen
        incidents = sorted([*status_of(seen).incidents, more], key=lambda i: read_time(i.time))
        return with_status(
            seen, incidents=[i.model_dump(mode="json", by_alias=True) for i in incidents]
        )

    return each_look(record, add)


def counted_once_more(seen: Seen, counter: str) -> Seen:
    status = status_of(seen)
    budget = status.budget.model_dump(mode="json", by_alias=True)
    budget[counter] += 1
    return with_status(seen, budget=budget, restarts=status.restarts + 1)


def counted_elsewhere(seen: Seen) -> Seen:
    """The newest restart counts against the user."""
    budget = status_of(seen).budget.model_dump(mode="json", by_alias=True)
    budget |= {"user": budget["user"] + 1, "infrastructure": budget["infrastructure"] - 1}
    return with_status(seen, budget=budget)


def with_pod(seen: Seen, name: str, **changes: Any) -> Seen:
    pod = Pod(
        uid=name, node="node-a", phase="Running", attempt=1, index=None, is_leaving=False
    ).model_copy(update=changes)
    return seen.model_copy(update={"pods": {**seen.pods, name: pod}})


def other_uids(seen: Seen) -> Seen:
    pods = {n: p.model_copy(update={"uid": f"{p.uid}-anew"}) for n, p in seen.pods.items()}
    return seen.model_copy(update={"pods": pods})


def kept_uids(record: Record) -> Record:
    """Pods that a deletion by hand did not replace."""
    old = next(pod.uid for pod in record.seen[2].pods.values() if pod.index == 1)

    def keep(seen: Seen) -> Seen:
        pods = {
            n: p.model_copy(update={"uid": old}) if p.index == 1 else p
            for n, p in seen.pods.items()
        }
        return seen.model_copy(update={"pods": pods})

    return each_look(record, keep)


def final(record: Record, **changes: Any) -> Record:
    seen = [*record.seen[:-1], with_status(record.seen[-1], **changes)]
    return record.model_copy(update={"seen": seen})


def without_check(record: Record, check: Check) -> Record:
    rest = [result for result in record.checks if result.name is not check]
    return record.model_copy(update={"checks": rest})


def failed_check(record: Record, check: Check) -> Record:
    results = [
        result.model_copy(update={"holds": False, "detail": "it moved"})
        if result.name is check
        else result
        for result in record.checks
    ]
    return record.model_copy(update={"checks": results})


def undisturbed_loss(record: Record, step: int, loss: float) -> Record:
    [only] = record.undisturbed
    changed = only.model_copy(update={"losses": {**only.losses, step: loss}})
    return record.model_copy(update={"undisturbed": [changed]})


def earlier(record: Record, fault: Fault, seconds: float) -> Record:
    injections = [
        i.model_copy(update={"began_s": i.began_s - seconds}) if i.name is fault else i
        for i in record.injections
    ]
    return record.model_copy(update={"injections": injections})


def not_recovered(record: Record, number: int) -> Record:
    injections = [*record.injections]
    injections[number] = injections[number].model_copy(update={"recovered_s": None})
    return record.model_copy(update={"injections": injections})


_ULP = math.nextafter(loss_of(50), 9)

BROKEN: dict[str, tuple[Change, str]] = {
    "wrong-class": (
        lambda r: each_look(r, lambda s: with_incident(s, 2, fault="PodDeleted")),
        "node-cut-off: its class is PodDeleted, not NodeLost",
    ),
    "wrong-action": (
        lambda r: each_look(r, lambda s: with_incident(s, 1, action="RestartJob")),
        "pod-deleted: its action is RestartJob, not RestartGroup",
    ),
    "wrong-pair": (
        lambda r: each_look(r, lambda s: with_incident(s, 4, attempt=3)),
        "leader-killed: it ended attempt 3.0, but struck attempt 4.0",
    ),
    "two-incidents-of-one-pair": (
        lambda r: each_look(r, lambda s: with_incident(s, 4, attempt=3)),
        "attempt 3.0 ended 2 times",
    ),
    "a-second-incident": (
        lambda r: one_more_incident(r, Fault.POD_DELETED),
        "pod-deleted: one incident was expected, PodDeleted, RestartGroup, not 2",
    ),
    "an-incident-of-a-fault-that-makes-none": (
        lambda r: one_more_incident(r, Fault.SIDECAR_KILLED),
        "sidecar-killed: no incident was expected, but there is Hang",
    ),
    "an-incident-before-any-fault": (
        lambda r: one_more_incident(r, Fault.RANK_KILLED, after_s=-5),
        "an incident before any fault: Hang",
    ),
    "an-incident-that-is-forgotten": (
        lambda r: final(r, incidents=[]),
        "an incident that the last status has no more: Unknown",
    ),
    "an-incident-too-early": (
        lambda r: each_look(
            r, lambda s: with_incident(s, 3, time=write_time(r.injections[4].began_s - 2))
        ),
        "api-cut-off: one incident was expected, NodeLost, ReplacePod, not 0: none",
    ),
    "counted-twice": (
        lambda r: after(r, Fault.LEADER_KILLED, lambda s: counted_once_more(s, "infrastructure")),
        "leader-killed: the counters grew by {'user': 0, 'infrastructure': 2}",
    ),
    "counted-twice-and-once-too-few": (
        lambda r: between(r, Fault.RANK_KILLED, lambda s: counted_once_more(s, "infrastructure")),
        "pod-deleted: the counters grew by {'user': 0, 'infrastructure': 0}",
    ),
    "counted-against-the-user": (
        lambda r: after(r, Fault.RANK_KILLED, counted_elsewhere),
        "rank-killed: the counters grew by {'user': 1, 'infrastructure': 0}",
    ),
    "counted-for-a-fault-that-costs-nothing": (
        lambda r: after(r, Fault.STORE_RESTARTED, lambda s: counted_once_more(s, "infrastructure")),
        "store-restarted: restarts grew by 1, not by 0",
    ),
    "counts-too-many-at-the-end": (
        lambda r: after(r, Fault.CHART_UPGRADED, lambda s: counted_once_more(s, "user")),
        "the last status counts 6 restarts, not 5",
    ),
    "an-attempt-too-many": (
        lambda r: after(
            r, Fault.POD_DELETED, lambda s: with_status(s, attempt=status_of(s).attempt + 1)
        ),
        "pod-deleted: attempt 1.1 was followed by attempt 3.0, not by attempt 2.0",
    ),
    "a-new-attempt-where-a-generation-would-do": (
        lambda r: between(r, Fault.RANK_KILLED, lambda s: with_status(s, attempt=2, generation=0)),
        "rank-killed: attempt 1.0 was followed by attempt 2.0, not by attempt 1.1",
    ),
    "an-upgrade-that-restarts-pods": (
        lambda r: between(r, Fault.CHART_UPGRADED, other_uids),
        "chart-upgraded: pods were to stay",
    ),
    "a-pod-born-and-gone-in-between": (
        lambda r: r.model_copy(
            update={
                "seen": [
                    with_pod(s, "visitor")
                    if s.at_s == next(x.at_s for x in r.seen if x.at_s > r.injections[0].began_s)
                    else s
                    for s in r.seen
                ]
            }
        ),
        "rank-killed: pods were to stay",
    ),
    "a-deleted-pod-that-still-trains": (
        kept_uids,
        "pod-deleted: RestartGroup was to make a new pod, but the same ones train",
    ),
    "a-lost-node-that-costs-all-pods": (
        lambda r: after(r, Fault.NODE_CUT_OFF, other_uids),
        "node-cut-off: ReplacePod was to make one new pod, not 2",
    ),
    "an-old-pod-on-a-node-that-is-back": (
        lambda r: between(
            r, Fault.NODE_CUT_OFF, lambda s: with_pod(s, "stamps-1", uid="uid-1", index=0)
        ),
        "node-cut-off: node-a is back and still has stamps-1 of the attempt before",
    ),
    "a-pod-of-another-attempt": (
        lambda r: between(r, Fault.API_CUT_OFF, lambda s: with_pod(s, "stranger", attempt=2)),
        "api-cut-off: pods of other attempts than 4 are left: stranger",
    ),
    "another-node-than-that-of-the-rendezvous-host": (
        lambda r: each_look(r, lambda s: with_incident(s, 2, kubernetesNode="node-b")),
        "node-cut-off: the rendezvous host did not run on node-b",
    ),
    "stages-that-are-not-told": (
        lambda r: each_look(r, lambda s: with_incident(s, 1, seconds={"detect": 1, "decide": 0})),
        "pod-deleted: its incident tells nothing of terminate, schedule, start, firstStep",
    ),
    "stages-that-are-not-true": (
        lambda r: each_look(r, lambda s: with_incident(s, 0, seconds={"firstStep": 33.0})),
        "rank-killed: its incident tells of the first step 38.0 s after the fault",
    ),
    "a-fault-seen-for-longer-than-it-was-there": (
        lambda r: each_look(
            r, lambda s: with_incident(s, 1, seconds=dict.fromkeys(STAGES, 5) | {"detect": 99})
        ),
        "pod-deleted: its incident tells of 99.0 s until it was seen",
    ),
    "it-never-trained-again": (lambda r: not_recovered(r, 6), "store-restarted: the job did not"),
    "another-loss": (
        lambda r: with_steps(r, 2, losses={50: 3.0}),
        "the loss of step 50 of attempt 2.0 is 3.0, undisturbed",
    ),
    "another-loss-by-the-last-bit": (
        lambda r: undisturbed_loss(r, 50, _ULP),
        "the loss of step 50 of attempt 2.0",
    ),
    "a-loss-that-is-no-number": (
        lambda r: undisturbed_loss(r, 50, math.nan),
        "the undisturbed job has no samples, or no finite loss, at step 50",
    ),
    "another-loss-of-a-step-done-again": (
        lambda r: with_steps(r, 0, losses={13: 3.0}),
        "the loss of step 13 of attempt 1.0 is 3.0, undisturbed",
    ),
    "a-lost-sample": (
        lambda r: with_steps(r, 2, samples={28: ["books/0/112/0"]}),
        "step 28 consumed other samples",
    ),
    "samples-in-another-order": (
        lambda r: with_steps(r, 2, samples={28: r.steps[2].samples[28][::-1]}),
        "step 28 consumed other samples, or in another order",
    ),
    "a-strange-sample-in-a-step-done-again": (
        lambda r: with_steps(r, 0, samples={13: ["books/1/0/0"]}),
        "step 13 of attempt 1.0 consumed samples that are not its own",
    ),
    "a-step-never-done": (
        lambda r: without_steps(r, 5, "losses", 119),
        f"the job did not do steps 1 to {NUM_STEPS} and no others: 119",
    ),
    "a-step-too-many": (
        lambda r: with_steps(r, 5, losses={121: 1.0}),
        f"the job did not do steps 1 to {NUM_STEPS} and no others: 121",
    ),
    "steps-left-out-by-a-pair": (
        lambda r: without_steps(r, 1, "losses", 12),
        "attempt 1.1 left out steps: it did 11 to 26 after 13",
    ),
    "an-undisturbed-job-that-was-disturbed": (
        lambda r: r.model_copy(update={"undisturbed": [*r.undisturbed, r.steps[2]]}),
        "the undisturbed job trained as 2 pairs",
    ),
    "a-fault-left-out": (
        lambda r: r.model_copy(update={"injections": r.injections[1:]}),
        "the faults injected are not those of the table",
    ),
    "faults-out-of-order": (
        lambda r: earlier(r, Fault.STORE_RESTARTED, 500),
        "the faults do not stand in the order",
    ),
    "not-completed": (
        lambda r: final(r, phase="Failed", reason="NoProgress"),
        "the job ended Failed (NoProgress), not Completed",
    ),
    "no-goodput": (lambda r: final(r, goodput=None), "the goodput is None"),
    "more-than-all-was-good": (lambda r: final(r, goodput=1.2), "the goodput is 1.2"),
    "pods-left": (
        lambda r: r.model_copy(update={"leftover_pods": ["stamps-1"]}),
        "pods are left: stamps-1",
    ),
    "a-check-not-made": (
        lambda r: without_check(r, Check.NODE_CLEAN),
        "check node-clean was made 0 times, not 2",
    ),
    "a-node-that-was-not-looked-at": (
        lambda r: r.model_copy(update={"checks": [*dict.fromkeys(r.checks)]}),
        "check node-clean was made 1 times, not 2",
    ),
    "a-late-move-that-was-not-refused": (
        lambda r: failed_check(r, Check.LATE_MOVE),
        "check late-move does not hold: it moved",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_as_it_must_be_is_a_breach(record: Record, name: str) -> None:
    change, said = BROKEN[name]
    breaches = summarize(change(record)).breaches
    assert [breach for breach in breaches if said in breach], breaches


def test_wrong_class_and_wrong_action_are_told_of_the_fault_alone(record: Record) -> None:
    changed = each_look(record, lambda s: with_incident(s, 2, fault="Evicted", action="RestartJob"))
    found = {fault.name: fault for fault in summarize(changed).faults}
    wrong = found.pop(Fault.NODE_CUT_OFF)
    assert (wrong.right_class, wrong.right_action) == (False, False)
    assert all(fault.right_class and fault.right_action for fault in found.values())


def test_samples_are_counted_that_are_lost_and_that_are_repeated(record: Record) -> None:
    samples = {28: ["books/0/112/0", "books/0/112/0", "books/0/113/0"]}
    found = summarize(with_steps(record, 2, samples=samples))
    assert (found.samples_lost, found.samples_repeated) == (2, 1)


def test_a_loss_by_the_last_bit_is_not_equal(record: Record) -> None:
    assert not summarize(undisturbed_loss(record, 50, _ULP)).loss_equal_to_undisturbed


def test_without_a_restart_steps_count_once_what_broke_is_back(record: Record) -> None:
    """The ranks of a killed data service train the steps that they have in hand."""
    injections = [*record.injections]
    killed = injections[2]
    injections[2] = killed.model_copy(update={"recovered_s": killed.began_s + 7.9})
    found = summarize(record.model_copy(update={"injections": injections})).faults[2]
    assert found.resume_s == found.recover_s == pytest.approx(8.0)
