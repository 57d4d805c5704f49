"""The pictures of the page about a run of `make e2e`, as SVG text with the page's classes. Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from omni_contract.status import STAGES
from tests.e2e.cluster.history import DoneStep, Window, accepted, status_of
from tests.e2e.cluster.judge import FaultResult
from tests.e2e.cluster.record import Pod, Record

NUM_COLORS: Final = 6
"""Colours of attempts; a seventh attempt has that of the first."""

_WIDTH: Final = 1120
_LEFT: Final = 132
_RIGHT: Final = 16
_BAR: Final = 16
_GAP: Final = 4
_TICKS_S: Final = (5, 10, 15, 30, 60, 120, 300, 600, 1200, 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """From a quantity to a place across the picture."""

    begin: float
    end: float
    left: float = _LEFT
    right: float = _WIDTH - _RIGHT

    def __call__(self, value: float) -> float:
        """Where a value is drawn; what lies outside is drawn at the edge."""
        share = (value - self.begin) / max(self.end - self.begin, 1e-9)
        return round(self.left + min(max(share, 0), 1) * (self.right - self.left), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A time in which the API showed a pod as the same."""

    begin_s: float
    end_s: float
    pod: Pod


@dataclass(frozen=True, slots=True, kw_only=True)
class PodLife:
    """A pod from the first to the last look at it."""

    name: str
    node: str
    """Empty: it never had one."""
    stretches: Sequence[Stretch]

    @property
    def begin_s(self) -> float:
        """When it was first seen."""
        return self.stretches[0].begin_s

    @property
    def end_s(self) -> float:
        """When it was first missing, or the run was over."""
        return self.stretches[-1].end_s


def pod_lives(record: Record) -> list[PodLife]:
    """Every pod that was ever seen, oldest first."""
    found: dict[tuple[str, str], list[Stretch]] = {}
    ends_s = [*(seen.at_s for seen in record.seen), max(record.ended_s, record.began_s)][1:]
    for seen, end_s in zip(record.seen, ends_s, strict=True):
        for name, pod in seen.pods.items():
            life = found.setdefault((name, pod.uid), [])
            if life and life[-1].pod == pod and life[-1].end_s == seen.at_s:
                life[-1] = Stretch(begin_s=life[-1].begin_s, end_s=end_s, pod=pod)
            else:
                life.append(Stretch(begin_s=seen.at_s, end_s=end_s, pod=pod))
    return [
        PodLife(
            name=name,
            node=next((s.pod.node for s in stretches if s.pod.node), ""),
            stretches=stretches,
        )
        for (name, _), stretches in found.items()
    ]


def lanes(lives: Sequence[PodLife]) -> dict[str, list[list[PodLife]]]:
    """Pods by node, and of each node in rows, so that none lies over another."""
    found: dict[str, list[list[PodLife]]] = {}
    for life in sorted(lives, key=lambda one: one.begin_s):
        rows = found.setdefault(life.node, [])
        free = next((row for row in rows if row[-1].end_s <= life.begin_s), None)
        if free is None:
            rows.append([life])
        else:
            free.append(life)
    return dict(sorted(found.items(), key=lambda one: (not one[0], one[0])))


def timeline(
    record: Record,
    windows: Sequence[Window],
    results: Sequence[FaultResult],
    done: Sequence[DoneStep],
) -> str:
    """Faults, phases of the job, pods on their nodes, and steps, over the time of the run."""
    time = Scale(begin=record.began_s, end=max(record.ended_s, record.began_s + 1))
    by_node = lanes(pod_lives(record))
    parts = [*_phases(record, time, top=52)]
    top = 84.0
    for node, rows in by_node.items():
        height = len(rows) * (_BAR + _GAP) + _GAP
        parts.append(_rect(0, top, _WIDTH, height, "lane"))
        parts.append(_text(8, top + height / 2, node or "no node yet", "label"))
        for number, row in enumerate(rows):
            y = top + _GAP + number * (_BAR + _GAP)
            parts += [bar for life in row for bar in _life(life, time, y)]
        top += height + 6
    steps_top, steps_height = top + 10, 120
    parts += _steps(record, done, time, top=steps_top, height=steps_height)
    bottom = steps_top + steps_height
    parts = [*_time_axis(time, top=44, bottom=bottom), *parts]
    for number, (window, result) in enumerate(zip(windows, results, strict=True), 1):
        parts += _fault(number, window, result, time, bottom=bottom)
    title = "Pods on nodes and steps of the job over time, with the faults"
    return _svg(bottom + 26, parts, title)


