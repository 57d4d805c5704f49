"""The sidecars of a job agree on the corrupt samples of a step before any of them serves it.

Each node finds only the corrupt samples among those it reads, yet all must mask the same ones.
Node 0 pulls every node's report of a step and answers the others with the union. Everything is
pulled, and every answer can be given again, so either side may be restarted at any time.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from omni_contract.errors import DataError, OmniError, StaleError, UnavailableError

log = logging.getLogger(__name__)

Pair = tuple[int, int]
"""(attempt, generation)."""
Peers = Callable[[], Sequence[tuple[str, int]]]
"""Host and port of every node's data service as known now; empty while they are not known."""
Ask = Literal["report", "agreed"]

KEPT_STEPS = 1024
"""Answers kept; nodes are never more than a few steps apart."""
_MAX_LINE_BYTES = 1 << 26
_RETRY_S = (0.05, 1.0)
_PATIENCE_S = 30.0  # between log lines about a peer that is away; bound for one with another plan


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Bad:
    """A sample that cannot be used."""

    source: int
    epoch: int
    index: int
    reason: str


class Board:
    """What one node says about the steps of one pair."""

    def __init__(self, pair: Pair, *, floor: int, history: Callable[[int], list[Bad]]) -> None:
        self.pair = pair
        self.floor = floor
        """First step this process decodes; what came before was agreed in an earlier life."""
        self._history = history
        self._answers: dict[tuple[Ask, int], asyncio.Future[list[Bad]]] = {}

    def put(self, ask: Ask, step: int, bad: list[Bad]) -> None:
        """Answer all who ask, now and later."""
        future = self._answer(ask, step)
        if not future.done():
            future.set_result(bad)
        for key in [key for key in self._answers if key[1] < step - KEPT_STEPS]:
            del self._answers[key]

    def fail(self, step: int, error: OmniError) -> None:
        """Tell all who ask that this node cannot serve the step."""
        for ask in ("report", "agreed"):
            future = self._answer(ask, step)
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody has to ask

    async def get(self, ask: Ask, step: int) -> list[Bad]:
        """Wait for the answer."""
        if step < self.floor:
            return self._history(step)
        return await asyncio.shield(self._answer(ask, step))

    def close(self) -> None:
        """A newer pair has come: who still waits is told so."""
        for future in self._answers.values():
            future.cancel()

    def _answer(self, ask: Ask, step: int) -> "asyncio.Future[list[Bad]]":
        key = (ask, step)
        if key not in self._answers:
            self._answers[key] = asyncio.get_running_loop().create_future()
        return self._answers[key]


