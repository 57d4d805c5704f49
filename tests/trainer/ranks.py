"""Starts real gloo ranks on this machine, with a time limit, and reaps them whatever happens."""

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 120


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(rank, *args) on every rank of a new gloo world; the results by rank.

    A rank's exception is raised here, the first one in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trainer.preload"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            context.Process(target=_main, args=(rank, world_size, folder, function, args))
            for rank in range(world_size)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, folder)
            return [
                pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)
            ]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _wait(processes: list[Any], folder: Path) -> None:
    """Until all are done, one failed, or the time is up."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(process.is_alive() for process in processes):
        failures = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise RankError(failures[0].read_text())
        if time.monotonic() > deadline_s:
            stacks = [path.read_text() for path in sorted(folder.glob("stack-*"))]
            raise RankError("\n".join([f"not done after {TIMEOUT_S} s", *stacks]))
        multiprocessing.connection.wait([process.sentinel for process in processes], 0.2)
    failures = sorted(folder.glob("failed-*"))
    if failures:
        raise RankError(failures[0].read_text())


class RankError(Exception):
    """A rank failed; the message is its traceback."""


def _main(
    rank: int, world_size: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    stack = (folder / f"stack-{rank}").open("w")
    faulthandler.dump_traceback_later(TIMEOUT_S - 5, file=stack)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=TIMEOUT_S / 2),
        )
        result = function(rank, *args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        part = folder / f"part-{rank}"
        part.write_text(f"rank {rank}: {traceback.format_exc()}")
        part.rename(folder / f"failed-{rank}")
        os._exit(1)
