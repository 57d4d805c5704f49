"""Ships the logs of a pod to the job's store while it lives, so that they outlive it.

Looks at the log files every few seconds and writes what is new. Whatever the store does, nobody
waits for this thread. Each look brings the disk back to what `Limits` says, and the store where it
may delete.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from omni_contract.errors import StorageError
from omni_contract.log_store import (
    LogBlock,
    LogFile,
    LogPlace,
    attempt_folder,
    begun,
    generation_of,
    job_folder,
    job_of_pod,
    read_attempt,
)

if TYPE_CHECKING:
    from omni_dataloader.store import Store

BEGUN_FILE: Final = "begun"
"""Beside the log files, and as old as the first look at them: a pod made anew under its name has
another one, and a container that is started again has not."""
_PUNCH_HOLE_KEEP_SIZE: Final = 0x03
_HOLE_BYTES: Final = 64 << 10
"""Holes end at a multiple of this: within a block of the file system they are zeros, not holes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is kept, and how long what is new may wait."""

    every_s: float = 10.0
    """A node that is lost takes what it logged in the last so many seconds along."""
    block_bytes: int = 256 << 10
    """Of one object. The newest one is written anew until it is full: few objects, however slowly
    a log grows."""
    stored_bytes: int = 64 << 20
    """Of one pod and attempt in the store."""
    first_blocks: int = 4
    """Of each log that stay when older ones go: versions and settings are told first."""
    attempts: int = 20
    """Newest ones of the job that stay in the store, and of the pod on the node's disk."""
    generations: int = 20
    """Newest ones of an attempt that stay on the node's disk."""
    file_bytes: int = 16 << 20
    """Of one log on the node's disk, and most that is shipped of it at one look: the newest."""
    disk_bytes: int = 256 << 20
    """Of all logs on the node's disk; each may have up to twice `tail_bytes` beyond it."""
    tail_bytes: int = 64 << 10
    """Of a log that stay at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a log that is stored."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        """Offset of what follows."""
        return self.offset + self.size


@dataclass(slots=True, kw_only=True)
class _Stream:
    """A log and what of it is stored."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    end: int = 0
    """Offset of what comes next."""

    @property
    def age(self) -> float:
        """Of an earlier generation, and so less worth: less."""
        generation = generation_of(self.name)
        return float("inf") if generation is None else generation


@dataclass(slots=True, kw_only=True)
class _Stored:
    """The logs of this pod in one attempt."""

    place: LogPlace
    streams: dict[str, _Stream] = field(default_factory=dict)

    def stream(self, name: str) -> _Stream:
        """A log of this name, new where it was not there."""
        return self.streams.setdefault(name, _Stream(name=name))


def choose_surplus(
    streams: Sequence[Sequence[Block]], *, most_bytes: int, first_blocks: int
) -> list[tuple[int, Block]]:
    """What to delete so that the rest fits: each a stream's place in the list, and a block.

    The longest stream loses first what follows its beginning. Where all are short, there are many,
    and the first in the list go.
    """
    kept = [list(blocks) for blocks in streams]
    doomed: list[tuple[int, Block]] = []
    total = sum(block.size for blocks in kept for block in blocks)
    while total > most_bytes:
        longest = max(range(len(kept)), key=lambda i: sum(block.size for block in kept[i]))
        if len(kept[longest]) > first_blocks + 1:
            stream, block = longest, kept[longest].pop(first_blocks)
        else:
            stream = next(i for i, blocks in enumerate(kept) if blocks)
            block = kept[stream].pop(0)
        doomed.append((stream, block))
        total -= block.size
    return doomed


def choose_past(files: Collection[LogFile], *, attempts: int, generations: int) -> list[LogFile]:
    """Which are older than so many attempts, or than so many generations of their attempt."""
    newest = max((file.attempt for file in files), default=0)
    newest_of: dict[int, int] = {}
    for file in files:
        newest_of[file.attempt] = max(newest_of.get(file.attempt, 0), file.generation or 0)
    return [
        file
        for file in files
        if file.attempt <= newest - attempts
        or (
            file.generation is not None and file.generation <= newest_of[file.attempt] - generations
        )
    ]


