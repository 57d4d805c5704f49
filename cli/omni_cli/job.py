"""`kubectl mmtj`: look at jobs in a cluster and steer them, all through kubectl."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import click
from rich.console import Console, RenderableType
from rich.live import Live

from omni_cli import job_logs
from omni_cli.job_placement import Chart, placement_picture, placement_table
from omni_cli.job_read import (
    JOBS,
    JobRecord,
    find_job,
    read_events,
    read_placement,
    read_pods,
)
from omni_cli.job_timeline import timeline_picture
from omni_cli.job_view import Signs, outcome_line, status_picture
from omni_cli.kubectl import Kubectl, UnreachableError
from omni_contract import names
from omni_contract.errors import OmniError
from omni_contract.names import Exit

PROGRAM: Final = "kubectl mmtj"

_OUTAGE_S: Final = 120.0
"""A watch outlives an API server that is away for this long, as it is in an upgrade."""
_HELP: Final = """Look at training jobs in a cluster and steer them.

\b
  kubectl apply -f job.yaml
  kubectl mmtj status              what is true now, and what to do where it waits
  kubectl mmtj status --watch      the same, until the job is over
  kubectl mmtj timeline            faults, how each was answered, seconds per stage
  kubectl mmtj placement           racks and groups, a picture
  kubectl mmtj logs -f             log of the trainer on node 0
\b
JOB may be left out where the namespace holds one job only. -n, --context and
--kubeconfig mean what they mean to kubectl, which does all the talking.