def _time_axis(time: Scale, *, top: float, bottom: float) -> Iterator[str]:
    span_s = time.end - time.begin
    every_s = next((t for t in _TICKS_S if span_s / t <= 14), _TICKS_S[-1])
    for number in range(int(span_s // every_s) + 1):
        x = time(time.begin + number * every_s)
        yield _line(x, top, x, bottom, "grid")
        yield _text(x, bottom + 16, clock(number * every_s), "tick middle")


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _phases(record: Record, time: Scale, *, top: float) -> Iterator[str]:
    yield _text(8, top + _BAR / 2, "job", "label")
    begin_s, phase = record.began_s, "Pending"
    for at_s, following in [
        *((seen.at_s, status_of(seen).phase) for seen in record.seen),
        (record.ended_s, None),
    ]:
        if following == phase:
            continue
        x, width = time(begin_s), time(at_s) - time(begin_s)
        told = f"{phase} from {clock(begin_s - time.begin)} to {clock(at_s - time.begin)}"
        yield _rect(x, top, width, _BAR, f"phase {phase.lower()}", told)
        if width > 8 * len(phase) + 8:
            yield _text(x + 6, top + _BAR / 2, phase, "in-bar")
        begin_s, phase = at_s, following or phase


def _life(life: PodLife, time: Scale, y: float) -> Iterator[str]:
    for stretch in life.stretches:
        pod, x = stretch.pod, time(stretch.begin_s)
        width = max(time(stretch.end_s) - x, 1.5)
        part = "spare" if pod.index is None else f"node {pod.index} of the plan"
        state = f"{pod.phase}, being deleted" if pod.is_leaving else pod.phase
        told = (
            f"{life.name}: attempt {pod.attempt}, {part}, {state}, "
            f"{clock(stretch.begin_s - time.begin)} to {clock(stretch.end_s - time.begin)}"
        )
        classes = ["pod", color_class(pod.attempt)]
        if pod.is_leaving:
            classes.append("leaving")
        elif pod.phase != "Running":
            classes.append("waiting" if pod.phase == "Pending" else "over")
        elif pod.index is None:
            classes.append("spare")
        yield _rect(x, y, width, _BAR, " ".join(classes), told)
        label = "spare" if pod.index is None else str(pod.index)
        if width > 10 + 7 * len(label) and pod.phase == "Running" and not pod.is_leaving:
            kind = "in-bar pale" if pod.index is None else "in-bar"
            yield _text(x + 6, y + _BAR / 2, label, kind)


def _steps(
    record: Record, done: Sequence[DoneStep], time: Scale, *, top: float, height: float
) -> Iterator[str]:
    yield _text(8, top + height / 2, "steps done", "label")
    up = Scale(begin=0, end=record.num_steps, left=top + height, right=top)
    for step in (0, record.num_steps // 2, record.num_steps):
        yield _line(_LEFT, up(step), _WIDTH - _RIGHT, up(step), "grid")
        yield _text(_LEFT - 8, up(step), str(step), "tick end")
    for pair, of_pair in _by_pair(done).items():
        points = [(time(one.at_s), up(one.step)) for one in of_pair if math.isfinite(one.at_s)]
        told = f"attempt {pair[0]}.{pair[1]}: steps {of_pair[0].step} to {of_pair[-1].step}"
        path = " ".join(f"{x},{y}" for x, y in points)
        yield (
            f'<polyline class="curve {color_class(pair[0])}" points="{path}">'
            f"<title>{escape(told)}</title></polyline>"
        )


def _fault(
    number: int, window: Window, result: FaultResult, time: Scale, *, bottom: float
) -> Iterator[str]:
    began_s = window.injection.began_s
    x = time(began_s)
    detected_s = began_s + (result.detect_s or 0)
    yield _line(x, 24, x, bottom, "struck")
    if result.recover_s is not None:
        end = time(began_s + result.recover_s)
        kind = "trains-on" if result.detect_s is None else "recover"
        told = f"trained beyond it after {result.recover_s:.1f} s"
        yield _rect(time(detected_s), 30, max(end - time(detected_s), 2), 8, kind, told)
    if result.detect_s is not None:
        told = f"seen after {result.detect_s:.1f} s"
        yield _rect(x, 30, max(time(detected_s) - x, 2), 8, "detect", told)
    told = f"{number}. {window.expectation.title}, {clock(began_s - time.begin)}"
    yield (
        f'<g class="mark"><title>{escape(told)}</title><circle cx="{x}" cy="14" r="10"/>'
        f'<text x="{x}" y="14" class="middle">{number}</text></g>'
    )


def recoveries(windows: Sequence[Window], results: Sequence[FaultResult]) -> str:
    """A bar for each fault: from the injection through the stages of the recovery."""
    longest_s = max((_end_s(result) for result in results), default=0)
    left = 300
    scale = Scale(begin=0, end=max(longest_s, 1) * 1.02, left=left, right=_WIDTH - 190)
    parts: list[str] = []
    for number, (window, result) in enumerate(zip(windows, results, strict=True), 1):
        y = 10 + (number - 1) * 30
        parts.append(
            f'<g class="mark"><circle cx="14" cy="{y + 9}" r="10"/>'
            f'<text x="14" y="{y + 9}" class="middle">{number}</text></g>'
        )
        parts.append(_text(34, y + 9, window.expectation.title, "label"))
        for stage, begin_s, end_s in _stages(result):
            width = scale(end_s) - scale(begin_s)
            told = f"{stage}: {end_s - begin_s:.1f} s"
            parts.append(_rect(scale(begin_s), y, max(width, 1), 18, f"stage {stage}", told))
        if result.resume_s is not None and result.detect_s is not None:
            x = scale(result.resume_s)
            parts.append(_line(x, y - 3, x, y + 21, "resumed"))
        if result.recover_s is not None:
            x = scale(result.recover_s)
            parts.append(f'<circle class="recovered" cx="{x}" cy="{y + 9}" r="4.5"/>')
            lost = f", {result.lost_steps} steps again" if result.lost_steps else ""
            beyond = scale(_end_s(result)) + 12
            parts.append(_text(beyond, y + 9, f"{result.recover_s:.1f} s{lost}", "value"))
    bottom = 10 + 30 * len(results)
    every_s = next((t for t in _TICKS_S if scale.end / t <= 10), _TICKS_S[-1])
    axis = []
    for at in range(int(scale.end // every_s) + 1):
        x = scale(at * every_s)
        axis.append(_line(x, 4, x, bottom, "grid"))
        axis.append(_text(x, bottom + 14, f"{at * every_s} s", "tick middle"))
    return _svg(bottom + 24, [*axis, *parts], "Seconds of each stage of each recovery")


def _end_s(result: FaultResult) -> float:
    """Where the bar of a fault ends, or its ring, if that is later."""
    return max([result.recover_s or 0, *(end_s for _, _, end_s in _stages(result))])


def _stages(result: FaultResult) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of what is told of a recovery, in seconds since the injection."""
    if result.detect_s is None:
        if result.recover_s is not None:
            yield "trains-on", 0, result.recover_s
        return
    yield "detect", 0, result.detect_s
    at_s = result.detect_s
    for stage in STAGES[1:]:
        if stage in result.stages:
            yield stage, at_s, at_s + result.stages[stage]
            at_s += result.stages[stage]
    if result.recover_s is not None and result.recover_s > at_s:
        yield "again", at_s, result.recover_s


def losses(
    record: Record,
    done: Sequence[DoneStep],
    wanted: Mapping[int, DoneStep],
    windows: Sequence[Window],
) -> str:
    """The loss of every step as each pair did it, over the curve of the undisturbed job."""
    finite = [one.loss for one in (*done, *wanted.values()) if math.isfinite(one.loss)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    pad = (high - low) * 0.06 or 0.5
    top, bottom = 30, 320
    across = Scale(begin=0, end=max(record.num_steps, 1), left=56)
    up = Scale(begin=low - pad, end=high + pad, left=bottom, right=top)
    parts = list(_loss_axes(across, up, top=top, bottom=bottom))
    curve = " ".join(f"{across(s)},{up(one.loss)}" for s, one in sorted(wanted.items()))
    parts.append(f'<polyline class="undisturbed" points="{curve}"/>')
    history = accepted(done)
    for one in done:
        pair = f"attempt {one.pair[0]}.{one.pair[1]}"
        told = f"step {one.step}, {pair}: {one.loss!r}"
        x, y = across(one.step), up(one.loss)
        if history[one.step] is one:
            kind, radius = f"dot {color_class(one.pair[0])}", 2.6
        else:
            kind, radius, told = f"again-dot {color_class(one.pair[0])}", 4.6, f"{told}, done again"
        parts.append(
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}">'
            f"<title>{escape(told)}</title></circle>"
        )
    for number, window in enumerate(windows, 1):
        x = across(window.injection.step)
        parts.append(_line(x, 24, x, bottom, "struck"))
        parts.append(
            f'<g class="mark"><circle cx="{x}" cy="14" r="10"/>'
            f'<text x="{x}" y="14" class="middle">{number}</text></g>'
        )
    return _svg(bottom + 40, parts, "Loss of every step beside the undisturbed job's")


def _loss_axes(across: Scale, up: Scale, *, top: float, bottom: float) -> Iterator[str]:
    every = next((t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (up.end - up.begin) / t <= 7), 10)
    for number in range(math.ceil(up.begin / every), math.floor(up.end / every) + 1):
        y = up(number * every)
        yield _line(across.left, y, across.right, y, "grid")
        yield _text(across.left - 8, y, f"{number * every:g}", "tick end")
    each = next((t for t in (1, 2, 5, 10, 20, 50, 100, 200) if across.end / t <= 14), 500)
    for step in range(0, int(across.end) + 1, each):
        yield _text(across(step), bottom + 16, str(step), "tick middle")
    yield _text((across.left + across.right) / 2, bottom + 34, "optimizer step", "tick middle")
    yield _line(across.left, bottom, across.right, bottom, "axis")


def time_spent(record: Record, done: Sequence[DoneStep]) -> dict[str, float]:
    """Seconds in which steps were made, in which steps were made again, and all others."""
    known: set[int] = set()
    new_s = again_s = 0.0
    for of_pair in _by_pair(done).values():
        for before, one in zip(of_pair, of_pair[1:], strict=False):
            span_s = one.at_s - before.at_s
            if one.step in known:
                again_s += span_s
            else:
                new_s += span_s
        known |= {one.step for one in of_pair}
    rest_s = max(0.0, record.ended_s - record.began_s - new_s - again_s)
    return {"new steps": new_s, "steps again": again_s, "no step": rest_s}


def _by_pair(done: Sequence[DoneStep]) -> dict[tuple[int, int], list[DoneStep]]:
    found: dict[tuple[int, int], list[DoneStep]] = {}
    for one in done:
        found.setdefault(one.pair, []).append(one)
    return found


def color_class(attempt: int) -> str:
    """The class with the colour of an attempt."""
    return f"a{(attempt - 1) % NUM_COLORS + 1}"


def _svg(height: float, parts: Iterable[str], title: str) -> str:
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
        f"{_PATTERNS}{body}</svg>"
    )


_PATTERNS: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" class="hatch-ground"/>'
    '<rect width="2.4" height="6" class="hatch-line"/></pattern></defs>'
)


def _rect(x: float, y: float, width: float, height: float, kind: str, told: str = "") -> str:
    title = f"<title>{escape(told)}</title>" if told else ""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" '
        f'rx="3">{title}</rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
