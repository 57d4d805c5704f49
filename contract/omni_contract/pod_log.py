"""What a container says: on its stderr, and for each attempt in a file that can be stored."""

import contextlib
import io
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omni_contract.log_store import LOG_FOLDER, LogFile
from omni_contract.pod_info import Assignment

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STDERR = 2


class PodLog(io.RawIOBase):
    """Stderr with a copy. A full disk or a missing folder costs the copy, nothing else.

    Safe to use from several threads.
    """

    name = "<stderr>"
    """As `sys.stderr` has it."""

    def __init__(self, run_dir: Path, container: Literal["trainer", "data"]) -> None:
        self._folder = run_dir / LOG_FOLDER
        self._container = container
        self._part: tuple[int, int | None] | None = None
        self._copy: int | None = None
        self._lock = threading.Lock()

    def text(self) -> io.TextIOWrapper:
        """To stand in the place of `sys.stderr`: a line is one write."""
        return io.TextIOWrapper(self, errors="backslashreplace", line_buffering=True)

    def turn_to(self, part: Assignment) -> None:
        """Copy into the file of this part from now on."""
        if self._part == (part.attempt, part.index):
            return
        file = LogFile(kind=self._container, number=part.index, attempt=part.attempt)
        fresh = None
        with contextlib.suppress(OSError):
            if not self._folder.exists():
                self._folder.mkdir(parents=True, exist_ok=True)
                # A container may run as another user than the one that came first; they share the
                # group of their volume.
                self._folder.chmod(0o2775)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            fresh = os.open(self._folder / file.name, flags, 0o644)
        with self._lock:
            old, self._copy = self._copy, fresh
            self._part = (part.attempt, part.index)
        if old is not None:
            os.close(old)

    def writable(self) -> bool:
        """As a stream for output must say."""
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of it."""
        view = memoryview(data)
        with self._lock:
            if self._copy is not None:
                with contextlib.suppress(OSError):
                    os.write(self._copy, view)
            rest = view
            while rest:
                rest = rest[os.write(_STDERR, rest) :]
        return len(view)
