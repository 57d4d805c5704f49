"""What happened to a job, in time order: incidents with the stages of each recovery, and Events."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omni_cli.job_read import EventRecord, JobRecord, time_of
from omni_cli.job_view import Trimmed
from omni_contract.reasons import PlacementReason
from omni_contract.status import STAGES, Incident

BAR: Final = 20
"""Characters of the longest recovery."""

_LETTERS: Final = dict(zip(STAGES, "DdTSsF", strict=True))
_STYLES: Final = dict(
    zip(STAGES, ("red", "magenta", "yellow", "blue", "cyan", "green"), strict=True)
)
_LIFE: Final = (
    "Suspending", "Suspended", "AttemptOpened", "Resumed", *get_args(PlacementReason), "BackingOff",
    "QuotaExceeded", "Placed", "Relaxed", "GangReady", "Running", "Restarted", "Completed",
    "Failed", "over",
)  # fmt: skip
"""Events of an attempt in the order in which they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the timeline."""

    time: datetime
    text: str
    style: str = ""
    place: int = 0
    """Among what happened in the same second, which is all that Events tell."""


def timeline_picture(job: JobRecord, events: Sequence[EventRecord]) -> Trimmed:
    """Everything that `kubectl mmtj timeline` shows."""
    parts: list[RenderableType] = []
    if job.status.incidents:
        parts += [_incidents(job.status.incidents), _legend(), Text()]
    else:
        parts += [Text(f"{job.name}: no incident so far"), Text()]
    parts.append(_lines(entries(job, events)))
    return Trimmed(picture=Group(*parts))


def entries(job: JobRecord, events: Sequence[EventRecord]) -> list[Entry]:
    """All that is known to have happened, oldest first."""
    status = job.status
    found = [Entry(time=job.created, text="created", place=-1)]
    if status.opened_at is not None:
        why = f" by {status.opened_by}" if status.opened_by is not None else ""
        found.append(
            Entry(
                time=time_of(status.opened_at),
                text=f"attempt {status.attempt} opened{why}",
                place=_place("AttemptOpened"),
            )
        )
    if status.start_time is not None:
        found.append(
            Entry(
                time=time_of(status.start_time),
                text="runs",
                style="green",
                place=_place("Running"),
            )
        )
    for incident in status.incidents:
        where = f" on {incident.kubernetes_node}" if incident.kubernetes_node else ""
        found.append(
            Entry(
                time=time_of(incident.time),
                text=f"{incident.fault}{where}, {incident.action}: {incident.message}",
                style="red",
            )
        )
    if status.completion_time is not None:
        end = job.end or "over"
        style = "bold green" if end == "Completed" else "bold red"
        time = time_of(status.completion_time)
        found.append(Entry(time=time, text=end, style=style, place=_place(end)))
    for event in events:
        times = f" ({event.count} times)" if event.count > 1 else ""
        found.append(
            Entry(
                time=event.time,
                text=f"event {event.reason}: {event.message}{times}",
                style="yellow" if event.is_warning else "",
                place=_place(event.reason),
            )
        )
    # Events are cut to whole seconds, the times of the status are not.
    return sorted(found, key=lambda e: (e.time.replace(microsecond=0), e.place, e.time))


def _place(reason: str) -> int:
    """Where in the life of an attempt an Event stands: faults, which end the one before, first."""
    return _LIFE.index(reason) + 1 if reason in _LIFE else 0


def _incidents(incidents: Sequence[Incident]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("time (UTC)", no_wrap=True)
    table.add_column("attempt", no_wrap=True)
    table.add_column("fault, action")
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("recovery", no_wrap=True, min_width=BAR)
    longest_s = max(sum(incident.seconds.values()) for incident in incidents) or 1.0
    for incident in incidents:
        total_s = sum(incident.seconds.values())
        table.add_row(
            f"{time_of(incident.time).astimezone(UTC):%H:%M:%S}",
            f"{incident.attempt}.{incident.generation}",
            f"{incident.fault}, {incident.action}",
            f"{total_s:.1f}" if incident.seconds else "",
            stage_bar(incident, longest_s),
        )
    return table


def stage_bar(incident: Incident, longest_s: float) -> Text:
    """A bar of one letter a stage, as long as the recovery was against the longest one."""
    bar = Text()
    begin_s = 0.0
    for stage in STAGES:
        if stage not in incident.seconds:
            continue
        end_s = begin_s + incident.seconds[stage]
        # Both ends are rounded, so that the rounding of stages does not add up.
        cells = round(BAR * end_s / longest_s) - round(BAR * begin_s / longest_s)
        bar.append(_LETTERS[stage] * cells, style=_STYLES[stage])
        begin_s = end_s
    return bar


def _legend() -> Text:
    legend = Text()
    for stage in STAGES:
        legend.append(_LETTERS[stage], style=_STYLES[stage]).append(f" {stage}  ")
    return legend


def _lines(found: Sequence[Entry]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    day = None
    for entry in found:
        time = entry.time.astimezone(UTC)
        if time.date() != day:
            day = time.date()
            table.add_row(f"{day}", Text("(times are UTC)" if entry is found[0] else ""))
        table.add_row(f"{time:%H:%M:%S}", Text(entry.text, style=entry.style))
    return table
