"""The data sidecar of one node: reads the plan, opens the data, serves the node's ranks."""

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_limits

from omni_contract.errors import DataError, OmniError, UnavailableError
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.shared_files import DataPeers
from omni_dataloader.agree import Agreement, Peers
from omni_dataloader.beat import beat_path, keep_beating
from omni_dataloader.cache import CACHE_BYTES
from omni_dataloader.produce import World
from omni_dataloader.serve import Server, listen
from omni_dataloader.sources import OpenedData, open_data, plan_samples
from omni_dataloader.store import Store

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_OUTAGE_S = 60.0
"""How long the store may be away when the service starts."""
_RETRY_S = 1.0
_EXAMPLE = """\
`omni run` starts one of these for each node. By hand, for a plan of one node:

  python -m omni_dataloader.main --plan plan.json --node 0 --socket /tmp/omni-0.sock \\
      --listen 127.0.0.1:7000 --peers 127.0.0.1:7000 --run-dir out

S3 is found by storage.endpoint of the plan, else by the AWS chain (AWS_ENDPOINT_URL,
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or a profile). It may be killed at any time and started
again with the same arguments: its ranks reconnect and go on with exactly the same samples.

Exit codes: 2 a mistake in job, data or storage, 69 the store does not answer, 130 ended by SIGTERM
or Ctrl-C, 1 a bug.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    plan: Path
    node: int
    socket: Path
    listen: tuple[str, int]
    peers: Sequence[tuple[str, int]] | None
    peers_file: Path | None
    run_dir: Path
    cache_mib: int
    die_with: int | None
    """Process id of the parent."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run until told to end. Returns an exit code of omni_contract.names.Exit."""
    options = parse_options(argv)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s data node={options.node} %(levelname)s %(message)s",
        force=True,
    )
    logging.getLogger("botocore").setLevel(logging.WARNING)  # it tells where credentials were
    # Samples are decoded side by side; a matrix product that spreads over all cores itself only
    # waits, at twice the CPU time, and rounds differently from machine to machine.
    threadpool_limits(1, user_api="blas")
    try:
        if options.die_with is not None:
            _die_with(options.die_with)
        return _run(options)
    except UnavailableError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return Exit.UNAVAILABLE
    except OmniError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return Exit.USER
    except Exception:
        log.exception("the data service failed")
        return Exit.ERROR


def _run(options: Options) -> int:
    # Not asyncio.run: it would wait for threads, which may hang in a read from storage.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_serve(options))
    finally:
        loop.close()


def parse_options(argv: Sequence[str] | None) -> Options:
    """Read the command line; ends the program with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_dataloader.main",
        description="Serves the samples of every step to the ranks of one node.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--plan", required=True, type=Path, help="the job's compiled plan, a JSON file")
    add("--node", required=True, type=int, help="index of this node in the plan, from 0")
    add("--socket", required=True, type=Path, help="unix socket to serve the node's ranks on")
    add("--listen", required=True, type=_address, metavar="HOST:PORT",
        help="where data services of other nodes reach this one; *: any host")  # fmt: skip
    peers = parser.add_mutually_exclusive_group(required=True)
    peers.add_argument("--peers", type=_addresses, metavar="HOST:PORT,...",
        help="the --listen address of every node, in node order, this one included")  # fmt: skip
    peers.add_argument("--peers-file", type=Path,
        help="file with these addresses, replaced by a supervisor at every attempt")  # fmt: skip
    add("--run-dir", required=True, type=Path, help="folder of the run; a small state lies there")
    add("--cache-mib", type=int, default=CACHE_BYTES >> 20, metavar="MIB",
        help="memory for small sources, kept whole; larger ones are read sample by sample "
        "(default %(default)s)")  # fmt: skip
    add("--die-with", type=int, metavar="PID", help="end when this process, the parent, ends")
    values = parser.parse_args(argv)
    if values.peers is not None and not 0 <= values.node < len(values.peers):
        parser.error(f"--node {values.node} is not one of the {len(values.peers)} nodes of --peers")
    return Options(**vars(values))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


def _addresses(text: str) -> list[tuple[str, int]]:
    return [_address(part) for part in text.split(",")]


def _peers(options: Options) -> Peers:
    """The addresses of the command line, or those of the newest peers file."""
    if options.peers is not None:
        given = options.peers
        return lambda: given
    path = options.peers_file
    assert path is not None

    def read() -> Sequence[tuple[str, int]]:
        found = DataPeers.load(path)
        return [] if found is None else [_address(text) for text in found.addresses]

    return read


async def _serve(options: Options) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, ended.set)
    plan = JobPlan.load(options.plan)
    if options.peers is not None and len(options.peers) != plan.layout.num_nodes:
        raise DataError(
            f"--peers: {len(options.peers)} addresses for the {plan.layout.num_nodes} nodes of "
            f"{options.plan}; give one a node"
        )
    options.run_dir.mkdir(parents=True, exist_ok=True)
    # Bound first: a second sidecar on the same node must find out before it does any work.
    listener = listen(options.socket)
    executor = ThreadPoolExecutor(min(8, (os.cpu_count() or 1) + 2), "omni-fetch")
    agreement = Agreement(
        node=options.node,
        num_nodes=plan.layout.num_nodes,
        peers=_peers(options),
        plan_hash=plan.hash,
    )
    try:
        beating = asyncio.create_task(keep_beating(beat_path(options.socket)))
        serving = asyncio.create_task(_start(options, plan, executor, agreement, listener))
        ending = asyncio.create_task(ended.wait())
        tasks = (serving, ending, beating)  # the last one ends only where its file cannot be
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, beating):
            if task.done():
                task.result()
        log.info("ended")
        return Exit.INTERRUPTED
    finally:
        await _cancel_all()
        await agreement.close()
        listener.close()
        options.socket.unlink(missing_ok=True)
        executor.shutdown(wait=False, cancel_futures=True)


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _start(
    options: Options,
    plan: JobPlan,
    executor: ThreadPoolExecutor,
    agreement: Agreement,
    listener: socket.socket,
) -> None:
    try:
        await agreement.start(*options.listen)
    except OSError as exc:
        host, port = options.listen
        reason = os.strerror(exc.errno) if exc.errno else str(exc)
        raise DataError(f"--listen {host}:{port}: {reason}; use a free port") from None
    store = await asyncio.to_thread(Store.open, plan.spec.storage)
    data = await _open_data(plan, store)
    world = World(
        plan=plan,
        node=options.node,
        data=data,
        samples=plan_samples(data, plan),
        store=store,
        executor=executor,
        agreement=agreement,
        run_dir=options.run_dir,
        cache_bytes=options.cache_mib << 20,
    )
    log.info("serving socket=%s plan=%s", options.socket, plan.hash)
    await Server(world).run(listener)


async def _open_data(plan: JobPlan, store: Store) -> OpenedData:
    """Open the sources; an outage of the store is waited out for a while."""
    deadline = time.monotonic() + _OUTAGE_S
    while True:
        try:
            return await asyncio.to_thread(open_data, plan.spec, store)
        except UnavailableError as exc:
            if time.monotonic() > deadline:
                raise
            log.warning("the object store does not answer, trying again: %s", exc)
        await asyncio.sleep(_RETRY_S)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise DataError("the parent process is gone already")


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Threads may hang in a read from storage for a minute; nothing of theirs needs an orderly end.
    os._exit(code)