class Agreement:
    """This node's end of the agreement. With one node it needs no network."""

    def __init__(self, *, node: int, num_nodes: int, peers: Peers, plan_hash: str) -> None:
        self._node = node
        self._num_nodes = num_nodes
        self._peers = peers
        self._plan_hash = plan_hash
        self._board: Board | None = None
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen to the other nodes, on every interface where `host` is `*`.

        Raises OSError where the port is taken.
        """
        if self._num_nodes > 1:
            self._server = await asyncio.start_server(
                self._answer, None if host == "*" else host, port, limit=_MAX_LINE_BYTES
            )

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        if self._board is not None:
            self._board.close()

    def open(self, board: Board) -> None:
        """Begin a pair; the one before is over."""
        if self._board is not None:
            self._board.close()
        self._board = board
        self._changed.set()
        self._changed = asyncio.Event()

    async def agree(self, board: Board, step: int, local: list[Bad]) -> list[Bad]:
        """Report what this node found in a step; returns what all nodes found, ascending.

        Waits for nodes that are away. Raises DataError when a node cannot serve the step.
        """
        board.put("report", step, local)
        if self._node != 0:
            return await self._pull(board, 0, "agreed", step)
        others = [self._pull(board, n, "report", step) for n in range(1, self._num_nodes)]
        with reported(board, step):
            reports = await asyncio.gather(*others)
        found: dict[tuple[int, int, int], Bad] = {}
        for report in (local, *reports):
            for bad in report:
                found.setdefault((bad.source, bad.epoch, bad.index), bad)
        agreed = sorted(found.values())
        board.put("agreed", step, agreed)
        return agreed

    async def _pull(self, board: Board, node: int, ask: Ask, step: int) -> list[Bad]:
        """Ask a node until it answers."""
        request = {"plan": self._plan_hash, "pair": board.pair, "ask": ask, "step": step}
        delay_s, waited_s, logged_s = _RETRY_S[0], 0.0, 0.0
        while True:
            problem = "closed the connection"
            try:
                reply = await self._exchange(node, request)
            except (OSError, ValueError, asyncio.IncompleteReadError) as exc:
                problem = str(exc)
                reply = {}
            match reply:
                case {"bad": list(found)}:
                    return [Bad(source=s, epoch=e, index=i, reason=r) for s, e, i, r in found]
                case {"stale": str(message)}:
                    raise StaleError(message)
                case {"error": str(message)}:
                    raise DataError(message)
                case {"unavailable": str(message)}:
                    raise UnavailableError(message)
                case {"mismatch": str(message)}:
                    problem = message
                    if waited_s > _PATIENCE_S:  # no longer an old sidecar about to be replaced
                        raise DataError(message)
            if waited_s - logged_s >= _PATIENCE_S:
                logged_s = waited_s
                log.warning(
                    "waiting for another node's data service peer=%d step=%d waited_s=%.0f "
                    "problem=%r", node, step, waited_s, problem,
                )  # fmt: skip
            await asyncio.sleep(delay_s)
            waited_s += delay_s
            delay_s = min(2 * delay_s, _RETRY_S[1])

    async def _exchange(self, node: int, request: dict[str, Any]) -> dict[str, Any]:
        peers = self._peers()
        if len(peers) != self._num_nodes:
            raise OSError("where the data services are is not known yet")
        host, port = peers[node]
        reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            await writer.drain()
            reply: dict[str, Any] = json.loads(await reader.readuntil())
            return reply
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readuntil())
            gone = asyncio.ensure_future(reader.read())  # ends when the asker hangs up
            reply = asyncio.ensure_future(self._reply(request))
            try:
                await asyncio.wait((gone, reply), return_when=asyncio.FIRST_COMPLETED)
                if reply.done():
                    writer.write(json.dumps(reply.result()).encode() + b"\n")
                    await writer.drain()
            finally:
                gone.cancel()
                reply.cancel()
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass  # the asker will ask again
        finally:
            writer.close()

    async def _reply(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["plan"] != self._plan_hash:
            return {"mismatch": f"node {self._node} runs another plan ({self._plan_hash})"}
        pair = (request["pair"][0], request["pair"][1])
        while self._board is None or self._board.pair < pair:
            await self._changed.wait()
        if self._board.pair > pair:
            return {"stale": f"{self._board.pair} has taken over from {pair} (attempt, generation)"}
        board = self._board
        try:
            bad = await board.get(request["ask"], request["step"])
        except UnavailableError as exc:
            return {"unavailable": str(exc)}
        except OmniError as exc:
            return {"error": str(exc)}
        except asyncio.CancelledError:
            if self._board is board:
                raise
            return {"stale": f"a newer pair has taken over from {pair} (attempt, generation)"}
        return {"bad": [[b.source, b.epoch, b.index, b.reason] for b in bad]}


@contextlib.contextmanager
def reported(board: Board, step: int) -> Iterator[None]:
    """Pass a failure of this node to those who wait for its report of a step, or its answer."""
    try:
        yield
    except StaleError:
        raise  # a newer pair tells the others, too
    except Exception as exc:
        board.fail(step, exc if isinstance(exc, UnavailableError) else DataError(str(exc)))
        raise
