"""The page about a run of `make e2e`: one HTML file with its pictures inside. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

from omni_contract.status import STAGES
from tests.e2e.cluster import pictures
from tests.e2e.cluster.history import DoneStep, Window, accepted, done_steps, windows_of
from tests.e2e.cluster.judge import FaultResult, Summary
from tests.e2e.cluster.record import Record
from tests.e2e.cluster.style import STYLE

_AGAINST: Final = {"none": "nothing", "user": "limit", "infrastructure": "infrastructureLimit"}


def render_page(record: Record, summary: Summary) -> str:
    """The whole page."""
    windows, done = windows_of(record), done_steps(record.steps)
    title = f"{record.job}: {len(windows)} faults in one run"
    parts = (
        _head(record, summary, title),
        _numbers(record, summary, done),
        _breaches(summary),
        _timeline(record, summary, windows, done),
        _table(windows, summary.faults),
        _recoveries(windows, summary.faults),
        _losses(record, summary, windows, done),
        _checks(record),
        _events(record),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _head(record: Record, summary: Summary, title: str) -> str:
    began = datetime.fromtimestamp(record.began_s, UTC)
    nodes = {pod.node for seen in record.seen for pod in seen.pods.values() if pod.node}
    told = (
        f"{record.num_steps} steps on {len(nodes)} real nodes, {began:%Y-%m-%d %H:%M} UTC. "
        "Each fault was injected while "
        "the job trained and repaired by the operator without a hand; what had to come of it stood "
        "in a table before the run."
    )
    num = len(summary.breaches)
    word = f"{num} breach{'' if num == 1 else 'es'}" if num else "passed"
    kind = "bad" if num else "good"
    return (
        f"<header><div><h1>{escape(title)}</h1><p>{escape(told)}</p></div>"
        f'<span class="verdict {kind}">{word}</span></header>\n'
    )


def _numbers(record: Record, summary: Summary, done: Sequence[DoneStep]) -> str:
    num_right = sum(fault.right_class and fault.right_action for fault in summary.faults)
    num_again = sum(fault.lost_steps for fault in summary.faults)
    times = sorted(
        fault.recover_s
        for fault in summary.faults
        if fault.detect_s is not None and fault.recover_s is not None
    )
    slowest = f"{times[-1]:.0f} s" if times else "-"
    quickest = f"of {len(times)} restarts, the quickest {times[0]:.0f} s" if times else "no restart"
    goodput = "-" if summary.goodput is None else f"{100 * summary.goodput:.0f} %"
    equal = summary.loss_equal_to_undisturbed
    cards = (
        (summary.final_phase, "the job, in the end", summary.final_phase == "Completed"),
        (
            f"{num_right} / {len(summary.faults)}",
            "faults with the right class and action",
            num_right == len(summary.faults),
        ),
        (str(summary.restarts_counted), "restarts counted", None),
        (
            f"{summary.samples_lost} / {summary.samples_repeated}",
            "samples lost / repeated",
            not (summary.samples_lost or summary.samples_repeated),
        ),
        ("equal" if equal else "differs", f"loss at all {record.num_steps} steps", equal),
        (str(num_again), "steps done again", None),
        (slowest, f"slowest recovery {quickest}", None),
        (goodput, "goodput, by the job's status", None),
        (str(summary.leftover_pods), "pods left", not summary.leftover_pods),
        (pictures.clock(record.ended_s - record.began_s), "minutes from creation to end", None),
    )
    return f'<div class="numbers">{"".join(_card(*card) for card in cards)}</div>\n' + _spent(
        record, done
    )


def _card(value: str, label: str, is_good: bool | None) -> str:
    kind = {True: ' class="good"', False: ' class="bad"', None: ""}[is_good]
    return f'<div class="number"><b{kind}>{escape(value)}</b><span>{escape(label)}</span></div>'


def _spent(record: Record, done: Sequence[DoneStep]) -> str:
    """Where the seconds of the run went, as one bar."""
    spent = pictures.time_spent(record, done)
    total_s = max(sum(spent.values()), 1e-9)
    kinds = dict(zip(spent, ("new", "again", "rest"), strict=True))
    bar = "".join(
        f'<i class="{kinds[name]}" style="width: {100 * seconds / total_s:.2f}%"></i>'
        for name, seconds in spent.items()
    )
    legend = _legend(
        (kinds[name], f"{name}: {seconds:.0f} s, {100 * seconds / total_s:.0f} %")
        for name, seconds in spent.items()
    )
    return _section(
        "Where the time went",
        "From the job's creation to its end. In the rest pods started, faults were noticed and "
        "checkpoints read.",
        f'<div class="spent">{bar}</div>{legend}',
    )


def _breaches(summary: Summary) -> str:
    if not summary.breaches:
        return ""
    lines = "".join(f"<li>{escape(_clip(breach))}</li>" for breach in summary.breaches)
    text = "What was seen and must not be, or was not seen and must."
    return _section("Breaches", text, f"<ul>{lines}</ul>", kind="breaches")


def _timeline(
    record: Record, summary: Summary, windows: Sequence[Window], done: Sequence[DoneStep]
) -> str:
    attempts = sorted({pod.attempt for seen in record.seen for pod in seen.pods.values()})
    legend = _legend(
        [
            *((pictures.color_class(a), f"attempt {a}") for a in attempts),
            ("detect", "fault to incident"),
            ("recover", "incident to a step never done before"),
            ("trains-on", "fault to the next step, without an incident"),
        ]
    )
    picture = pictures.timeline(record, windows, summary.faults, done)
    return _section(
        "What happened",
        "The first row is the job's phase, green while it runs. Bars below are pods on their "
        "nodes, coloured by the attempt that they belong to; the number in a bar is the pod's "
        "place in the plan, pale bars are spares, hatched ones are being deleted. Last, the steps "
        "of each attempt: where a line begins below the one before, steps were done again.",
        f'{legend}<div class="wide">{picture}</div>',
    )


def _table(windows: Sequence[Window], results: Sequence[FaultResult]) -> str:
    head = (
        "<tr><th></th><th>fault</th><th>expected</th><th>seen</th>"
        '<th class="right">detected<br>after</th><th class="right">first step<br>after</th>'
        '<th class="right">recovered<br>after</th><th class="right">steps<br>again</th>'
        "<th>verdict</th></tr>"
    )
    rows = (
        _row(number, window, result)
        for number, (window, result) in enumerate(zip(windows, results, strict=True), 1)
    )
    return _section(
        "Faults",
        "Expected is what the table says, seen what the job's status told. Detected: when its "
        "incident says so; a restart in place is the supervisors' own, and the operator hears of "
        "it with a later heartbeat. First step: of the restart; recovered: the first step that "
        "had never been done before.",
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div>',
    )


def _row(number: int, window: Window, result: FaultResult) -> str:
    expected = window.expectation
    seen = [f"{i.fault}, {i.action}" for i in window.incidents] or ["none"]
    messages = [i.message.splitlines()[0] for i in window.incidents if i.message]
    is_right = result.right_class and result.right_action
    verdict = _word("right" if is_right else "wrong", is_right)
    return (
        f'<tr><td><b class="badge">{number}</b></td>'
        f"<td>{escape(expected.title)}{_small(window.injection.detail)}</td>"
        f"<td>{escape(expected.incident)}"
        f"{_small(f'counts against {_AGAINST[expected.counter]}; pods: {expected.pods}')}</td>"
        f"<td>{escape('; '.join(seen))}{_small(' '.join(messages))}</td>"
        f'<td class="right">{_s(result.detect_s)}</td><td class="right">{_s(result.resume_s)}</td>'
        f'<td class="right">{_s(result.recover_s)}</td><td class="right">{result.lost_steps}</td>'
        f"<td>{verdict}</td></tr>"
    )


def _recoveries(windows: Sequence[Window], results: Sequence[FaultResult]) -> str:
    legend = _legend(
        [
            *((stage, stage) for stage in STAGES),
            ("again", "steps done again"),
            ("trains-on", "no restart"),
        ]
    )
    return _section(
        "Seconds of each recovery",
        "Since the injection. Until it was detected as measured from outside, then the stages that "
        "the incident tells. The line is the first step of the restart, the ring the first step "
        "that had never been done before, both as the trainer wrote them.",
        f'{legend}<div class="wide">{pictures.recoveries(windows, results)}</div>',
    )


def _losses(
    record: Record, summary: Summary, windows: Sequence[Window], done: Sequence[DoneStep]
) -> str:
    wanted = accepted(done_steps(record.undisturbed))
    apart = [abs(one.loss - wanted[one.step].loss) for one in done if one.step in wanted]
    num_again = len(done) - len({one.step for one in done})
    if not apart:
        word = "There is no undisturbed job to compare it with."
    elif summary.loss_equal_to_undisturbed:
        word = "Equal at every step, to the last bit."
    else:
        word = f"Not equal: at the furthest step {max(apart):g} apart."
    text = (
        "The wide line is the job that nothing happened to, dots are this one's steps, rings those "
        f"that were done again later ({num_again}). {word}"
    )
    picture = pictures.losses(record, done, wanted, windows)
    return _section("Loss", text, f'<div class="wide">{picture}</div>')


def _checks(record: Record) -> str:
    rows = "".join(
        f"<tr><td>{_word('holds' if check.holds else 'fails', check.holds)}</td>"
        f'<td class="name">{escape(check.name)}</td>'
        f"<td><code>{escape(_clip(check.detail))}</code></td></tr>"
        for check in record.checks
    )
    facts = "".join(
        f'<tr><td>{escape(name)}</td><td class="right">{value:g}</td></tr>'
        for name, value in sorted(record.facts.items())
    )
    more = f"<details><summary>Figures of the run</summary><table>{facts}</table></details>"
    return _section(
        "Checks",
        "What was looked at beside the faults.",
        f"<table><tr><th></th><th>check</th><th>seen</th></tr>{rows}</table>"
        + (more if facts else ""),
    )


def _events(record: Record) -> str:
    lines = sorted(map(_event, record.events))
    rows = "".join(
        f"<tr><td>{escape(time)}</td><td>{escape(reason)}</td><td>{escape(message)}</td></tr>"
        for time, reason, message in lines
    )
    table = f"<table><tr><th>time (UTC)</th><th>reason</th><th>message</th></tr>{rows}</table>"
    shown = f"<details><summary>{len(lines)} Events</summary>{table}</details>"
    return _section("Diary", "What `kubectl describe` shows of the job.", shown) if lines else ""


def _event(body: dict[str, Any]) -> tuple[str, str, str]:
    time = body.get("eventTime") or body.get("lastTimestamp") or body.get("firstTimestamp") or ""
    message = body.get("message") or body.get("note") or ""
    count = body.get("count") or 1
    times = f" ({count} times)" if count > 1 else ""
    return str(time)[:19].replace("T", " "), body.get("reason", ""), f"{message}{times}"


def _section(title: str, text: str, body: str, *, kind: str = "") -> str:
    of_kind = f' class="{kind}"' if kind else ""
    return f"<section{of_kind}><h2>{escape(title)}</h2><p>{escape(text)}</p>{body}</section>\n"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    def parts() -> Iterator[str]:
        for kind, text in entries:
            yield f'<span><i class="{kind}"></i>{escape(text)}</span>'

    return f'<div class="legend">{"".join(parts())}</div>'


def _word(word: str, is_good: bool) -> str:
    return f'<span class="{"good" if is_good else "bad"}">{word}</span>'


def _small(text: str) -> str:
    return f"<small>{escape(_clip(text))}</small>" if text else ""


def _clip(text: str, most: int = 400) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
