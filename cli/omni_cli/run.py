"""`omni run`: a job on this machine, with everything a cluster would give it except the pods."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console

from omni_cli import rehearsal
from omni_cli.launcher import (
    Launcher,
    Outcome,
    check_run_dir,
    kill_on_next_signal,
    terminable,
)
from omni_cli.local_s3 import LocalS3
from omni_cli.progress_view import RunView
from omni_cli.rehearsal import Fault
from omni_contract.errors import OmniError, SpecError
from omni_contract.jobfile import read_job
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_planner.compile import compile_plan
from omni_trainer.claims import newest_attempt
from omni_trainer.events import read_events
from omni_trainer.storage import Folder
from omni_trainer.supervisor.reaper import adopt_orphans

_INTERRUPT_S = 9.0


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option(
    "--local-s3",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Serve S3 from FOLDER on loopback while the job runs. Left out: the S3 of your shell.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Folder for logs, metrics and events. Left out: runs/NAME-TIME.",
)
@click.option("--fault", "faults", multiple=True, metavar="SPEC", help=rehearsal.HELP)
@click.option(
    "--trace-step",
    "trace_steps",
    multiple=True,
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Write the timeline of this step; repeatable.",
)
def run(
    job: Path,
    local_s3: Path | None,
    run_dir: Path | None,
    faults: tuple[str, ...],
    trace_steps: tuple[int, ...],
) -> int:
    """Run the job in the file JOB on this machine, without Kubernetes.

    Each node of the job becomes a data service and a supervisor with its ranks. A killed rank
    restarts all ranks in place, a killed data service is restarted alone, a killed supervisor
    begins a new attempt; training goes on from the newest checkpoint with exactly the samples it
    would have seen. Started again with the same checkpoint.uri, the job goes on where it was.

    Ctrl-C ends everything within 10 seconds, a second one at once.
    """
    return run_job(
        compile_plan(read_job(job)),
        local_s3=local_s3,
        run_dir=run_dir,
        faults=faults,
        trace_steps=trace_steps,
    )


def run_job(
    plan: JobPlan,
    *,
    local_s3: Path | None = None,
    run_dir: Path | None = None,
    faults: Sequence[str] = (),
    trace_steps: Sequence[int] = (),
    console: Console | None = None,
) -> int:
    """Run a compiled job to its end; returns the exit code, 0 only when all steps are done.

    Raises OmniError where the user must mend something first. Main thread only.
    """
    console = console or Console(stderr=False)
    fault_list = [Fault.parse(text, plan) for text in faults]
    for step in trace_steps:
        if not 1 <= step <= plan.num_steps:
            raise SpecError("--trace-step", f"{step}: the job has {plan.num_steps} steps")
    run_dir = (run_dir or _default_run_dir(plan.name)).absolute()
    check_run_dir(run_dir, plan)
    adopt_orphans()
    try:
        with terminable(), contextlib.ExitStack() as stack:
            if local_s3 is not None:
                server = stack.enter_context(LocalS3(local_s3))
                stack.enter_context(_environment(server.env))
            launcher = stack.enter_context(
                Launcher(
                    plan,
                    run_dir,
                    env=os.environ,
                    first_attempt=_next_attempt(plan, run_dir),
                    faults=fault_list,
                    trace_steps=trace_steps,
                )
            )
            view = stack.enter_context(RunView(plan, run_dir, console))
            view.say(f"run folder: {_shown(run_dir)}")
            begin_s = time.monotonic()
            try:
                outcome = launcher.run(view)
            except KeyboardInterrupt:
                kill_on_next_signal(after_s=_INTERRUPT_S, clean=launcher.remove_sockets)
                view.say("interrupted: ending all processes; again to kill them at once")
                launcher.interrupt()
                raise
            seconds = time.monotonic() - begin_s
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for fault in launcher.left_faults():
        console.print(f"rehearsed fault that never came: {fault.text}", style="yellow")
    return _conclude(outcome, view, console, run_dir, seconds)


def _conclude(
    outcome: Outcome, view: RunView, console: Console, run_dir: Path, seconds: float
) -> int:
    """Say in a few lines how it ended."""
    if outcome.exit_code == Exit.USER:
        raise OmniError(outcome.message)
    if outcome.exit_code == Exit.OK:
        steps = (
            f"{view.last.step} steps, loss {view.last.loss:.4f}" if view.last else "no step left"
        )
        message = f"done: {steps}, {seconds:.0f} s, {view.restarts} restarts"
    else:
        message = outcome.message
    console.print(message, markup=False, highlight=False, soft_wrap=True)
    console.print(f"run folder: {_shown(run_dir)}", markup=False, highlight=False, soft_wrap=True)
    return outcome.exit_code


def _next_attempt(plan: JobPlan, run_dir: Path) -> int:
    """One above the attempt that holds the checkpoints, and above all in the run folder."""
    held = newest_attempt(Folder(plan.spec.checkpoint.uri, plan.spec.storage), plan)
    seen = max((event.attempt for event in read_events(run_dir)), default=0)
    return max(held, seen) + 1


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Add to this process's environment, and so to that of the children, for a while."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _default_run_dir(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def _shown(path: Path) -> str:
    """Relative to here where it is below here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