Exit codes: 0 done, 1 the job Failed (status --watch, restart --wait), 2 a mistake or a
refusal, 130 interrupted.
"""
_Command = Callable[..., Any]


def _cluster_options(command: _Command) -> _Command:
    for option in (
        click.option("--kubeconfig", metavar="FILE", help="Kubeconfig file."),
        click.option("--context", metavar="NAME", help="Context of the kubeconfig."),
        click.option("-n", "--namespace", metavar="NAME", help="Namespace of the job."),
    ):
        command = option(command)
    return command


def _on_a_job(command: _Command) -> _Command:
    return click.argument("job", required=False)(_cluster_options(command))


@click.group(
    help=_HELP,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 90},
)
@_cluster_options
@click.pass_context
def mmtj(ctx: click.Context, /, **options: str | None) -> None:
    """Hold the commands together; its help is `_HELP`."""
    ctx.obj = options


def _kubectl(options: dict[str, str | None]) -> Kubectl:
    """Flags stand before or behind the command; those behind it win."""
    before: dict[str, str | None] = click.get_current_context().obj or {}
    given = {key: value for key, value in options.items() if value is not None}
    return Kubectl(**{**before, **given})


@mmtj.command()
@_on_a_job
@click.option("-w", "--watch", is_flag=True, help="Go on until the job is Completed or Failed.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.05),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks of --watch.",
)
def status(job: str | None, watch: bool, every: float, **options: str | None) -> int:
    """Show what is true about JOB now.

    Progress, restarts left, every condition with its reason, the newest incident and, where the job
    waits, what would help. With --watch the exit code is 0 for Completed and 1 for Failed.
    """
    kubectl, console = _kubectl(options), _console()
    record = find_job(kubectl, job)
    if not watch:
        console.print(_picture(record, console))
        return Exit.OK
    return _watch(_looks(kubectl, record, every, console), console)


def _picture(record: JobRecord, console: Console) -> RenderableType:
    return status_picture(record, Signs.of(console), datetime.now(UTC))


def _looks(
    kubectl: Kubectl, record: JobRecord, every_s: float, console: Console
) -> Iterator[JobRecord]:
    """The job again and again. Raises OmniError when it is deleted or the cluster stays away."""
    answered_s = time.monotonic()
    is_away = False
    uid = record.uid
    while True:
        yield record
        time.sleep(every_s)
        try:
            record = find_job(kubectl, record.name)
        except UnreachableError:
            if time.monotonic() - answered_s > _OUTAGE_S:
                raise
            if not is_away:
                console.print("the cluster does not answer; still trying", style="yellow")
            is_away = True
            continue
        is_away = False
        answered_s = time.monotonic()
        if record.uid != uid:
            raise OmniError(f"job {record.name} was deleted, and another one has its name now")


def _watch(looks: Iterator[JobRecord], console: Console) -> int:
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for record in looks:
                live.update(_picture(record, console), refresh=True)
                if record.end is not None:
                    return _exit_code(record)
    said = None
    for record in looks:
        line = outcome_line(record)
        if line != said:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            said = line
        if record.end is not None:
            console.print(_picture(record, console))
            return _exit_code(record)
    raise AssertionError("looks end by an error only")


def _exit_code(record: JobRecord) -> int:
    return Exit.OK if record.end == "Completed" else Exit.ERROR


@mmtj.command()
@_on_a_job
def timeline(job: str | None, **options: str | None) -> None:
    """Show what happened to JOB, oldest first.

    The newest faults with what was done about each and how long every stage of the recovery took,
    then all that is known in time order, with the Kubernetes Events that have not expired yet.
    """
    kubectl = _kubectl(options)
    record = find_job(kubectl, job)
    _console().print(timeline_picture(record, read_events(kubectl, record)))


@mmtj.command()
@_on_a_job
@click.option(
    "-o",
    "--output",
    type=click.Choice(["picture", "wide", "json"]),
    default="picture",
    show_default=True,
    help="wide: a line a pod. json: the placement as the operator keeps it.",
)
def placement(job: str | None, output: str, **options: str | None) -> None:
    """Draw where JOB runs: topology domains, and in them the nodes of its plan.

    A node is shown as its unit (A, B, ...: nodes that hold the same reorder groups and should be
    close to each other) and its index in the plan, a spare as S, with a mark for its pod's state.
    """
    kubectl = _kubectl(options)
    record = find_job(kubectl, job)
    placed = read_placement(kubectl, record)
    if output == "json":
        click.echo(placed.model_dump_json(indent=2))
        return
    console = _console()
    chart = Chart.of(placed, read_pods(kubectl, record))
    if output == "wide":
        console.print(placement_table(chart))
    else:
        console.print(placement_picture(record.name, chart, Signs.of(console), width=console.width))


@mmtj.command()
@_on_a_job
@click.option(
    "--node", type=click.IntRange(min=0), default=0, help="Node of the plan. [default: 0]"
)
@click.option("--rank", type=click.IntRange(min=0), help="What a rank printed itself.")
@click.option(
    "-c",
    "--container",
    type=click.Choice([names.TRAINER_CONTAINER, names.DATA_CONTAINER]),
    default=names.TRAINER_CONTAINER,
    show_default=True,
    help="data: the data service.",
)
@click.option("--attempt", type=click.IntRange(min=1), help="Of this attempt only.")
@click.option("--previous-attempt", is_flag=True, help="The attempt before this one.")
@click.option("--all", "of_all", is_flag=True, help="Every pod there is, each line with its name.")
@click.option("-f", "--follow", is_flag=True, help="Go on as lines are written.")
@click.option("--tail", type=click.IntRange(min=-1), help="Last lines only.")
def logs(
    job: str | None,
    node: int,
    rank: int | None,
    container: str,
    attempt: int | None,
    previous_attempt: bool,
    of_all: bool,
    follow: bool,
    tail: int | None,
    **options: str | None,
) -> int:
    """Print the log of JOB's trainer on one node.

    Node 0 hosts rank 0, which tells loss and step. A pod that lived on over several attempts has
    one log for all of them; --attempt shows each apart. Logs of ranks, and those of pods that are
    gone, come from the job's object store: they are there ten seconds after they were written.
    """
    one_of_all = attempt is not None or previous_attempt or rank is not None
    if of_all and one_of_all:
        raise click.UsageError("--all shows the pods that are there; name no attempt and no rank")
    if attempt is not None and previous_attempt:
        raise click.UsageError("--attempt and --previous-attempt exclude each other")
    kubectl = _kubectl(options)
    record = find_job(kubectl, job)
    if previous_attempt:
        attempt = record.status.attempt - 1
        if attempt < 1:
            raise OmniError(f"job {record.name} has had no attempt before this one")
    request = job_logs.Request(
        node=node, container=container, attempt=attempt, rank=rank, follow=follow, tail=tail
    )
    show = job_logs.show_all if of_all else job_logs.show
    return show(kubectl, record, request)


@mmtj.command()
@_on_a_job
@click.option("--wait", is_flag=True, help="Wait until the job runs again.")
def restart(job: str | None, wait: bool, **options: str | None) -> int:
    """End all pods of JOB and start them again from its newest checkpoint.

    The pods have time to save one more. This counts against no restart limit.
    """
    kubectl = _kubectl(options)
    record = _living(find_job(kubectl, job))
    if record.is_suspended:
        raise OmniError(
            f"job {record.name} is suspended and has no pods to restart; "
            f"kubectl mmtj resume {record.name} starts it"
        )
    if not record.status.attempt:
        raise OmniError(
            f"job {record.name} has no attempt yet, so there is nothing to restart; see why: "
            f"kubectl mmtj status {record.name}"
        )
    asked = datetime.now(UTC).isoformat(timespec="milliseconds")
    kubectl.run("annotate", JOBS, record.name, f"{names.ANNOTATION_RESTART}={asked}", "--overwrite")
    click.echo(
        f"job {record.name}: the pods of attempt {record.status.attempt} end now, with "
        f"{record.grace_s} s for a last checkpoint; then attempt {record.status.attempt + 1} goes "
        "on from the newest one"
    )
    if not wait:
        return Exit.OK
    for look in _looks(kubectl, record, 2.0, _console()):
        if look.end is not None:
            click.echo(f"job {record.name} is {look.end}")
            return _exit_code(look)
        if look.status.restart_handled == asked and look.holds("Running"):
            click.echo(f"job {record.name} runs, attempt {look.status.attempt}")
            return Exit.OK
    raise AssertionError("looks end by an error only")


@mmtj.command()
@_on_a_job
def suspend(job: str | None, **options: str | None) -> None:
    """End the pods of JOB and keep its checkpoints; its nodes are free for others.

    The pods have time to save one more.
    """
    kubectl = _kubectl(options)
    record = _living(find_job(kubectl, job))
    if record.is_suspended:
        click.echo(f"job {record.name} is suspended already")
        return
    _set_suspend(kubectl, record, True)
    click.echo(
        f"job {record.name}: its pods end within {record.grace_s} s and save a checkpoint; "
        f"kubectl mmtj resume {record.name} goes on from there"
    )


@mmtj.command()
@_on_a_job
def resume(job: str | None, **options: str | None) -> None:
    """Start a suspended JOB again from its newest checkpoint, as soon as there is room."""
    kubectl = _kubectl(options)
    record = _living(find_job(kubectl, job))
    if not record.is_suspended:
        click.echo(f"job {record.name} is not suspended")
        return
    _set_suspend(kubectl, record, False)
    click.echo(
        f"job {record.name}: it goes on as soon as there is room; follow it with "
        f"kubectl mmtj status {record.name} --watch"
    )


def _living(record: JobRecord) -> JobRecord:
    if record.end is not None:
        raise OmniError(
            f"job {record.name} is {record.end}, and a job that is over stays so; to train on from "
            "its checkpoints, delete it and apply it again with checkpoint.resumeFrom the same as "
            "its checkpoint.uri"
        )
    return record


def _set_suspend(kubectl: Kubectl, record: JobRecord, value: bool) -> None:
    patch = json.dumps({"spec": {"suspend": value}})
    kubectl.run("patch", JOBS, record.name, "--type=merge", f"--patch={patch}")


def _console() -> Console:
    # Names and numbers have the colours given here and no others.
    return Console(highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    try:
        result = mmtj.main(args=arguments, prog_name=PROGRAM, standalone_mode=False)
        return int(result) if isinstance(result, int) else Exit.OK
    except OmniError as exc:
        print(f"{PROGRAM}: {exc}", file=sys.stderr)
        return Exit.USER
    except (KeyboardInterrupt, click.Abort):
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except click.ClickException as exc:
        exc.show()
        return Exit.USER
    except BrokenPipeError:
        # The reader has seen enough (`kubectl mmtj timeline | head`).
        sys.stdout = None
        return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
