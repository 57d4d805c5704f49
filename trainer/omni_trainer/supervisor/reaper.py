"""Process trees on Linux: nothing that a run starts may outlive it; what the kernel killed."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, the process that forked it, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def end_descendants(*, keep: Collection[int] = (), timeout_s: float = 3) -> None:
    """Kill and reap all descendants but those in `keep` and what stands below them.

    Goes round until none is left: a process that is being killed may just have started another.
    """
    deadline = time.monotonic() + timeout_s
    while doomed := _descendants(keep):
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    process.kill()
        for process in doomed:
            # Orphans of the killed become our children; others belong to a parent that reaps.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def is_descendant(pid: int) -> bool:
    """Whether a process stands below this one."""
    try:
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False


def count_oom_kills() -> int:
    """How often the kernel killed for memory in this container so far; 0 where it does not say."""
    for path, field in (
        ("/sys/fs/cgroup/memory.events", "oom_kill"),
        ("/sys/fs/cgroup/memory/memory.oom_control", "oom_kill"),
    ):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == field and count.isdigit():
                return int(count)
    return 0


def _descendants(keep: Collection[int]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process().children():
            if child.pid not in keep:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child, *child.children(recursive=True)]
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