class Shipper:
    """Ships the log files of one pod's run folder."""

    def __init__(
        self,
        *,
        logs: Path,
        uri: str,
        pod: str,
        open_store: Callable[[], "Store"],
        limits: Limits | None = None,
    ) -> None:
        """`uri`: folder of the job's checkpoints. `open_store` is called once it is needed."""
        self._logs = logs
        self._uri = uri.rstrip("/")
        self._pod = pod
        self._job = job_of_pod(pod)
        self._open_store = open_store
        self._limits = limits or Limits()
        self._store: Store | None = None
        self._attempts: dict[int, _Stored] = {}
        self._cleaned_for = 0  # the attempt for which old ones were deleted
        self._away_since_s: float | None = None
        self._woken = threading.Event()
        self._is_silent = self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="ship-logs", daemon=True)

    def start(self) -> None:
        """Begin, on a thread of its own."""
        self._thread.start()

    def hurry(self) -> None:
        """Ship at once what there is, and be silent: the pod's last words are of its end."""
        self._is_silent = True
        self._woken.set()

    def close(self, timeout_s: float) -> None:
        """Ship the rest and end, or give it up after so many seconds."""
        self._is_closing = True
        self.hurry()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._woken.wait(self._limits.every_s)
            self._woken.clear()
            is_last = self._is_closing
            self.look()

    def look(self) -> None:
        """Ship what is new, and keep the disk from filling. Whatever is
        wrong with either is said once, and tried again at the next look."""
        files = self._find_files()
        try:
            self._ship(files)
        except (StorageError, OSError) as exc:
            self._note_away(str(exc))
        else:
            self._note_back()
        self._free_disk(files)

    def _find_files(self) -> dict[LogFile, os.stat_result]:
        found: dict[LogFile, os.stat_result] = {}
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._logs):
                file = LogFile.parse(entry.name)
                if file is not None:
                    with contextlib.suppress(OSError):
                        found[file] = entry.stat()
        return found

    def _ship(self, files: Mapping[LogFile, os.stat_result]) -> None:
        """The newest attempt first, since a store that refuses ends the look; deletes last, since
        who may write may not always delete."""
        unreadable: StorageError | None = None
        attempts = sorted({file.attempt for file in files}, reverse=True)
        for attempt in attempts:
            if attempt <= attempts[0] - self._limits.attempts:
                self._attempts.pop(attempt, None)
                continue
            of_attempt = {f: stat.st_size for f, stat in files.items() if f.attempt == attempt}
            stored = self._attempts.get(attempt)
            if stored is None:
                nodes = {f.number for f in of_attempt if f.kind != "rank"}
                if not nodes:
                    continue  # nobody has said yet which node of the plan this is
                stored = self._look_up(attempt, nodes.pop())
                self._attempts[attempt] = stored
            for file, size in of_attempt.items():
                try:
                    self._ship_file(stored, file, size)
                except OSError as exc:
                    why = f"{self._logs / file.name}: cannot be read ({exc.strerror})"
                    unreadable = unreadable or StorageError(why)
        for stored in self._attempts.values():
            self._drop_surplus(stored)
        self._delete_old_attempts()
        if unreadable is not None:
            raise unreadable

    def _look_up(self, attempt: int, node: int | None) -> _Stored:
        """What is stored already: by the container before this one. A missing bucket is an error
        here, before a write could create it."""
        store = self._opened()
        place = LogPlace(
            job=self._job, attempt=attempt, node=node, pod=self._pod, begun=self._find_begun()
        )
        stored = _Stored(place=place)
        begin = f"{self._uri}/{job_folder(self._job)}/"
        for info in store.list(f"{self._uri}/{place.folder}"):
            found = LogBlock.parse(info.uri.removeprefix(begin), self._job)
            if found is not None:
                block = Block(offset=found.offset, size=info.size_bytes)
                stream = stored.stream(found.stream)
                stream.blocks.append(block)
                stream.end = block.end
        return stored

    def _find_begun(self) -> str:
        file = self._logs / BEGUN_FILE
        with contextlib.suppress(FileExistsError):
            file.touch(exist_ok=False)
        return begun(file.stat().st_mtime)

    def _delete_old_attempts(self) -> None:
        """Once in each attempt, by its first pod."""
        newest = max((a for a, s in self._attempts.items() if s.place.node == 0), default=0)
        if newest <= self._cleaned_for:
            return
        store = self._opened()
        for folder in store.list_folders(f"{self._uri}/{job_folder(self._job)}"):
            attempt = read_attempt(folder)
            if attempt is not None and attempt <= newest - self._limits.attempts:
                store.delete_folder(f"{self._uri}/{attempt_folder(self._job, attempt)}")
        self._cleaned_for = newest

    def _ship_file(self, stored: _Stored, file: LogFile, size: int) -> None:
        stream = stored.stream(file.stream)
        if size <= stream.end:
            return
        with (self._logs / file.name).open("rb", buffering=0) as log:
            while stream.end < size:
                self._ship_block(stored, stream, log.fileno(), size)

    def _ship_block(self, stored: _Stored, stream: _Stream, file: int, size: int) -> None:
        """The newest block with what was added to it, or the next one."""
        last = stream.blocks[-1] if stream.blocks else None
        limits = self._limits
        grows = last is not None and last.end == stream.end and last.size < limits.block_bytes
        offset = last.offset if last is not None and grows else stream.end
        # Behind what was taken off the disk, and behind what is too much.
        first = max(os.lseek(file, offset, os.SEEK_DATA), size - limits.file_bytes)
        if first > offset:
            offset = max(first, stream.end)
        data = os.pread(file, min(limits.block_bytes, size - offset), offset)
        block = Block(offset=offset, size=len(data))
        key = LogBlock(place=stored.place, stream=stream.name, offset=offset).key
        self._opened().write(f"{self._uri}/{key}", data)
        if offset > stream.end:
            dropped = (offset - stream.end) / 2**20
            self._say(f"{dropped:.1f} MiB of the log {stream.name} were not stored")
        if last is not None and last.offset == offset:
            stream.blocks.pop()
        stream.blocks.append(block)
        stream.end = block.end

    def _drop_surplus(self, stored: _Stored) -> None:
        streams = sorted(stored.streams.values(), key=lambda stream: stream.age)
        surplus = choose_surplus(
            [stream.blocks for stream in streams],
            most_bytes=self._limits.stored_bytes,
            first_blocks=self._limits.first_blocks,
        )
        self._delete(stored, [(streams[i], block) for i, block in surplus])

    def _delete(self, stored: _Stored, doomed: Sequence[tuple[_Stream, Block]]) -> None:
        for stream, block in doomed:
            key = LogBlock(place=stored.place, stream=stream.name, offset=block.offset).key
            self._opened().delete(f"{self._uri}/{key}")
            stream.blocks.remove(block)

    def _opened(self) -> "Store":
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _free_disk(self, files: Mapping[LogFile, os.stat_result]) -> None:
        limits = self._limits
        past = choose_past(files, attempts=limits.attempts, generations=limits.generations)
        for file in past:
            with contextlib.suppress(OSError):
                (self._logs / file.name).unlink()
        left = limits.disk_bytes
        kept_files = [(file, stat) for file, stat in files.items() if file not in past]
        for file, stat in sorted(kept_files, key=lambda item: item[1].st_mtime, reverse=True):
            kept = max(min(left, limits.file_bytes), limits.tail_bytes)
            used = stat.st_blocks * 512
            if used > kept + limits.tail_bytes:
                punch(self._logs / file.name, stat.st_size - kept)
            left = max(left - min(used, kept), 0)

    def _note_away(self, why: str) -> None:
        if self._away_since_s is None:
            self._away_since_s = time.monotonic()
            self._say(f"logs of this pod are not stored for now: {why}")

    def _note_back(self) -> None:
        if self._away_since_s is not None:
            seconds = time.monotonic() - self._away_since_s
            self._away_since_s = None
            self._say(f"the logs of this pod are stored again, after {seconds:.0f} s")

    def _say(self, line: str) -> None:
        if not self._is_silent:
            print(line, file=sys.stderr)


def punch(path: Path, length: int) -> None:
    """Give the disk back what about the first `length` bytes of a file take. Size and offsets stay
    as they are, also for those who append to it. Where that cannot be, the file stays whole."""
    libc = ctypes.CDLL(None)
    size = ctypes.c_int64(length - length % _HOLE_BYTES)
    with contextlib.suppress(OSError), path.open("r+b") as file:
        libc.fallocate(file.fileno(), _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(0), size)
