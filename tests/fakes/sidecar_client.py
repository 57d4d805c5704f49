"""A small synchronous client of the data sidecar; sidecars as processes or in this one."""

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from omni_contract import wire
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_dataloader.agree import Agreement
from omni_dataloader.produce import World
from omni_dataloader.serve import Server, listen
from omni_dataloader.sources import open_data, plan_samples
from omni_dataloader.store import Store
from omni_planner.compile import compile_plan
from tests.contract.jobs import DEMO
from tests.fakes.sources import SOURCES, VOCAB_SIZE

_open_clients: "list[SidecarClient]" = []
"""Closed with the sidecars they talk to."""

Array = NDArray[Any]
WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A batch with its arrays copied out of the ring."""

    batch: wire.Batch
    microbatches: Sequence[Mapping[str, Array]]
    """Ascending by index; names as in wire.Microbatch."""


class RefusedError(Exception):
    """The sidecar refused."""

    def __init__(self, refused: wire.Refused) -> None:
        self.refused = refused
        super().__init__(refused.message)


class SidecarClient:
    """One rank. Raises RefusedError, EOFError when the sidecar is gone."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(WAIT_S)
        _open_clients.append(self)
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                self._socket.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
        self.ring: mmap.mmap | None = None

    @classmethod
    def join(
        cls,
        path: Path,
        plan: JobPlan,
        *,
        rank: int,
        next_step: int = 1,
        attempt: int = 0,
        generation: int = 0,
        state: wire.LoaderState | None = None,
    ) -> Self:
        """Connect and say hello."""
        client = cls(path)
        client.send(
            wire.Hello(
                plan_hash=plan.hash,
                attempt=attempt,
                generation=generation,
                rank=rank,
                next_step=next_step,
                state=state,
            )
        )
        fds: list[int] = []
        welcome = client.receive(fds)
        assert isinstance(welcome, wire.Welcome) and len(fds) == 1
        client.ring = mmap.mmap(fds[0], welcome.ring_bytes, prot=mmap.PROT_READ)
        os.close(fds[0])
        return client

    def ask(self, step: int) -> None:
        """Ask for a step without waiting."""
        self.send(wire.Next(step=step))

    def take(self, *, timeout_s: float = WAIT_S) -> Step | wire.EndOfData:
        """Wait for the step asked for; copies it, but does not release it."""
        self._socket.settimeout(timeout_s)
        answer = self.receive()
        self._socket.settimeout(WAIT_S)
        if isinstance(answer, wire.EndOfData):
            return answer
        assert isinstance(answer, wire.Batch) and self.ring is not None
        return Step(
            batch=answer,
            microbatches=[
                {name: _copy(self.ring, ref) for name, ref in microbatch.tensors.items()}
                for microbatch in sorted(answer.microbatches, key=lambda m: m.index)
            ],
        )

    def step(self, number: int) -> Step:
        """Ask, take, release."""
        self.ask(number)
        step = self.take()
        assert isinstance(step, Step) and step.batch.step == number
        self.release(number)
        return step

    def release(self, number: int) -> None:
        self.send(wire.Release(step=number))

    def snapshot(self, number: int) -> wire.LoaderState:
        self.send(wire.Snapshot(step=number))
        answer = self.receive()
        assert isinstance(answer, wire.State)
        return answer.state

    def close(self) -> None:
        self._socket.close()

    def send(self, message: wire.Message) -> None:
        self.send_raw(wire.encode(message))

    def send_raw(self, frame: bytes) -> None:
        self._socket.sendall(frame)

    def receive(self, fds: list[int] | None = None) -> wire.Message:
        size = int.from_bytes(self._exactly(4, fds), "big")
        answer = wire.REPLY.validate_json(self._exactly(size, None))
        if isinstance(answer, wire.Refused):
            raise RefusedError(answer)
        return answer

    def _exactly(self, size: int, fds: list[int] | None) -> bytes:
        data = b""
        while len(data) < size:
            part, found, _, _ = socket.recv_fds(self._socket, size - len(data), 4)
            if fds is not None:
                fds += found
            if not part:
                raise EOFError("the sidecar is gone")
            data += part
        return data


