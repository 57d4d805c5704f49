"""Prints a job's logs from its store: `python -m omni_dataloader.read_logs`, run in the cluster.

`kubectl mmtj logs` runs it in a pod of the job, which has the keys of the store and the plan.
"""

import argparse
import os
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from pydantic import ValidationError

from omni_contract import names
from omni_contract.errors import OmniError, StorageError, UnavailableError
from omni_contract.log_store import (
    NOTICE,
    LogBlock,
    LogPlace,
    attempt_folder,
    generation_of,
    job_folder,
    read_attempt,
)
from omni_contract.names import Exit
from omni_contract.packed import read_packed
from omni_contract.plan import JobPlan
from omni_dataloader.store import Store

POLL_S: Final = 2.0
"""How often --follow looks."""


class NotStoredError(OmniError):
    """There is no such log; the message says which there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Whose log is asked for."""

    attempt: int | None = None
    """None: the newest one that has logs."""
    node: int = 0
    rank: int | None = None
    """The rank's own log, on whichever node it was."""
    container: str = names.TRAINER_CONTAINER

    def fits(self, block: LogBlock) -> bool:
        """Whether a block is part of it."""
        if self.rank is not None:
            return block.stream.startswith(f"rank-{self.rank}.")
        return block.place.node == self.node and block.stream == self.container

    def __str__(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"container {self.container} of node {self.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A stored part of a log, as it was when it was listed: the newest one grows."""

    block: LogBlock
    size: int

    @property
    def end(self) -> int:
        """Offset of what follows."""
        return self.block.offset + self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One log, as far as it is stored."""

    place: LogPlace
    name: str
    parts: tuple[Part, ...]
    """In order, at least one."""

    @property
    def key(self) -> tuple[LogPlace, str]:
        """What stays when it grows."""
        return self.place, self.name


class LogReader:
    """The stored logs of one job."""

    def __init__(self, store: Store, uri: str, job: str) -> None:
        """`uri`: folder of the job's checkpoints. `job`: as `names.base_name`."""
        self._store = store
        self._uri = uri.rstrip("/")
        self._job = job

    def find(self, wanted: Wanted) -> list[Stream]:
        """The logs asked for, oldest first. Raises NotStoredError that says which there
        are."""
        attempts = self._attempts()
        if not attempts:
            raise NotStoredError(
                f"no logs are stored under {self._uri}/{job_folder(self._job)} yet; a pod stores "
                "its own every few seconds once it runs"
            )
        attempt = attempts[-1] if wanted.attempt is None else wanted.attempt
        if attempt not in attempts:
            raise NotStoredError(
                f"no logs of attempt {attempt} are stored; there are those of attempts "
                f"{_ranges(attempts)}"
            )
        parts = list(self._parts(attempt))
        found = _streams(part for part in parts if wanted.fits(part.block))
        if not found:
            raise NotStoredError(_what_there_is(wanted, attempt, attempts, parts))
        return found

    def read(self, block: LogBlock) -> bytes:
        """What a block holds; nothing where it was dropped meanwhile to make room."""
        uri = f"{self._uri}/{block.key}"
        try:
            return self._store.read(uri)
        except StorageError:
            if self._store.exists(uri):
                raise
            return b""

    def _attempts(self) -> list[int]:
        folders = self._store.list_folders(f"{self._uri}/{job_folder(self._job)}")
        return sorted(a for a in map(read_attempt, folders) if a is not None)

    def _parts(self, attempt: int) -> Iterator[Part]:
        begin = f"{self._uri}/{job_folder(self._job)}/"
        for info in self._store.list(f"{self._uri}/{attempt_folder(self._job, attempt)}"):
            block = LogBlock.parse(info.uri.removeprefix(begin), self._job)
            if block is not None:
                yield Part(block=block, size=info.size_bytes)


class Printer:
    """Prints logs, and later what was added to them."""

    def __init__(self, reader: LogReader, out: BinaryIO) -> None:
        self._reader = reader
        self._out = out
        self._printed: dict[tuple[LogPlace, str], int] = {}
        """By log: offset of what comes next."""
        self._last: tuple[LogPlace, str] | None = None
        self._ends_line = True

    def skip_to_tail(self, streams: Sequence[Stream], num_lines: int) -> None:
        """Leave out all but the last lines of all logs together."""
        left = num_lines
        for stream in reversed(streams):
            start, lines = self._start_of_tail(stream, left)
            self._printed[stream.key] = start
            left = max(left - lines, 0)

    def _start_of_tail(self, stream: Stream, num_lines: int) -> tuple[int, int]:
        """Offset where the last lines begin, and how many they are."""
        found = 0
        """Ends of lines, counted from the end."""
        following = stream.parts[-1].end
        for part in reversed(stream.parts):
            data = self._reader.read(part.block)[: part.size]
            if part is stream.parts[-1] and not data.endswith(b"\n"):
                found = 1  # as if the line that is being written had its end
            at = len(data)
            while at and (end := data.rfind(b"\n", 0, at)) >= 0:
                if found == num_lines:
                    start = part.block.offset + end + 1
                    return (following if start == part.end else start), num_lines
                found, at = found + 1, end
            following = part.block.offset
        if not num_lines:
            return stream.parts[-1].end, 0
        return 0, found

    def print_new(self, streams: Sequence[Stream]) -> None:
        """Print what was not printed yet; with a title where there is more than one log."""
        for stream in streams:
            at = self._printed.get(stream.key, 0)
            for part in stream.parts:
                if part.end <= at:
                    continue
                data = self._reader.read(part.block)
                if not data:
                    continue
                if stream.key != self._last and (len(streams) > 1 or self._last is not None):
                    self._print_title(stream)
                self._last = stream.key
                if part.block.offset > at:
                    self._write(_gap(part.block.offset - at))
                self._write(data[max(at - part.block.offset, 0) :])
                at = part.block.offset + len(data)
                # At once: where the next part cannot be read, this one is not printed again.
                self._printed[stream.key] = at
        self._out.flush()

    def _print_title(self, stream: Stream) -> None:
        place = stream.place
        begun = "" if place.begun is None else f" begun {place.begun}"
        title = f"==> {stream.name}, attempt {place.attempt}, pod {place.pod}{begun} <==\n"
        self._write(title.encode() if self._ends_line else f"\n{title}".encode())

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._ends_line = data.endswith(b"\n") if data else self._ends_line


def _gap(num_bytes: int) -> bytes:
    return f"\n[... {num_bytes / 2**20:.1f} MiB were dropped here ...]\n".encode()


def _streams(parts: Iterable[Part]) -> list[Stream]:
    by_key: dict[tuple[LogPlace, str], list[Part]] = {}
    for part in parts:
        by_key.setdefault((part.block.place, part.block.stream), []).append(part)
    streams = [
        Stream(place=place, name=name, parts=tuple(sorted(found, key=lambda p: p.block.offset)))
        for (place, name), found in by_key.items()
    ]
    return sorted(
        streams, key=lambda s: (s.place.begun or "", s.place.pod, generation_of(s.name) or 0)
    )


def _what_there_is(
    wanted: Wanted, attempt: int, attempts: Sequence[int], parts: Sequence[Part]
) -> str:
    if wanted.rank is not None:
        ranks = {
            int(part.block.stream.split("-")[1].split(".")[0])
            for part in parts
            if generation_of(part.block.stream) is not None
        }
        there = f"ranks {_ranges(sorted(ranks))}" if ranks else "no rank"
    else:
        nodes = {p.block.place.node for p in parts if p.block.stream == wanted.container}
        known = sorted(node for node in nodes if node is not None)
        there = f"nodes {_ranges(known)}" if known else "no node"
    return (
        f"no log of {wanted} is stored for attempt {attempt}; there are those of {there} "
        f"(and of attempts {_ranges(attempts)})"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 5 -> 1-3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def main(argv: Sequence[str] | None = None) -> int:
    """Print, and go on with --follow. Returns an exit code of omni_contract.names.Exit."""
    args = _parser().parse_args(argv)
    try:
        plan = _read_plan(args.plan_dir)
        reader = LogReader(Store.open(plan.spec.storage), plan.spec.checkpoint.uri, args.job)
        wanted = Wanted(
            attempt=args.attempt, node=args.node, rank=args.rank, container=args.container
        )
        _print(reader, wanted, tail=args.tail, follow=args.follow)
    except OmniError as exc:
        print(exc, file=sys.stderr)
        return Exit.USER
    except BrokenPipeError:  # the reader of this has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    return Exit.OK


def _read_plan(folder: Path) -> JobPlan:
    try:
        return JobPlan.model_validate_json(read_packed(folder, names.PLAN_FILE))
    except ValidationError as exc:
        raise OmniError(f"{folder}: no plan that this version reads ({exc})") from None


def _print(reader: LogReader, wanted: Wanted, *, tail: int | None, follow: bool) -> None:
    printer = Printer(reader, sys.stdout.buffer)
    streams = reader.find(wanted)
    if tail is not None and tail >= 0:
        printer.skip_to_tail(streams, tail)
    printer.print_new(streams)
    is_away = False
    while follow:
        # Whoever asked holds our input open: nobody would else end this where they go away.
        if select.select([sys.stdin], [], [], POLL_S)[0] and not os.read(0, 4096):
            return
        try:
            printer.print_new(reader.find(wanted))
        except NotStoredError:
            is_away = False  # an attempt has begun, this node has not
        except UnavailableError as exc:
            if not is_away:
                _note(f"{exc} Still trying.")
            is_away = True
        else:
            if is_away:
                _note("the object store answers again")
            is_away = False


def _note(words: str) -> None:
    """Tell whoever waits what delays it."""
    print(f"{NOTICE}{words}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m omni_dataloader.read_logs", description=__doc__
    )
    add = parser.add_argument
    add("--plan-dir", type=Path, default=Path(names.PLAN_DIR), help="the packed JobPlan")
    add("--job", required=True, metavar="NAME-UID", help="what the names of its pods begin with")
    add("--attempt", type=int, help="default: the newest one that has logs")
    add("--node", type=int, default=0, help="node of the plan (default 0)")
    add("--rank", type=int, help="the log of this rank")
    add("--container", choices=[names.TRAINER_CONTAINER, names.DATA_CONTAINER],
        default=names.TRAINER_CONTAINER, help="whose log (default %(default)s)")  # fmt: skip
    add("--tail", type=int, help="the last so many lines only")
    add("--follow", action="store_true", help="go on as lines are stored, until stdin ends")
    return parser


if __name__ == "__main__":
    sys.exit(main())
