"""Processes in the pods of a cluster on this machine, which sees them all."""

import signal
from collections.abc import Callable, Sequence

import psutil

from omni_contract.records import Progress

TRAINER = "omni_trainer.pod"
DATA_SERVICE = "omni_dataloader.pod"
OPERATOR = "omni_operator.main"
S3_SERVER = "weed"


class NoSuchProcess(RuntimeError):
    """It has ended, or never ran."""


def processes_of(pod: str) -> list[psutil.Process]:
    """All that run in a pod of this name, but for what only holds its network."""
    return _all(lambda process: process.environ().get("HOSTNAME") == pod)


def first_process(pod: str, program: str) -> psutil.Process:
    """The first process of the container of a pod that runs this module or program."""
    found = [
        process
        for process in processes_of(pod)
        if program in process.cmdline() and _number_inside(process) == 1
    ]
    if len(found) != 1:
        raise NoSuchProcess(f"pod {pod}: {program} runs {len(found)} times as a first process")
    return found[0]


def rank_process(pod: str, progress: Progress) -> psutil.Process:
    """A rank, by what it says of itself."""
    trainer = first_process(pod, TRAINER)
    for process in trainer.children(recursive=True):
        if _number_inside(process) == progress.pid:
            return process
    raise NoSuchProcess(f"pod {pod}: no process has the number {progress.pid} in it")


def send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all that still run."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _all(matches: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and matches(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ends, or is none of a pod
            continue
    return found


def _number_inside(process: psutil.Process) -> int:
    """Its pid as its own container has it."""
    try:
        with open(f"/proc/{process.pid}/status") as file:
            numbers = next(line for line in file if line.startswith("NSpid:"))
    except OSError:
        return 0
    return int(numbers.split()[-1])
