"""What a person reads of a job: status, timeline, placement; in 80 columns, in plain ASCII too."""

import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from omni_cli.job_placement import Chart, placement_picture, placement_table, unit_name
from omni_cli.job_read import EventRecord, JobRecord, PodRecord, time_of
from omni_cli.job_timeline import BAR, entries, stage_bar, timeline_picture
from omni_cli.job_view import Signs, advice, age, clock, outcome_line, seconds_left, status_picture
from omni_contract.placement import JobPlacement, PlacedPod
from omni_contract.status import CONDITIONS, Incident
from tests.cli.job_objects import (
    PLACEMENT,
    a_job,
    a_pod,
    an_event,
    an_incident,
    condition,
    running_status,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "kubectl.md"
NOW = datetime(2026, 1, 1, 8, 12, tzinfo=UTC)


def console_of(encoding: str = "utf-8", *, color: bool = False) -> Console:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    return Console(file=stream, width=80, highlight=False, force_terminal=color)


def text_of(picture: RenderableType, console: Console) -> str:
    with console.capture() as captured:
        console.print(picture)
    said = captured.get()
    if not console.is_terminal:
        assert all(len(line) <= 80 for line in said.splitlines()), said
    return said


def shown(
    *, status: dict[str, Any], encoding: str = "utf-8", color: bool = False, **spec: Any
) -> str:
    console = console_of(encoding, color=color)
    job = JobRecord.of(a_job(status=status, **spec))
    return text_of(status_picture(job, Signs.of(console), NOW), console)


def drawn(placement: JobPlacement, *pods: dict[str, Any], encoding: str = "utf-8") -> str:
    console = console_of(encoding)
    chart = Chart.of(placement, [PodRecord.of(pod) for pod in pods])
    picture = placement_picture("stamps", chart, Signs.of(console), width=80)
    return text_of(picture, console)


def test_a_running_job_tells_all_that_is_known() -> None:
    said = shown(status=running_status())
    for part in (
        "stamps  Running  attempt 2.1, namespace train",
        "step 60/120  50.0 %",
        "600,000 tokens  5,000 tokens/s  loss 4.5000  goodput 91.3 %  ETA 0:02:00",
        "2; left: user 2/3, infrastructure 99/100, without progress 3/3",
        "2 nodes + 1 spare in zone-a; 1 of 2 groups within one rack",
        "newest incident, 3m ago: NodeLost on n7, ReplacePod (attempt 1.0)",
        "detect 30.0 s, decide 0.5 s, terminate 1.5 s, schedule 4.0 s, start 4.0 s",
    ):
        assert part in said
    order = [said.index(f" {kind} ") for kind in ("Accepted", "Placed", "Failed")]
    assert order == sorted(order), "conditions stand in the order in which they are told"


def test_limits_come_from_the_spec() -> None:
    said = shown(status=running_status(), restart={"limit": 7, "infrastructureLimit": 1})
    assert "user 6/7, infrastructure 0/1," in said


def test_a_shrunk_job_says_how_many_nodes_it_has() -> None:
    said = shown(status=running_status(numNodes=1))
    assert "shrunk to 1 of 2 nodes" in said


@pytest.mark.parametrize(("holds", "sign"), [("True", "✓"), ("False", "○"), ("Unknown", "?")])
def test_a_condition_has_a_sign(holds: str, sign: str) -> None:
    said = shown(status={"conditions": [condition("Placed", holds, "Because")]})
    assert f"{sign} Placed" in said


@pytest.mark.parametrize(
    ("kind", "holds", "sign"),
    [
        ("Failed", "True", "✗"),
        ("Failed", "False", "·"),
        ("Accepted", "False", "✗"),
        ("Degraded", "True", "!"),
        ("Restarting", "False", "·"),
    ],
)
def test_a_bad_condition_is_bad_when_it_holds(kind: str, holds: str, sign: str) -> None:
    said = shown(status={"conditions": [condition(kind, holds, "Because")]})
    assert f"{sign} {kind}" in said


def test_every_condition_with_long_words_fits() -> None:
    every = [condition(kind, "True", "Reason" * 5, "a long message " * 9) for kind in CONDITIONS]
    said = shown(status=running_status(conditions=every))
    assert all(kind in said for kind in CONDITIONS)


def test_without_utf8_everything_is_ascii() -> None:
    said = shown(status=running_status(), encoding="ascii")
    assert said.isascii() and "####" in said and "+ Accepted" in said
    console = console_of("ascii")
    job = JobRecord.of(a_job(status=running_status()))
    assert text_of(timeline_picture(job, []), console).isascii()
    assert drawn(PLACEMENT, encoding="ascii").isascii()
    assert text_of(placement_table(Chart.of(PLACEMENT, [])), console).isascii()


def test_colors_are_for_terminals() -> None:
    assert "\x1b[" not in shown(status=running_status())
    assert "\x1b[" in shown(status=running_status(), color=True)


def test_there_is_no_time_left_while_no_step_is_made() -> None:
    waits = running_status(conditions=[condition("Running", "False", "Restarting")])
    assert seconds_left(JobRecord.of(a_job(status=waits))) is None
    assert seconds_left(JobRecord.of(a_job(status=running_status()))) == pytest.approx(120)


FALSE, TRUE = "False", "True"


@pytest.mark.parametrize(
    ("conditions", "spec", "says"),
    [
        ([condition("Accepted", FALSE, "InvalidSpec")], {}, "kubectl edit mmtj stamps"),
        ([condition("Suspended", TRUE, "Suspended")], {"suspend": True}, "kubectl mmtj resume"),
        ([condition("Placed", FALSE, "NoRoom")], {}, "waits for room and starts by itself"),
        ([condition("Placed", FALSE, "QuotaExceeded")], {}, "describe resourcequota"),
        ([condition("Placed", FALSE, "UnknownTopologyLevel")], {}, "kubectl edit mmtj stamps"),
        ([condition("Placed", FALSE, "NoQueueSystem")], {}, "take spec.queueName out"),
        ([condition("Placed", FALSE, "Placing")], {}, None),
        (
            [condition("Placed", TRUE, "Placed"), condition("GangReady", FALSE, "Barrier")],
            {},
            "kubectl mmtj placement stamps",
        ),
        ([condition("Restarting", TRUE, "NodeLost")], {}, "status stamps --watch"),
        (
            [condition("Failed", TRUE, "RestartLimit")],
            {},
            "timeline stamps, kubectl mmtj logs stamps.",
        ),
        ([condition("Completed", TRUE, "Done")], {}, None),
        (
            [condition("Running", TRUE, "AllPodsRun")],
            {"restart": {"startAfterSeconds": 1200}},
            "first step may take restart.startAfterSeconds, 1200 s here",
        ),
    ],
)
def test_a_job_that_waits_says_what_to_do(
    conditions: list[dict[str, Any]], spec: dict[str, Any], says: str | None
) -> None:
    status = {"observedGeneration": 1, "conditions": conditions}
    said = advice(JobRecord.of(a_job(status=status, **spec)), NOW)
    assert said is None if says is None else said is not None and says in said


def test_a_job_that_made_a_step_needs_no_advice() -> None:
    assert advice(JobRecord.of(a_job(status=running_status())), NOW) is None


def test_a_job_that_failed_later_has_pods_of_before_to_read() -> None:
    failed = running_status(conditions=[condition("Failed", TRUE, "GaveUp")])
    said = advice(JobRecord.of(a_job(status=failed)), NOW)
    assert said is not None
    assert "kubectl mmtj logs stamps, kubectl mmtj logs stamps --previous-attempt." in said


def test_conditions_that_say_the_same_are_told_once() -> None:
    said = "spec.suspend is true and all pods have ended"
    off = [condition(k, FALSE, "Suspended", said) for k in ("Placed", "GangReady", "Running")]
    held = condition("Suspended", TRUE, "Suspended", said)
    over = [condition(k, FALSE, "Completed", "it is over") for k in ("Degraded", "Restarting")]
    picture = shown(status={"conditions": [*off, *over, held]})
    assert picture.count("Suspended spec.suspend is true") == 1
    assert "so not Placed, GangReady, Running" in picture
    assert picture.count("it is over") == 1 and "also Restarting" in picture


def test_no_line_ends_in_blanks() -> None:
    job = JobRecord.of(a_job(status=running_status()))
    console = console_of()
    events = [EventRecord.of(an_event("2026-01-01T08:00:30Z", "Placed", "on 2 nodes"))]
    for picture in (
        status_picture(job, Signs.of(console), NOW),
        timeline_picture(job, events),
        placement_table(Chart.of(PLACEMENT, [])),
    ):
        lines = text_of(picture, console).splitlines()
        assert lines == [line.rstrip() for line in lines]
        assert len(lines) > 3


def test_a_job_that_no_operator_looks_at_says_so_after_a_while() -> None:
    job = JobRecord.of(a_job())
    assert advice(job, time_of("2026-01-01T08:00:05Z")) is None
    said = advice(job, NOW)
    assert said is not None and "No operator has looked at it yet" in said
    assert outcome_line(job).startswith("stamps  Pending  no attempt yet")


def test_a_newer_spec_that_was_not_seen_says_so() -> None:
    job = a_job(status=running_status())
    job["metadata"]["generation"] = 2
    said = advice(JobRecord.of(job), NOW)
    assert said == "The operator has not looked at the newest spec yet."


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (7200, "2h"), (172_800, "2d")],
)
def test_ages_are_short(seconds: int, says: str) -> None:
    then = datetime.fromtimestamp(NOW.timestamp() - seconds, UTC)
    assert age(NOW, then) == says


