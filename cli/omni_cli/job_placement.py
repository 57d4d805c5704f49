"""A picture of racks and groups: where each node of the plan runs, and what its pod does."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from omni_cli.job_read import PodRecord, PodWord
from omni_cli.job_view import Signs, Trimmed, counted
from omni_contract.placement import JobPlacement, PlacedPod

LiveWord = PodWord | None
"""None: the pod is not there."""

MOST_UNITS: Final = 12
"""Units that are described; those that span come first."""

_COLORS: Final = (
    "green", "cyan", "blue", "magenta", "yellow", "bright_green", "bright_cyan", "bright_blue",
    "bright_magenta", "bright_yellow",
)  # fmt: skip
_MARKS: Final[Mapping[LiveWord, str]] = {
    "running": "",
    "starting": "~",
    "pending": "?",
    "gated": ":",
    "succeeded": "=",
    "failed": "x",
    "terminating": "-",
    "unknown": "u",
    None: "!",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One pod of the placement with what is known of it now."""

    label: str
    """Unit and plan index, such as A3; S0 for a spare."""
    style: str
    pod: PlacedPod
    word: LiveWord
    detail: str

    @property
    def cell(self) -> str:
        """Label and mark."""
        return f"{self.label}{_MARKS[self.word]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A placement with the live pods put on it."""

    placement: JobPlacement
    seats: tuple[Seat, ...]
    depth: int
    """Levels that are drawn: those above the node itself."""

    @classmethod
    def of(cls, placement: JobPlacement, pods: Sequence[PodRecord]) -> Self:
        """Put the pods on their seats."""
        live = {pod.name: pod for pod in pods}
        unit_of = {node: unit for unit, nodes in enumerate(placement.units) for node in nodes}
        seats = []
        for index, placed in enumerate(placement.all_pods):
            is_spare = index >= len(placement.pods)
            unit = unit_of.get(index)
            pod = live.get(placed.name)
            label = f"S{index - len(placement.pods)}" if is_spare else str(index)
            seats.append(
                Seat(
                    label=label if unit is None or is_spare else f"{unit_name(unit)}{label}",
                    style="dim" if unit is None or is_spare else _COLORS[unit % len(_COLORS)],
                    pod=placed,
                    word=pod.word if pod is not None else None,
                    detail=pod.detail if pod is not None else "",
                )
            )
        return cls(placement=placement, seats=tuple(seats), depth=_depth(placement))

    def rows(self) -> list[tuple[tuple[str, ...], list[Seat]]]:
        """Domains of the narrowest drawn level in order, each with its seats."""
        found: dict[tuple[str, ...], list[Seat]] = {}
        for seat in self.seats:
            found.setdefault(seat.pod.path[: self.depth], []).append(seat)
        return sorted(found.items(), key=lambda row: [_natural(name) for name in row[0]])


def _depth(placement: JobPlacement) -> int:
    """A last level whose domains are the nodes themselves tells nothing more."""
    depth = len(placement.levels)
    if depth and all(pod.path[-1:] in ((pod.node,), ()) for pod in placement.all_pods):
        return depth - 1
    return depth


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", name)]


def unit_name(unit: int) -> str:
    """A, B, ..., Z, AA, AB, ..."""
    letters = ""
    unit += 1
    while unit:
        unit, last = divmod(unit - 1, 26)
        letters = chr(ord("A") + last) + letters
    return letters


def placement_picture(name: str, chart: Chart, signs: Signs, *, width: int) -> Trimmed:
    """Domains from the widest to the narrowest, the pods in them, and the units that span."""
    placement = chart.placement
    spares = f" + {counted(len(placement.spares), 'spare')}" if placement.spares else ""
    where = f", all in {placement.job_domain}" if placement.job_domain else ""
    nodes = counted(len(placement.pods), "node")
    heading = Text.assemble(
        (name, "bold"), f"  attempt {placement.attempt}: {nodes}{spares}{where}"
    )
    parts: list[RenderableType] = [heading]
    parts += [*_tree(chart, width), Text(), *_units(placement, signs), _legend(chart)]
    return Trimmed(picture=Group(*parts))


