"""`omni demo`: the whole system on one machine, from raw files to a report, with a killed rank."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from omni_cli.demo_data import build_demo
from omni_cli.local_s3 import LocalS3
from omni_cli.processes import guarded
from omni_cli.rehearsal import Fault
from omni_cli.report import RunRecords, write_report
from omni_contract.errors import OmniError
from omni_contract.jobfile import read_job
from omni_contract.names import Exit
from omni_dataloader.store import Store, split_uri
from omni_planner.compile import compile_plan

JOB: Final = Path(__file__).resolve().parents[2] / "manifests" / "examples" / "demo.yaml"
FAULT: Final = "kill-rank:2@66"
"""In the middle, during the ramp of the mixture, six steps after a checkpoint."""
TRACE_STEP: Final = 60
"""A step in which all three modalities occur."""
STOP_S: Final = 15.0
_WRITTEN: Final = {"run", "report.html", "trace.json", "summary.json"}
"""What a demo leaves in its folder, and so the only names that the next one deletes there."""


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/demo"),
    show_default=True,
    help="Folder for report.html, trace.json, summary.json and the run's records.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".cache/omni"),
    show_default=True,
    help="Folder for the data, built once, and the S3 server's objects.",
)
@click.option(
    "--fault",
    default=FAULT,
    show_default=True,
    metavar="WHAT@STEP",
    help="Fault to put in, as `omni run --fault`; none leaves the run alone.",
)
def demo(out: Path, cache: Path, fault: str) -> int:
    """Train a small job on pictures, speech and books, kill a rank, show what happened.

    Takes a few minutes on two cores and needs no GPU: 4 ranks on 2 nodes (groups of processes), an
    S3 server on loopback, about 120 steps with a mixture that changes on the way.
    """
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that children end with it
    job = read_job(JOB)
    if fault != "none":
        Fault.parse(fault, compile_plan(job))  # before minutes go into the data
    run_dir = out / "run"
    with LocalS3(cache / "s3") as server:
        _clear(out)  # the folder of a demo that still runs is safe: it holds the server
        store = server.open()
        build_demo(store, f"s3://{split_uri(job.spec.checkpoint.uri)[0]}", cache=cache, say=_say)
        _forget_earlier_run(store, job.spec.checkpoint.uri)
        code = _train(run_dir, fault, server.env)
        if code != Exit.OK:
            return code
        _say("Drawing the report")
        summary = write_report(RunRecords.read(run_dir), out, store)
    _show(summary, out, time.monotonic() - begin)
    return Exit.OK


def _clear(out: Path) -> None:
    """Delete what an earlier demo left. Raises OmniError where anything else lies there."""
    try:
        found = sorted(out.iterdir()) if out.exists() else []
        strange = [path.name for path in found if path.name not in _WRITTEN]
        if strange:
            raise OmniError(
                f"--out {out}: {strange[0]!r} lies there and comes from no demo; a demo clears its "
                "folder, so take an empty or a new one"
            )
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        (out / "run").mkdir(parents=True)
    except OSError as exc:
        raise OmniError(f"--out {out}: {exc.strerror}; take a folder of your own") from None


def _say(line: str) -> None:
    click.echo(f"demo: {line}")


def _forget_earlier_run(store: Store, uri: str) -> None:
    """The demo starts from nothing each time; a finished run would only be finished again."""
    for info in store.list(uri):
        store.delete(info.uri)


def _train(run_dir: Path, fault: str, environment: Mapping[str, str]) -> int:
    """Run the job as a user would: `omni run` in a process of its own."""
    command = [sys.executable, "-m", "omni_cli.main", "run", str(JOB)]
    command += ["--run-dir", str(run_dir), "--trace-step", str(TRACE_STEP)]
    if fault != "none":
        command += ["--fault", fault]
    # In a session of its own Ctrl-C reaches it once, through us: twice would mean "at once".
    with subprocess.Popen(
        guarded(command), env={**os.environ, **environment}, start_new_session=True
    ) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _show(summary: Mapping[str, Any], out: Path, seconds: float) -> None:
    first, last = summary["first_loss"], summary["last_loss"]
    falls = ", ".join(f"{k} {first[k]:.2f} -> {last[k]:.2f}" for k in first if first[k] is not None)
    resumed = summary["seconds_to_resume"]
    came_back = f", first step {resumed:.1f} s after the fault" if resumed is not None else ""
    restarts = f"{summary['restarts']} restart{'' if summary['restarts'] == 1 else 's'}"
    click.echo(
        f"\n{summary['steps']} steps in {seconds:.0f} s (cpu). Loss: {falls}.\n"
        f"{restarts}{came_back}; samples repeated "
        f"{summary['samples_repeated']}, lost {summary['samples_lost']}.\n\n"
        f"Look at\n  {out / 'report.html'}    the page\n"
        f"  {out / 'trace.json'}     the pipeline of step {TRACE_STEP}, for ui.perfetto.dev\n"
        f"  {out / 'summary.json'}   the numbers\n"
        f"  {out / 'run'}            records, logs, TensorBoard events"
    )
    _check(summary)


def _check(summary: Mapping[str, Any]) -> None:
    """The demo shows that nothing is lost; where that is not so, it has failed."""
    if summary["samples_repeated"] or summary["samples_lost"]:
        raise OmniError(f"the run repeated or lost samples: {json.dumps(summary)}")
