"""`make e2e`: a job on real nodes that is broken in many ways, one after the other, and judged.

Writes record.json, and of it summary.json and timeline.html; ends with 1 where something is not as
it must be.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.cluster.chart import ROOT
from tests.cluster.real.requirements import MissingRequirement
from tests.e2e.cluster.faults import FAULTS
from tests.e2e.cluster.judge import summarize
from tests.e2e.cluster.page import render_page
from tests.e2e.cluster.record import Fault, Record
from tests.e2e.cluster.run import run

OUT: Final = ROOT / "out" / "e2e"


def main() -> int:
    """Run once and judge it; the exit code."""
    options = _parser().parse_args()
    archives = sorted(options.archives.glob("*.tar"))
    if not archives:
        sys.exit(
            f"--archives: {options.archives} has no *.tar; `make images ARCHIVE=...` makes some"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out: Path = options.out.resolve()
    state, logs = out / "state", out / "logs"
    for old in (state, logs):
        shutil.rmtree(old, ignore_errors=True)
    for result in ("record.json", "summary.json", "timeline.html"):  # of another run
        (out / result).unlink(missing_ok=True)
    state.mkdir(parents=True)
    # Everything below lies there, so that what is left can be told from what others leave.
    os.environ["TMPDIR"] = str(state)
    tempfile.tempdir = None
    begin_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begin_s:6.0f} s  {line}", flush=True)

    try:
        record = run(archives, options.only or list(FAULTS), state=state, logs=logs, say=say)
    except MissingRequirement as exc:
        sys.exit(str(exc))
    with contextlib.suppress(OSError):  # what is left in it, the record tells
        state.rmdir()
    record.save(out / "record.json")
    if options.only:
        say("With --only nothing is judged.")
        return 1 if record.error else 0
    return conclude(record, out)


def conclude(record: Record, out: Path) -> int:
    """Judge a record: write what is to be read, and say what is wrong; the exit code."""
    summary = summarize(record)
    (out / "summary.json").write_text(summary.model_dump_json(indent=1) + "\n")
    (out / "timeline.html").write_text(render_page(record, summary))
    print(summary.model_dump_json(indent=1, exclude={"breaches"}))
    for breach in summary.breaches:
        print(f"WRONG: {breach}")
    print(f"{out / 'summary.json'}\n{out / 'timeline.html'}")
    return 1 if summary.breaches else 0


def _faults(names: str) -> list[Fault]:
    try:
        return [Fault(name) for name in names.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}; the faults are {', '.join(FAULTS)}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.cluster.main", description=__doc__)
    parser.add_argument(
        "--archives", type=Path, required=True, help="folder with the image archives (*.tar)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to")
    parser.add_argument(
        "--only",
        type=_faults,
        metavar="FAULT,...",
        help=f"try some faults, and judge nothing: {', '.join(FAULTS)}",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