def _tree(chart: Chart, width: int) -> list[Text]:
    lines: list[Text] = []
    shown: tuple[str, ...] = ()
    cell_width = max(len(seat.cell) for seat in chart.seats) + 1
    for path, seats in chart.rows():
        for depth, domain in enumerate(path):
            if path[: depth + 1] != shown[: depth + 1]:
                lines.append(_domain(chart.placement.levels[depth], domain, depth))
        shown = path
        indent = 2 * len(path)
        per_line = max(1, (width - indent) // cell_width)
        for at in range(0, len(seats), per_line):
            line = Text(" " * indent, no_wrap=True)
            for seat in seats[at : at + per_line]:
                style = "bold red" if seat.word in ("failed", None) else seat.style
                line.append(seat.cell.ljust(cell_width), style=style)
            line.rstrip()
            lines.append(line)
    return lines


def _domain(level: str, domain: str, depth: int) -> Text:
    named = (domain, "bold") if domain else ("(no label)", "yellow")
    # A level may be a label key; its last part names it.
    return Text.assemble("  " * depth, (f"{level.rpartition('/')[2]} ", "dim"), named)


def _units(placement: JobPlacement, signs: Signs) -> list[RenderableType]:
    if not placement.units:
        return []
    spans = dict(enumerate(placement.spans))
    order = sorted(range(len(placement.units)), key=lambda unit: (-spans.get(unit, 1), unit))
    if len(order) > MOST_UNITS:
        order = [unit for unit in order if spans.get(unit, 1) > 1]
    asked = f", one {placement.group_within} asked" if placement.group_within else ""
    table = Table.grid(padding=(0, 2))
    for unit in order[:MOST_UNITS]:
        table.add_row(
            Text(unit_name(unit), style=_COLORS[unit % len(_COLORS)]),
            f"nodes {_ranges(placement.units[unit])}",
            _span(placement, spans.get(unit, 1), signs),
        )
    parts: list[RenderableType] = [Text(f"units of reorder groups{asked}", style="dim")]
    if order:
        parts.append(table)
    if len(order) > MOST_UNITS:
        parts.append(Text(f"and {len(order) - MOST_UNITS} more that span", style="dim"))
    whole = len(placement.units) - len(order)
    if whole:
        span = _span(placement, 1, signs)
        parts.append(Text.assemble(f"{counted(whole, 'unit')}{' more' if order else ''} ", span))
    return parts


def _span(placement: JobPlacement, span: int, signs: Signs) -> Text:
    if placement.group_within is None:
        return Text()
    level = placement.group_within.rpartition("/")[2]
    if span == 1:
        return Text(f"{signs.good} in one {level}", style="green")
    return Text(f"! spans {counted(span, level)}", style="bold yellow")


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 8`, cut short where it gets long."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:6]]
    return ", ".join(shown) + (f", ... ({len(numbers)})" if len(runs) > 6 else "")


def _legend(chart: Chart) -> Text:
    """Every state that is in the picture, with its mark and its number."""
    said = []
    for word, mark in _MARKS.items():
        number = sum(1 for seat in chart.seats if seat.word == word)
        if number:
            name = word or "not there"
            said.append(f"{mark} {name}: {number}" if mark else f"{name}: {number}")
    return Text(f"pods  {'   '.join(said)}", style="dim")


def placement_table(chart: Chart) -> Trimmed:
    """A line a pod."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("", "kubernetes node", "domains", "pod", "state"):
        table.add_column(column, overflow="fold")
    for seat in chart.seats:
        state = seat.word or "not there"
        table.add_row(
            Text(seat.label, style=seat.style),
            seat.pod.node,
            "/".join(seat.pod.path[: chart.depth]),
            seat.pod.name,
            f"{state}: {seat.detail}" if seat.detail else state,
        )
    return Trimmed(picture=table)
