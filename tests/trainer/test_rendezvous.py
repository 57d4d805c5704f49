"""Supervisors meet by the plan's node index, one generation after the other."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from omni_contract.errors import OmniError
from omni_contract.names import Exit
from omni_trainer.supervisor.rendezvous import (
    Address,
    ContactLostError,
    PlanRendezvous,
    RunEndedError,
)
from omni_trainer.supervisor.verdict import Report, Verdict

T = TypeVar("T")
GO_ON = Verdict(kind="restart", exit_code=0, message="")


def free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address(host="127.0.0.1", port=probe.getsockname()[1])


class Table:
    """Two seats and what node 0 was asked to judge."""

    def __init__(self) -> None:
        self.address = free_address()
        self.verdict = GO_ON
        self.judged: list[tuple[int, Sequence[Report]]] = []
        self.seats = both(lambda node: self.seat(node))

    def seat(self, node: int, *, attempt: int = 1, join_timeout_s: float = 10) -> PlanRendezvous:
        return PlanRendezvous(
            address=self.address, node=node, num_nodes=2, attempt=attempt, decide=self.decide,
            join_timeout_s=join_timeout_s, data_address=f"data-{node}:1", lost_after_s=3,
        )  # fmt: skip

    def decide(self, generation: int, reports: Sequence[Report]) -> Verdict:
        self.judged.append((generation, reports))
        return self.verdict

    def meet(self) -> list[tuple[int, int, int]]:
        def one(node: int) -> tuple[int, int, int]:
            info = self.seats[node].next_rendezvous()
            assert info.bootstrap_store_info is not None
            return info.rank, info.world_size, info.bootstrap_store_info.master_port

        return both(one)

    def report(self) -> None:
        for node, seat in enumerate(self.seats):
            seat.report(Report(node=node, failures=(), step=node))


def both(act: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(act, range(2)))


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table()
    yield table
    both(lambda node: table.seats[node].shutdown())


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_c37_ranks_are_those_of_the_plan_and_each_generation_has_a_store_of_its_own(
    table: Table,
) -> None:
    (rank0, size0, port0), (rank1, size1, port1) = table.meet()
    assert (rank0, size0, rank1, size1) == (0, 2, 1, 2)
    assert port0 == port1
    table.report()
    (_, _, next_port), _ = table.meet()
    assert next_port != port0
    assert [seat.generation for seat in table.seats] == [1, 1]
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port0)):
        pass  # a stale address reaches nobody


def test_a_peer_sees_the_end_of_a_generation_as_a_waiting_node(table: Table) -> None:
    table.meet()
    time.sleep(0.5)
    assert [seat.num_nodes_waiting() for seat in table.seats] == [0, 0]
    table.seats[1].end_generation()
    table.seats[0].end_generation()  # both saw a failure: the generation is raised once
    until(lambda: table.seats[0].num_nodes_waiting() > 0)
    table.report()
    table.meet()
    assert [seat.generation for seat in table.seats] == [1, 1]


def test_node_0_judges_the_reports_of_all_and_all_follow(table: Table) -> None:
    table.meet()
    table.report()
    table.verdict = Verdict(kind="end", exit_code=Exit.GAVE_UP, message="enough")

    def end(node: int) -> Verdict:
        with pytest.raises(RunEndedError) as ended:
            table.seats[node].next_rendezvous()
        return ended.value.verdict

    assert both(end) == [table.verdict] * 2
    [(generation, reports)] = table.judged
    assert generation == 0
    assert [(report.node, report.step) for report in reports] == [(0, 0), (1, 1)]


def test_all_nodes_must_be_done_before_one_may_leave(table: Table) -> None:
    table.meet()
    assert not table.seats[0].mark_done()
    assert table.seats[1].mark_done()
    assert table.seats[0].mark_done()


def test_a_closed_attempt_ends_every_supervisor(table: Table) -> None:
    table.meet()
    table.seats[1].declare_over("node 1 was told to end")
    until(table.seats[0].is_closed)
    with pytest.raises(ContactLostError, match="told to end"):
        table.seats[0].num_nodes_waiting()


def test_c33_a_supervisor_of_another_attempt_does_not_get_in(table: Table) -> None:
    stale = table.seat(1, attempt=0, join_timeout_s=0.5)
    with pytest.raises(ContactLostError, match="generation"):
        stale.next_rendezvous()
    table.meet()
    stale.shutdown()


def test_a_supervisor_waits_for_node_0_to_come(table: Table) -> None:
    table.address = free_address()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(table.seat, 1)
        time.sleep(0.5)
        assert not early.done()
        late = table.seat(0)
        both(lambda node: (late, early.result())[node].shutdown())


def test_node_0_leaves_soon_though_a_peer_died_without_a_goodbye(table: Table) -> None:
    table.address = free_address()
    alone = table.seat(0)
    begin = time.monotonic()
    assert not alone.shutdown()
    assert time.monotonic() - begin < 4  # it waits 5 s for a peer that still beats


def test_every_node_learns_where_the_data_services_are(table: Table) -> None:
    table.meet()
    assert [seat.data_addresses() for seat in table.seats] == [["data-0:1", "data-1:1"]] * 2


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = Address(host="127.0.0.1", port=holder.getsockname()[1])
        with pytest.raises(OmniError, match="Address already in use; take another port"):
            PlanRendezvous(
                address=address, node=0, num_nodes=1, attempt=1, decide=lambda *_: GO_ON,
                join_timeout_s=1,
            )  # fmt: skip


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(OmniError, match="expected HOST:PORT"):
        Address.parse("localhost")
