"""The unix socket that ranks talk to: fence, one ring a rank, answers in turn. One event loop.

Decisions about data are made elsewhere; here stands who may ask, and when an answer may go out.
"""

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pydantic

from omni_contract import wire
from omni_contract.errors import DataError, OmniError, StaleError, UnavailableError
from omni_dataloader.agree import Pair
from omni_dataloader.produce import End, Production, World
from omni_dataloader.ring import Ring, slot_bytes
from omni_dataloader.state import SavedState

log = logging.getLogger(__name__)

_NO_PAIR: Pair = (-1, -1)
_GOODBYE_S = 1.0  # for a rank that no longer reads


class Server:
    """All ranks of a node, one pair at a time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._slot_bytes = slot_bytes(world.plan)
        self._pair = _NO_PAIR
        self._production: Production | None = None
        self._origin: wire.LoaderState | None = None
        self._ranks: dict[int, _Connection] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Accept ranks until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                client, _ = await loop.sock_accept(listener)
                client.setblocking(False)
                task = asyncio.create_task(_Connection(self, client).run())
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            if self._production is not None:
                self._production.close()

    def join(self, hello: wire.Hello, connection: "_Connection") -> Ring:
        """Let a rank in. Raises _Refusal."""
        plan = self._world.plan
        if hello.version != wire.WIRE_VERSION or hello.plan_hash != plan.hash:
            raise _Refusal(
                "mismatch",
                f"rank {hello.rank} speaks wire version {hello.version} of plan {hello.plan_hash}, "
                f"the data service {wire.WIRE_VERSION} of {plan.hash}; start both from one plan",
            )
        if hello.rank not in plan.layout.ranks_of_node(self._world.node):
            raise _Refusal("mismatch", f"rank {hello.rank} does not run on node {self._world.node}")
        pair = (hello.attempt, hello.generation)
        if pair < self._pair:
            raise _Refusal("stale", _stale(self._pair, pair))
        if pair > self._pair:
            self._begin(pair, hello)
        elif hello.state != self._origin:
            raise _Refusal(
                "error",
                f"rank {hello.rank} resumes from another data state than the ranks before it",
            )
        _check_start(hello)
        assert self._production is not None
        try:
            ring = Ring(slot_bytes=self._slot_bytes, name=f"omni-rank-{hello.rank}")
        except OSError as exc:
            raise _Refusal(
                "error",
                f"no memory for {self._slot_bytes} bytes a step of rank {hello.rank}: "
                f"{exc.strerror}; lower batch.sequenceTokens or give the data service more",
            ) from None
        older = self._ranks.get(hello.rank)
        if older is not None:
            older.drop("this rank has connected again")
        self._ranks[hello.rank] = connection
        connection.production = self._production
        self._production.seek(hello.next_step)
        log.info(
            "rank joined rank=%d attempt=%d generation=%d step=%d",
            hello.rank, *pair, hello.next_step,
        )  # fmt: skip
        return ring

    def _begin(self, pair: Pair, hello: wire.Hello) -> None:
        """A newer pair takes over; who belongs to the older one is sent away."""
        _check_start(hello)
        origin = None
        if hello.state is not None:
            try:
                origin = SavedState.from_bytes(hello.state.blob, self._world.identity)
            except DataError as exc:
                raise _Refusal("error", str(exc)) from None
            if origin.plan.next_step != hello.state.next_step:
                raise _Refusal(
                    "error",
                    f"the data state begins at step {origin.plan.next_step}, the checkpoint says "
                    f"{hello.state.next_step}; resume from another checkpoint",
                )
        for connection in self._ranks.values():
            connection.drop(_stale(pair, self._pair))
        self._ranks.clear()
        if self._production is not None:
            self._production.close()
        self._pair, self._origin = pair, hello.state
        self._production = Production(self._world, pair, origin=origin, next_step=hello.next_step)

    def leave(self, connection: "_Connection") -> None:
        """A rank is gone."""
        for rank, other in list(self._ranks.items()):
            if other is connection:
                del self._ranks[rank]
                log.info("rank left rank=%d", rank)

    def asked(self) -> None:
        """Some rank went on: what lies behind all of them is no longer needed."""
        if self._production is not None and len(self._ranks) == len(
            self._world.plan.layout.ranks_of_node(self._world.node)
        ):
            self._production.forget(min(c.step for c in self._ranks.values()))


class _Refusal(Exception):
    """The rank is told why and sent away."""

    def __init__(self, reason: str, message: str) -> None:
        self.refused = wire.Refused.model_validate({"reason": reason, "message": message})
        super().__init__(message)


class _Connection:
    """One rank. Requests for steps and states are answered in order, releases at once."""

    def __init__(self, server: Server, client: socket.socket) -> None:
        self._server = server
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._ring: Ring | None = None
        self._released = asyncio.Event()
        self._requests: asyncio.Queue[wire.Next | wire.Snapshot] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._last_words: wire.Refused | None = None
        self._rank = -1
        self.production: Production | None = None
        self.step = 0
        """The step asked for last."""

    async def run(self) -> None:
        """Serve until the rank leaves or is sent away."""
        self._task = asyncio.current_task()
        tasks: list[asyncio.Task[None]] = []
        try:
            self._ring = self._server.join(await self._hello(), self)
            self._welcome(self._ring)
            tasks += [
                asyncio.create_task(self._answer_all()),
                asyncio.create_task(self._read_all()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except _Refusal as exc:
            log.warning("rank refused rank=%d reason=%s: %s", self._rank, exc.refused.reason, exc)
            await self._say_goodbye(exc.refused)
        except EOFError:
            pass  # the rank has died; its supervisor knows
        except asyncio.CancelledError:
            if self._last_words is None:
                raise
            await self._say_goodbye(self._last_words)
        except Exception as exc:
            # Without a word the rank would ask again and again until it loses patience.
            log.exception("rank could not be served rank=%d", self._rank)
            message = f"the data service failed ({type(exc).__name__}: {exc}); its log has more"
            await self._say_goodbye(wire.Refused(reason="error", message=message))
        finally:
            for task in tasks:
                task.cancel()
            self._server.leave(self)
            self._client.close()
            if self._ring is not None:
                self._ring.close()

    def drop(self, message: str) -> None:
        """Send the rank away: a newer one is there."""
        self._last_words = wire.Refused(reason="stale", message=message)
        if self._task is not None:
            self._task.cancel()

    async def _read_all(self) -> None:
        while True:
            request = await self._receive()
            match request:
                case wire.Release():
                    assert self._ring is not None
                    self._ring.release(request.step)
                    self._released.set()
                case wire.Next() | wire.Snapshot():
                    self._requests.put_nowait(request)
                case wire.Hello():
                    raise _Refusal("mismatch", "a rank says hello once a connection")

    async def _answer_all(self) -> None:
        while True:
            request = await self._requests.get()
            try:
                answer: wire.Message
                if isinstance(request, wire.Next):
                    answer = await self._batch(request.step)
                else:
                    answer = await self._state(request.step)
            except StaleError as exc:
                raise _Refusal("stale", str(exc)) from None
            except UnavailableError as exc:
                raise _Refusal("unavailable", str(exc)) from None
            except OmniError as exc:
                raise _Refusal("error", str(exc)) from None
            await self._send(answer)

    async def _batch(self, step: int) -> wire.Batch | wire.EndOfData:
        assert self.production is not None and self._ring is not None
        self.step = step
        prepared = await self.production.ready(step)
        if isinstance(prepared, End):
            return wire.EndOfData(step=prepared.step, message=prepared.message)
        arrays = await self.production.arrays(self._rank, prepared)
        while not self._ring.has_room(step):
            self._released.clear()
            await self._released.wait()
        refs = self._ring.write(step, arrays)
        self._server.asked()
        sums = self.production.sums(prepared)
        numbers = sorted({microbatch for microbatch, _ in refs})
        return wire.Batch(
            step=step,
            microbatches=[
                wire.Microbatch(
                    index=number,
                    tensors={name: ref for (m, name), ref in refs.items() if m == number},
                )
                for number in numbers
            ],
            tokens_by_source=sums.tokens_by_source,
            tokens_by_modality=sums.tokens_by_modality,
            weights=sums.weights,
            corrupt_samples=sums.corrupt_samples,
        )

    async def _state(self, step: int) -> wire.State:
        assert self.production is not None
        blob = await self.production.state_after(step)
        return wire.State(state=wire.LoaderState(next_step=step + 1, blob=blob))

    async def _hello(self) -> wire.Hello:
        hello = await self._receive()
        if not isinstance(hello, wire.Hello):
            raise _Refusal("mismatch", "the first frame must be a hello")
        self._rank, self.step = hello.rank, hello.next_step
        return hello

    def _welcome(self, ring: Ring) -> None:
        # A fresh socket takes a frame as small as this at once.
        frame = wire.encode(wire.Welcome(ring_bytes=ring.num_bytes))
        with _gone():
            socket.send_fds(self._client, [frame], [ring.fd])

    async def _say_goodbye(self, refused: wire.Refused) -> None:
        with contextlib.suppress(EOFError, TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._send(refused)

    async def _send(self, message: wire.Message) -> None:
        with _gone():
            await self._loop.sock_sendall(self._client, wire.encode(message))

    async def _receive(self) -> wire.Hello | wire.Next | wire.Release | wire.Snapshot:
        size = int.from_bytes(await self._exactly(4), "big")
        if size > wire.MAX_FRAME_BYTES:
            raise _Refusal("mismatch", f"a frame of {size} bytes is none of ours")
        body = await self._exactly(size)
        try:
            return wire.REQUEST.validate_json(body)
        except pydantic.ValidationError as exc:
            raise _Refusal(
                "mismatch", f"no frame of wire version {wire.WIRE_VERSION}: {exc}"
            ) from None

    async def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            with _gone():
                part = await self._loop.sock_recv(self._client, size - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    """A socket error means that the rank has died. Raises EOFError."""
    try:
        yield
    except OSError as exc:
        raise EOFError from exc


def _check_start(hello: wire.Hello) -> None:
    first = 1 if hello.state is None else hello.state.next_step
    if hello.next_step < first:
        raise _Refusal(
            "error",
            f"rank {hello.rank} asks for step {hello.next_step}, its data state begins at {first}",
        )


def _stale(newer: Pair, older: Pair) -> str:
    return (
        f"attempt {newer[0]} generation {newer[1]} has taken over from attempt {older[0]} "
        f"generation {older[1]}"
    )


def listen(path: Path) -> socket.socket:
    """Bind the unix socket; one that a dead sidecar left is replaced, a live one refused."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        if _is_served(path):
            raise DataError(
                f"--socket {path}: another data service answers there; end it or use another path"
            )
        listener.bind(str(path))
    except OSError as exc:
        listener.close()
        raise DataError(
            f"--socket {path}: {exc.strerror or exc}; use a short path in a folder you may write to"
        ) from None
    except DataError:
        listener.close()
        raise
    listener.listen(128)
    listener.setblocking(False)
    return listener


def _is_served(path: Path) -> bool:
    """Whether someone answers; removes a socket that nobody serves."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return False
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):
                path.unlink()
            return False
    return True