def test_a_clock_counts_hours_up() -> None:
    assert clock(90_061.4) == "25:01:01"


def test_the_timeline_is_in_time_order() -> None:
    job = JobRecord.of(
        a_job(
            status=running_status(
                completionTime="2026-01-01T09:00:00Z",
                conditions=[condition("Completed", "True", "Done")],
            )
        )
    )
    events = [
        an_event("2026-01-02T08:00:00Z", "Late", "the next day"),
        an_event("2026-01-01T08:00:30.123456Z", "Placed", "on 2 nodes"),
        an_event(
            "2026-01-01T08:02:00Z",
            "Slow",
            "again",
            type="Warning",
            eventTime=None,
            lastTimestamp="2026-01-01T08:05:00Z",
            count=3,
        ),
    ]
    found = entries(job, [EventRecord.of(event) for event in events])
    assert [entry.text for entry in found] == [
        "created",
        "event Placed: on 2 nodes",
        "runs",
        "event Slow: again (3 times)",
        "NodeLost on n7, ReplacePod: node n7 is not Ready for 30 s",
        "attempt 2 opened by ReplacePod",
        "Completed",
        "event Late: the next day",
    ]
    said = text_of(timeline_picture(job, [EventRecord.of(event) for event in events]), console_of())
    assert "2026-01-01" in said and "2026-01-02" in said and "08:05:00" in said


