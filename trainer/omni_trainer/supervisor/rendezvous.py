"""How the supervisors of a job agree on the next generation.

The store lives in node 0's supervisor. Ranks come from the plan: group rank = node index. A
generation ends when any supervisor raises the counter by compare-and-set; the others see that as a
waiting node. All then report what they saw, node 0 writes the verdict, and each generation gets a
worker store of its own, on a port of its own: a stale address cannot reach it.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from omni_contract.errors import OmniError
from omni_contract.names import Exit
from omni_trainer.supervisor.reaper import end_descendants
from omni_trainer.supervisor.verdict import Report, Verdict

_STORE_TIMEOUT = timedelta(seconds=20)
_BEAT_S = 0.15
_POLL_S = 0.02
_REACH_S = 0.1
_GOODBYE_S = 5.0
_GONE_S = 1.0
"""A supervisor that leaves beats up to its goodbye; one silent for so long then is dead."""


class ContactLostError(Exception):
    """The store or a peer is gone; the attempt is over."""


class RunEndedError(Exception):
    """The verdict ends the run, or this attempt of it."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict


Decide = Callable[[int, Sequence[Report]], Verdict]
"""Node 0's judgement on (generation, reports of all nodes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Host and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read HOST:PORT. Raises OmniError where it is not."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise OmniError(f"--rendezvous {text!r}: expected HOST:PORT, such as 127.0.0.1:29400")
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" or self.host.startswith("127.")


class PlanRendezvous(RendezvousHandler):
    """One supervisor's seat at the table."""

    def __init__(
        self,
        *,
        address: Address,
        node: int,
        num_nodes: int,
        attempt: int,
        decide: Decide,
        join_timeout_s: float,
        data_address: str = "",
        lost_after_s: float = 15,
    ) -> None:
        """Connect. Raises OmniError (the port is taken) or ContactLostError (no one answers).

        `data_address`: HOST:PORT of the node's data service, for those of the other nodes.
        """
        self.generation: int | None = None
        self.verdict: Verdict | None = None
        """The newest one on a generation that ended; None: none has."""
        self._address = address
        self._node = node
        self._num_nodes = num_nodes
        self._attempt = attempt
        self._decide = decide
        self._join_timeout_s = join_timeout_s
        self._lost_after_s = lost_after_s
        self._worker_store: TCPStore | None = None
        self._server = serve_store(address, what="--rendezvous") if node == 0 else None
        self._store = self._connect(join_timeout_s)
        # The pair is the fence: a supervisor of another attempt talks to itself.
        with self._translated():
            if node == 0:
                self._store.set("generation", "-1")
            self._store.set(f"data/{node}", data_address)
        self._contact = _Contact(
            self._connect(join_timeout_s), node=node, num_nodes=num_nodes, lost_after_s=lost_after_s
        )

    def get_backend(self) -> str:
        """Name in torch's records."""
        return "omni-plan"

    @property
    def use_agent_store(self) -> bool:
        """Ranks are clients of a store that a supervisor serves."""
        return True

    def get_run_id(self) -> str:
        """Name of the attempt."""
        return f"attempt-{self._attempt}"

    def is_closed(self) -> bool:
        """Whether the attempt is over."""
        return self._contact.lost is not None

    def set_closed(self) -> None:
        """Tell all supervisors that this attempt is over."""
        self.declare_over(f"the supervisor of node {self._node} closed the attempt")

    def num_nodes_waiting(self) -> int:
        """More than 0 when a peer has ended the generation."""
        self.check_contact()
        return int(self.generation is not None and self._contact.generation > self.generation)

    def check_contact(self) -> None:
        """Raise ContactLostError where the store or a peer is gone."""
        if self._contact.lost is not None:
            raise ContactLostError(self._contact.lost)

    def draw_order(self) -> int:
        """The next place in the job-wide order of failures."""
        with self._translated():
            return int(self._store.add("order", 1))

    def tell_true_failure(self) -> None:
        """Say that the cause is known here, so that no one waits for it."""
        with self._translated():
            self._store.set(f"{self.generation}/true", "1")

    def knows_true_failure(self) -> bool:
        """Whether some node knows the cause of this generation's end."""
        with self._translated():
            return bool(self._store.check([f"{self.generation}/true"]))

    def end_generation(self) -> None:
        """Raise the counter, unless a peer did."""
        assert self.generation is not None
        with self._translated():
            self._store.compare_set("generation", str(self.generation), str(self.generation + 1))

    def report(self, report: Report) -> None:
        """Leave this node's report on the generation that ended."""
        with self._translated():
            self._store.set(f"{self.generation}/report/{self._node}", report.model_dump_json())

    def mark_done(self) -> bool:
        """Say that all ranks of this node are done; True once those of all nodes are."""
        with self._translated():
            self._store.set(f"{self.generation}/done/{self._node}", "1")
            return bool(self._store.check(self._of_all_nodes(f"{self.generation}/done")))

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet all supervisors for the next generation. Raises RunEndedError on another verdict."""
        before = self.generation
        target = 0 if before is None else before + 1
        with self._translated():
            if before is None:
                self._await(["generation"], timeout_s=self._join_timeout_s)
                self._store.compare_set("generation", "-1", "0")
            else:
                self.end_generation()
            self._store.set(f"{target}/arrived/{self._node}", "1")
            if self._node == 0:
                self._open_generation(target)
            limit_s = self._join_timeout_s if before is None else 60
            self._await([f"{target}/verdict"], timeout_s=limit_s)
            raw = self._store.get(f"{target}/verdict")
            verdict = Verdict.model_validate_json(raw)
            self.verdict = None if before is None else verdict
            if verdict.kind != "restart":
                raise RunEndedError(verdict)
            port = int(self._store.get(f"{target}/port"))
        self.generation = target
        return RendezvousInfo(
            self._store,
            self._node,
            self._num_nodes,
            RendezvousStoreInfo(master_addr=self._address.host, master_port=port),
        )

    def data_addresses(self) -> list[str]:
        """Where the data services of all nodes are, in node order; once all nodes have met."""
        with self._translated():
            return [raw.decode() for raw in self._store.multi_get(self._of_all_nodes("data"))]

    def declare_over(self, why: str) -> None:
        """Tell every supervisor that this attempt cannot go on."""
        with contextlib.suppress(DistError):
            self._store.set("over", why)

    def shutdown(self) -> bool:
        """Leave. Node 0 stays until the others have, since its store goes with it."""
        self._contact.stop()
        with contextlib.suppress(DistError):
            self._store.set(f"goodbye/{self._node}", "1")
            return self._node != 0 or self._await_goodbyes()
        return True

    def _await_goodbyes(self) -> bool:
        """Wait for all who are still there: a node that died will never take its leave."""
        deadline = time.monotonic() + _GOODBYE_S
        heard = dict.fromkeys(range(self._num_nodes), (b"", time.monotonic()))
        while not self._store.check(self._of_all_nodes("goodbye")):
            now = time.monotonic()
            for node, (count, _) in heard.items():
                newest = self._newest(f"beat/{node}")
                if newest != count:
                    heard[node] = (newest, now)
            are_there = [
                node
                for node, (_, at) in heard.items()
                if now - at < _GONE_S and not self._store.check([f"goodbye/{node}"])
            ]
            if not are_there or now > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _newest(self, name: str) -> bytes:
        return self._store.get(name) if self._store.check([name]) else b""

    def _open_generation(self, target: int) -> None:
        """Node 0: wait for all, judge, open a worker store."""
        limit_s = self._join_timeout_s if target == 0 else 60
        self._await(self._of_all_nodes(f"{target}/arrived"), timeout_s=limit_s)
        if target == 0:
            verdict = Verdict(kind="restart", exit_code=0, message="")
        else:
            names = self._of_all_nodes(f"{target - 1}/report")
            raw = self._store.multi_get(names)
            verdict = self._decide(target - 1, [Report.model_validate_json(r) for r in raw])
        if verdict.kind == "restart":
            # The old one closes here: whoever still holds its address is refused.
            self._worker_store = serve_store(
                Address(host=self._address.host, port=0), what="worker store"
            )
            self._store.set(f"{target}/port", str(self._worker_store.port))
        self._store.set(f"{target}/verdict", verdict.model_dump_json())

    def _await(self, keys: list[str], *, timeout_s: float) -> None:
        """Wait for keys without blocking in the store, so that a lost peer is noticed."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check(keys):
            self.check_contact()
            if time.monotonic() > deadline:
                missing = [key for key in keys if not self._store.check([key])]
                raise ContactLostError(f"no {', '.join(missing)} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def _of_all_nodes(self, prefix: str) -> list[str]:
        return [f"{prefix}/{node}" for node in range(self._num_nodes)]

    def _connect(self, timeout_s: float) -> PrefixStore:
        self._reach(timeout_s)
        try:
            store = TCPStore(
                self._address.host,
                self._address.port,
                is_master=False,
                timeout=_STORE_TIMEOUT,
                wait_for_workers=False,
            )
        except DistError as exc:
            raise ContactLostError(f"no store at {self._address}") from exc
        store.set_timeout(_STORE_TIMEOUT)
        return PrefixStore(f"attempt-{self._attempt}", store)

    def _reach(self, timeout_s: float) -> None:
        """Wait until node 0 answers. torch would wait as well, but deaf to signals."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((self._address.host, self._address.port), 2).close()
                return
            except OSError as exc:  # not started yet, or its name is not known yet
                if time.monotonic() > deadline:
                    raise ContactLostError(f"no store at {self._address} ({exc})") from None
            time.sleep(_REACH_S)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DistError as exc:
            raise ContactLostError("node 0's store is gone") from exc


def serve_store(address: Address, *, what: str) -> TCPStore:
    """Serve a store at an address; port 0 takes a free one. Raises OmniError where it is taken."""
    host = address.host if address.is_loopback else ""  # pods are addressed by several names
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, address.port))
    except OSError as exc:
        listener.close()
        raise OmniError(
            f"{what} {address}: {os.strerror(exc.errno or 0)}; "
            "take another port or end the program that holds it"
        ) from None
    listener.listen(4096)
    port = listener.getsockname()[1]
    return TCPStore(
        address.host,
        port,
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class _Contact:
    """A heartbeat to the store on a connection of its own, and a dead man's switch.

    Where the store stays silent, be it that a call blocks for ever, the ranks are ended: whoever is
    cut off must not go on training.
    """

    def __init__(
        self, store: PrefixStore, *, node: int, num_nodes: int, lost_after_s: float
    ) -> None:
        self.generation = -1
        """Newest generation in the store."""
        self.lost: str | None = None
        """Why contact is lost; None while it holds."""
        self._store = store
        self._node = node
        self._num_nodes = num_nodes
        self._lost_after_s = lost_after_s
        self._stopped = threading.Event()
        self._answered_at = time.monotonic()
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more watching; the supervisor is about to end."""
        self._stopped.set()
        for thread in self._threads:
            # A thread inside the store when the interpreter ends would abort the process.
            thread.join(timeout=2)

    def _beat(self) -> None:
        count = 0
        heard = dict.fromkeys(range(self._num_nodes), (b"", time.monotonic()))
        try:
            while not self._stopped.wait(_BEAT_S):
                count += 1
                self._store.set(f"beat/{self._node}", str(count))
                if self._store.check(["generation"]):
                    self.generation = int(self._store.get("generation"))
                if self._store.check(["over"]):
                    self.lost = self._store.get("over").decode()
                self._answered_at = time.monotonic()
                if self._node == 0 and self.lost is None and count % 8 == 0:
                    self._hear_peers(heard)
        except DistError:
            if not self._stopped.is_set():
                self.lost = "node 0's store is gone"

    def _hear_peers(self, heard: dict[int, tuple[bytes, float]]) -> None:
        """Node 0: declare the attempt over when a peer that has joined falls silent."""
        now = time.monotonic()
        for node, (count, since) in heard.items():
            name = f"beat/{node}"
            newest = self._store.get(name) if self._store.check([name]) else b""
            if newest != count or not newest:
                heard[node] = (newest, now)
            elif now - since > self._lost_after_s and not self._store.check([f"goodbye/{node}"]):
                self._store.set("over", f"the supervisor of node {node} is silent")

    def _guard(self) -> None:
        while not self._stopped.wait(1):
            if time.monotonic() - self._answered_at > self._lost_after_s and self.lost is None:
                self.lost = f"node 0's store has not answered for {self._lost_after_s:.0f} s"
            if time.monotonic() - self._answered_at > 2 * self._lost_after_s:
                end_descendants()
                os._exit(Exit.PEER_LOST)  # the main thread is stuck in a call that never returns
