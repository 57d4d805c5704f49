"""What a person sees of one job: progress, budgets, conditions, the newest incident, what to do."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from omni_cli.job_read import JobRecord, time_of
from omni_contract.status import CONDITIONS, STAGES, Condition, Incident

UNSEEN_S: Final = 15
"""An operator that runs has looked at a new job long before this."""

_BAR: Final = 40
_ASKS: Final = ("Degraded", "Restarting", "Suspended")
"""Conditions that want a look where they hold."""
_STYLES: Final = {
    "Pending": "yellow",
    "Starting": "cyan",
    "Running": "bold green",
    "Restarting": "bold yellow",
    "Suspended": "yellow",
    "Completed": "bold green",
    "Failed": "bold red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Characters of the pictures, by what the terminal can show."""

    good: str
    bad: str
    waits: str
    off: str
    full: str
    empty: str

    @classmethod
    def of(cls, console: Console) -> Self:
        """Signs beyond ASCII only where the locale can write them."""
        if console.encoding.lower().startswith("utf"):
            return cls(good="✓", bad="✗", waits="○", off="·", full="█", empty="░")
        return cls(good="+", bad="x", waits="o", off=".", full="#", empty=".")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """A picture without the blanks to the right with which tables fill their cells."""

    picture: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich asks for."""
        for line in console.render_lines(self.picture, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                last = line.pop()
                line.append(Segment(last.text.rstrip(), last.style))
            yield from line
            yield Segment.line()


def status_picture(job: JobRecord, signs: Signs, now: datetime) -> Trimmed:
    """Everything that `kubectl mmtj status` shows."""
    status = job.status
    parts: list[RenderableType] = [_heading(job)]
    if status.progress.num_steps:
        parts += [_progress_bar(job, signs), Text(progress_line(job))]
    parts.append(_facts(job))
    if status.conditions:
        parts += [Text(), _conditions(job, signs, now)]
    if status.incidents:
        parts += [Text(), _incident(status.incidents[-1], now)]
    hint = advice(job, now)
    if hint:
        parts += [Text(), Text(hint, style="bold")]
    return Trimmed(picture=Group(*parts))


def _heading(job: JobRecord) -> Text:
    status = job.status
    return Text.assemble(
        (job.name, "bold"),
        "  ",
        (status.phase, _STYLES[status.phase]),
        f"  {_attempt(job)}, namespace {job.namespace}",
    )


def _attempt(job: JobRecord) -> str:
    status = job.status
    return f"attempt {status.attempt}.{status.generation}" if status.attempt else "no attempt yet"


def _progress_bar(job: JobRecord, signs: Signs) -> Text:
    progress = job.status.progress
    share = min(1.0, progress.step / progress.num_steps)
    full = int(share * _BAR)
    return Text.assemble(
        (signs.full * full, "green"),
        (signs.empty * (_BAR - full), "dim"),
        f" step {progress.step:,}/{progress.num_steps:,}  {100 * share:.1f} %",
    )


def progress_line(job: JobRecord) -> str:
    """Tokens, speed, loss, goodput and time left, as far as they are known."""
    status = job.status
    progress = status.progress
    known = [f"{progress.tokens:,} tokens"]
    if progress.tokens_per_second is not None and job.end is None:
        known.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.loss is not None:
        known.append(f"loss {progress.loss:.4f}")
    if status.goodput is not None:
        known.append(f"goodput {100 * status.goodput:.1f} %")
    left_s = seconds_left(job)
    if left_s is not None:
        known.append(f"ETA {clock(left_s)}")
    return "  ".join(known)


def seconds_left(job: JobRecord) -> float | None:
    """Time to the last step at the speed of the last minute; None where none is made now."""
    progress = job.status.progress
    if not job.holds("Running") or not progress.tokens_per_second or not progress.tokens:
        return None
    tokens_per_step = progress.tokens / max(1, progress.step)
    return (progress.num_steps - progress.step) * tokens_per_step / progress.tokens_per_second


def _facts(job: JobRecord) -> Table:
    status = job.status
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("restarts", _restarts(job))
    if status.progress.checkpoint_step is not None:
        table.add_row("checkpoint", f"step {status.progress.checkpoint_step:,}")
    if status.placement is not None:
        table.add_row("placement", _placement(job))
    if status.plan_hash is not None:
        table.add_row("plan", f"{status.plan_hash}{_shrunk(job)}")
    for node in status.excluded_nodes:
        table.add_row("left out", f"node {node.name} until {node.until}: {node.reason}")
    return table


def _restarts(job: JobRecord) -> str:
    spent, limits = job.status.budget, job.limits
    if limits is None:
        return f"{job.status.restarts}"
    user = max(0, limits.limit - spent.user)
    infrastructure = max(0, limits.infrastructure_limit - spent.infrastructure)
    without_progress = max(0, limits.no_progress_limit - spent.without_progress)
    return (
        f"{job.status.restarts}; left: user {user}/{limits.limit}, infrastructure "
        f"{infrastructure}/{limits.infrastructure_limit}, without progress "
        f"{without_progress}/{limits.no_progress_limit}"
    )


def _placement(job: JobRecord) -> str:
    summary = job.status.placement
    assert summary is not None
    said = f"{counted(summary.nodes, 'node')}"
    if summary.spares:
        said += f" + {counted(summary.spares, 'spare')}"
    if summary.job_domain:
        said += f" in {summary.job_domain}"
    if summary.level and summary.num_groups:
        said += (
            f"; {summary.groups_in_one_domain} of {counted(summary.num_groups, 'group')} within "
            f"one {summary.level}"
        )
    return said


def _shrunk(job: JobRecord) -> str:
    asked = (job.spec.get("resources") or {}).get("nodes") or 1
    runs = job.status.num_nodes
    return f", shrunk to {runs} of {asked} nodes" if runs is not None and runs < asked else ""


def _conditions(job: JobRecord, signs: Signs, now: datetime) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column()
    table.add_column()
    table.add_column(style="dim", justify="right")
    table.add_column(overflow="fold")
    for found, others in _said_once(job):
        table.add_row(
            _sign(found, signs),
            found.type,
            age(now, time_of(found.last_transition_time)),
            Text.assemble((found.reason, "bold"), " ", (found.message, ""), (others, "dim")),
        )
    return table


def _said_once(job: JobRecord) -> Iterator[tuple[Condition, str]]:
    """The conditions in their order, each with a line on those that say the same: the one that
    holds stands for all of them, else the first."""
    found = [one for kind in CONDITIONS if (one := job.condition(kind)) is not None]
    alike: dict[tuple[str, str], list[Condition]] = {}
    for one in found:
        alike.setdefault((one.reason, one.message), []).append(one)
    for one in found:
        group = alike[one.reason, one.message]
        if one is not next((other for other in group if other.status == "True"), group[0]):
            continue
        also = [o.type for o in group if o is not one and o.status == one.status]
        differ = [o.type for o in group if o.status != one.status]
        lines = [f"\nalso {', '.join(also)}"] if also else []
        lines += [f"\nso not {', '.join(differ)}"] if differ else []
        yield one, "".join(lines)


def _sign(found: Condition, signs: Signs) -> Text:
    if found.status == "Unknown":
        return Text("?", style="yellow")
    holds = found.status == "True"
    if found.type == "Failed":
        return Text(signs.bad, style="bold red") if holds else Text(signs.off, style="dim")
    if found.type in _ASKS:
        return Text("!", style="bold yellow") if holds else Text(signs.off, style="dim")
    if holds:
        return Text(signs.good, style="green")
    if found.type == "Accepted":
        return Text(signs.bad, style="bold red")
    return Text(signs.waits, style="yellow")


def _incident(incident: Incident, now: datetime) -> Text:
    where = f" on {incident.kubernetes_node}" if incident.kubernetes_node else ""
    stages = ", ".join(
        f"{name} {incident.seconds[name]:.1f} s" for name in STAGES if name in incident.seconds
    )
    return Text.assemble(
        (f"newest incident, {age(now, time_of(incident.time))} ago: ", ""),
        (f"{incident.fault}{where}, {incident.action}", "bold"),
        f" (attempt {incident.attempt}.{incident.generation})\n  {incident.message}",
        f"\n  {stages}" if stages else "",
    )


def advice(job: JobRecord, now: datetime) -> str | None:
    """What a person can do where the job does not run; None where nothing needs doing."""
    return next(_advice(job, now), None)


def _advice(job: JobRecord, now: datetime) -> Iterator[str]:
    name, status = job.name, job.status
    if job.end == "Failed":
        before = f", kubectl mmtj logs {name} --previous-attempt" if status.attempt > 1 else ""
        yield (
            f"It is over. See why: kubectl mmtj timeline {name}, kubectl mmtj logs {name}{before}. "
            "To go on from its checkpoints, mend the cause, delete it and apply it again with "
            "checkpoint.resumeFrom the same as its checkpoint.uri."
        )
    if job.end is not None:
        return
    if status.observed_generation is None:
        if (now - job.created).total_seconds() > UNSEEN_S:
            yield (
                "No operator has looked at it yet. Does it run? kubectl get deployments -A "
                "-l app.kubernetes.io/name=megascale-omni"
            )
        return
    if status.observed_generation < job.generation:
        yield "The operator has not looked at the newest spec yet."
    accepted = job.condition("Accepted")
    if accepted is not None and accepted.status == "False":
        yield f"Mend the spec as the message says: kubectl edit mmtj {name}"
    if job.is_suspended:
        yield f"It waits until you say: kubectl mmtj resume {name}"
    placed, gang = job.condition("Placed"), job.condition("GangReady")
    if placed is not None and placed.status == "False" and placed.reason != "Placing":
        yield _ROOM.get(placed.reason, _ROOM[""]).format(name=name)
    if gang is not None and gang.status == "False" and placed is not None:
        yield f"It waits for its pods. Which and why: kubectl mmtj placement {name}"
    if job.holds("Restarting"):
        yield f"It comes back by itself. Follow it: kubectl mmtj status {name} --watch"
    if job.holds("Running") and not status.progress.step and job.limits is not None:
        yield (
            f"The first step may take restart.startAfterSeconds, "
            f"{job.limits.start_after_seconds:g} s here: imports, data, warm-up."
        )


_LEVELS: Final = (
    "Ask for a level that the nodes are labelled with in spec.topology: kubectl edit mmtj {name}, "
    "kubectl get nodes --show-labels"
)
_ROOM: Final[Mapping[str, str]] = {
    "": (
        "It waits for room and starts by itself. Free nodes, ask for less with resources.nodes in "
        "a new job, or loosen spec.topology (onUnsatisfied: Relax or Shrink)."
    ),
    "QuotaExceeded": (
        "It waits for quota and starts by itself. See what is used: kubectl describe resourcequota"
    ),
    "UnknownTopologyLevel": _LEVELS,
    "TopologyLabelsMissing": _LEVELS,
    "NoQueueSystem": (
        "Install the queue system, or take spec.queueName out: kubectl edit mmtj {name}"
    ),
}


def outcome_line(job: JobRecord) -> str:
    """The state in one line, for what is no terminal."""
    progress = job.status.progress
    done = f"  step {progress.step}/{progress.num_steps}" if progress.num_steps else ""
    return (
        f"{job.name}  {job.status.phase}  {_attempt(job)}"
        f"  {counted(job.status.restarts, 'restart')}{done}"
    )


def counted(number: int, word: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def age(now: datetime, then: datetime) -> str:
    """Time since, as kubectl writes it: 40s, 12m, 5h, 3d."""
    seconds = max(0, int((now - then).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h" if seconds < 172_800 else f"{seconds // 86_400}d"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