def test_events_of_one_second_stand_in_the_order_in_which_they_came() -> None:
    status = running_status(
        openedAt="2026-01-01T08:10:00.700Z",
        incidents=[an_incident("2026-01-01T08:10:00.650Z")],
    )
    reasons = ("Restarted", "Running", "Placed", "AttemptOpened", "GangReady", "NodeLost")
    events = [EventRecord.of(an_event("2026-01-01T08:10:00Z", reason, "so")) for reason in reasons]
    found = [entry.text for entry in entries(JobRecord.of(a_job(status=status)), events)]
    assert found[2:] == [
        "event NodeLost: so",
        "NodeLost on n7, ReplacePod: node n7 is not Ready for 30 s",
        "event AttemptOpened: so",
        "attempt 2 opened by ReplacePod",
        "event Placed: so",
        "event GangReady: so",
        "event Running: so",
        "event Restarted: so",
    ]


def test_that_an_attempt_waits_for_room_comes_after_its_opening() -> None:
    status = running_status(openedAt="2026-01-01T08:10:00.700Z", incidents=[])
    reasons = ("Placed", "NotEnoughNodes", "QuotaExceeded", "Relaxed", "AttemptOpened")
    events = [EventRecord.of(an_event("2026-01-01T08:10:00Z", reason, "so")) for reason in reasons]
    found = [entry.text for entry in entries(JobRecord.of(a_job(status=status)), events)]
    assert found[2:] == [
        "event AttemptOpened: so",
        "attempt 2 opened by ReplacePod",
        "event NotEnoughNodes: so",
        "event QuotaExceeded: so",
        "event Placed: so",
        "event Relaxed: so",
    ]