def _copy(ring: mmap.mmap, ref: wire.TensorRef) -> Array:
    assert ref.offset % wire.ALIGN_BYTES == 0
    dtype = np.dtype(ref.dtype)
    count = int(np.prod(ref.shape, dtype=np.int64))
    raw = ring[ref.offset : ref.offset + count * dtype.itemsize]
    return np.frombuffer(raw, dtype).reshape(ref.shape)


def fake_plan(uri: str, **changes: Any) -> JobPlan:
    """The demo's job over `FakeSources` uploaded to `uri`; `changes` replace blocks of the spec."""
    job = Job.read(
        {
            **DEMO,
            "spec": {
                **DEMO["spec"],
                "model": {
                    **DEMO["spec"]["model"],
                    "llm": {
                        **DEMO["spec"]["model"]["llm"],
                        "tokenizer": f"{uri}/tokenizer.json",
                        "vocabSize": VOCAB_SIZE,
                    },
                },
                "data": {
                    **DEMO["spec"]["data"],
                    "sources": {
                        name: {**DEMO["spec"]["data"]["sources"][name], "uri": f"{uri}/{name}"}
                        for name in SOURCES
                    },
                    "mixture": [{"weights": dict.fromkeys(SOURCES, 1)}],
                },
                **changes,
            },
        }
    )
    return compile_plan(job)


class Sidecar:
    """One sidecar process."""

    def __init__(self, plan: JobPlan, node: int, folder: Path, ports: Sequence[int]) -> None:
        self.path = folder / f"node-{node}.sock"
        self.log = folder / f"node-{node}.log"
        self._args = [
            sys.executable, "-m", "omni_dataloader.main", "--plan", str(folder / "plan.json"),
            "--node", str(node), "--socket", str(self.path), "--listen", f"127.0.0.1:{ports[node]}",
            "--peers", ",".join(f"127.0.0.1:{port}" for port in ports),
            "--run-dir", str(folder / "run"), "--die-with", str(os.getpid()),
        ]  # fmt: skip
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(self._args, stdout=log, stderr=log)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(10)

    def restart(self) -> None:
        """Start again with the same arguments."""
        self.process = self._start()

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)


@contextmanager
def sidecars(plan: JobPlan, folder: Path) -> Iterator[list[Sidecar]]:
    """A sidecar for each node of a plan."""
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / "plan.json")
    ports = free_ports(plan.layout.num_nodes)
    with ExitStack() as stack:
        started = []
        for node in range(plan.layout.num_nodes):
            started.append(Sidecar(plan, node, folder, ports))
            stack.callback(_reap, started[-1])
        stack.callback(_close_clients)
        yield started


@contextmanager
def services(
    plan: JobPlan,
    folder: Path,
    store: Store,
    *,
    cache_bytes: int = 0,
    executor: Executor | None = None,
) -> Iterator[list[Path]]:
    """All nodes' services in one thread of this process, over real sockets; yields their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    nodes = range(plan.layout.num_nodes)
    peers = [("127.0.0.1", port) for port in free_ports(len(nodes))]
    paths = [folder / f"node-{node}.sock" for node in nodes]
    executor = executor or ThreadPoolExecutor(2)
    ended = asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve(node: int) -> None:
        agreement = Agreement(
            node=node, num_nodes=len(nodes), peers=lambda: peers, plan_hash=plan.hash
        )
        await agreement.start(*peers[node])
        data = open_data(plan.spec, store)
        world = World(
            plan=plan,
            node=node,
            data=data,
            samples=plan_samples(data, plan),
            store=store,
            executor=executor,
            agreement=agreement,
            run_dir=folder,
            cache_bytes=cache_bytes,
        )
        with listen(paths[node]) as listener:
            try:
                await Server(world).run(listener)
            finally:
                await agreement.close()

    async def serve_all() -> None:
        tasks = [asyncio.create_task(serve(node)) for node in nodes]
        await ended.wait()
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    thread = threading.Thread(target=lambda: _run(loop, serve_all()))
    thread.start()
    try:
        with threadpool_limits(1, user_api="blas"):  # as main does
            yield paths
    finally:
        _close_clients()
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)
        executor.shutdown()
        assert not thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main)


def _close_clients() -> None:
    while _open_clients:
        _open_clients.pop().close()


def _reap(sidecar: Sidecar) -> None:
    if sidecar.process.poll() is None:
        sidecar.kill()


def free_ports(count: int) -> list[int]:
    """Loopback ports that are free now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
