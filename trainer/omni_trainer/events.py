"""The diary of a run: events.jsonl, appended to by launcher and supervisors."""

import os
import time
from pathlib import Path
from typing import Any

from omni_contract.names import EVENTS_FILE
from omni_contract.records import RunEvent


def record_event(run_dir: Path, *, time_s: float | None = None, **fields: Any) -> RunEvent:
    """Append one event; `fields` as in RunEvent. One write, so lines of several writers stay whole.

    `time_s` is now unless given.
    """
    event = RunEvent(time_s=time.time() if time_s is None else time_s, **fields)
    line = event.model_dump_json(exclude_none=True).encode() + b"\n"
    file = os.open(run_dir / EVENTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line)
    finally:
        os.close(file)
    return event


def read_events(run_dir: Path) -> list[RunEvent]:
    """All events so far, oldest first."""
    return RunEvent.read_all(run_dir / EVENTS_FILE)


def unrecovered_since(events: list[RunEvent]) -> float | None:
    """Unix time of the fault that no step has followed yet; the first of several."""
    since: float | None = None
    for event in events:
        if event.kind == "fault" and since is None:
            since = event.time_s
        elif event.kind == "recovered":
            since = None
    return since