def test_a_stage_bar_is_as_long_as_the_stages() -> None:
    seconds = {"detect": 5.0, "decide": 0.0, "terminate": 2.5, "firstStep": 2.5}
    incident = Incident.model_validate(an_incident("2026-01-01T08:00:00Z", seconds=seconds))
    assert stage_bar(incident, 10.0).plain == "D" * (BAR // 2) + "T" * (BAR // 4) + "F" * (BAR // 4)
    assert len(stage_bar(incident, 20.0).plain) == BAR // 2


def test_incidents_stand_in_a_table_each_in_one_line() -> None:
    longest = an_incident(
        "2026-01-01T08:05:00Z", fault="PendingTimeout", action="RestartInPlace", seconds={}
    )
    status = running_status(incidents=[longest, an_incident("2026-01-01T08:09:00Z")])
    said = text_of(timeline_picture(JobRecord.of(a_job(status=status)), []), console_of())
    words = " ".join(said.split())
    assert "08:05:00 1.0 PendingTimeout, RestartInPlace" in words
    assert "40.0  DDDDDDDDDDDDDDDTSSss" in said
    assert "D detect  d decide  T terminate  S schedule  s start  F firstStep" in said


def test_the_placement_shows_domains_from_the_widest_on() -> None:
    said = drawn(PLACEMENT, a_pod("stamps-5d1ce-1-0", 0), a_pod("stamps-5d1ce-2-1", 1))
    assert "attempt 2: 2 nodes + 1 spare, all in zone-a" in said
    lines = [line.rstrip() for line in said.splitlines()]
    at = lines.index("zone zone-a")
    assert lines[at : at + 7] == [
        "zone zone-a", "  rack r1", "    A0", "  rack r2", "    S0!", "  rack r10", "    A1",
    ]  # fmt: skip
    assert "A  nodes 0-1  ! spans 2 racks" in said
    assert "units of reorder groups, one rack asked" in said
    assert "pods  running: 2   ! not there: 1" in said


@pytest.mark.parametrize(
    ("change", "mark"),
    [
        ({"phase": "Pending"}, "~"),
        ({"phase": "Pending", "nodeName": None}, "?"),
        ({"phase": "Pending", "nodeName": None, "schedulingGates": [{"name": "g"}]}, ":"),
        ({"phase": "Succeeded"}, "="),
        ({"phase": "Failed"}, "x"),
        ({"phase": "Unknown"}, "u"),
    ],
)
def test_a_pod_that_does_not_run_has_a_mark(change: dict[str, Any], mark: str) -> None:
    assert f"    A0{mark}" in drawn(PLACEMENT, a_pod("stamps-5d1ce-1-0", 0, **change))


def test_a_terminating_pod_has_a_mark_whatever_its_phase() -> None:
    pod = a_pod("stamps-5d1ce-1-0", 0)
    pod["metadata"]["deletionTimestamp"] = "2026-01-01T08:00:00Z"
    assert "    A0-" in drawn(PLACEMENT, pod)


def test_a_large_job_is_drawn_in_few_lines() -> None:
    placement = JobPlacement(
        attempt=1,
        plan_hash="x",
        pods=tuple(
            PlacedPod(name=f"p{i}", node=f"n{i}", born=1, path=(f"z{i // 256}", f"r{i // 16}"))
            for i in range(512)
        ),
        units=tuple(tuple(range(i, i + 4)) for i in range(0, 512, 4)),
        levels=("zone", "rack"),
        group_within="rack",
        spans=(1, 3, *(1,) * 126),
    )
    said = drawn(placement)
    assert "B  nodes 4-7  ! spans 3 racks" in said
    assert "127 units more ✓ in one rack" in said
    assert len(said.splitlines()) < 140


def test_a_job_without_topology_is_drawn_in_one_block() -> None:
    placement = JobPlacement(
        attempt=1, plan_hash="x", pods=(PlacedPod(name="p", node="n", born=1),), units=((0,),)
    )
    said = drawn(placement, a_pod("p", 0))
    assert said.splitlines()[1].strip() == "A0"
    assert "asked" not in said and "✓" not in said


def test_a_node_without_label_is_told() -> None:
    pod = PlacedPod(name="p", node="n", born=1, path=("z", ""))
    placement = JobPlacement(attempt=1, plan_hash="x", pods=(pod,), levels=("zone", "rack"))
    assert "rack (no label)" in drawn(placement)


def test_the_wide_table_says_why_a_pod_waits() -> None:
    pod = a_pod("stamps-5d1ce-1-0", 0, phase="Pending")
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    pod["status"]["containerStatuses"] = [waiting]
    chart = Chart.of(PLACEMENT, [PodRecord.of(pod)])
    said = text_of(placement_table(chart), console_of())
    assert "starting: ImagePullBackOff" in said and "zone-a/r10" in said


def test_the_picture_in_the_document_is_what_is_drawn() -> None:
    racks = ("r1",) * 4 + ("r2",) * 3 + ("r3", "r1")
    placed = [
        PlacedPod(name=f"p{i}", node=f"n{i}", born=1, path=("zone-a", rack))
        for i, rack in enumerate(racks)
    ]
    placement = JobPlacement(
        attempt=2,
        plan_hash="x",
        pods=tuple(placed[:8]),
        spares=tuple(placed[8:]),
        units=((0, 1, 2, 3), (4, 5, 6, 7)),
        levels=("zone", "rack"),
        group_within="rack",
        spans=(1, 2),
        job_domain="zone-a",
    )
    phases = ["Running"] * 6 + ["Failed", "Pending", "Running"]
    pods = [a_pod(f"p{i}", i, phase=phase) for i, phase in enumerate(phases)]
    said = [line.rstrip() for line in drawn(placement, *pods).splitlines()]
    assert "\n".join(said) in DOCUMENT.read_text()


def test_units_have_letters() -> None:
    assert [unit_name(n) for n in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]
