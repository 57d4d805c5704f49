"""Agreement between nodes, over real TCP, in one event loop."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from omni_contract.errors import DataError, StaleError
from omni_dataloader.agree import Agreement, Bad, Board, Pair
from tests.fakes.sidecar_client import free_ports

FIRST: Pair = (0, 0)


def bad(index: int, reason: str = "torn") -> Bad:
    return Bad(source=0, epoch=0, index=index, reason=reason)


def board(
    pair: Pair = FIRST, *, floor: int = 1, history: Callable[[int], list[Bad]] = lambda _: []
) -> Board:
    return Board(pair, floor=floor, history=history)


class Nodes:
    """Agreements that can be started and ended one by one."""

    def __init__(self, count: int) -> None:
        self._peers = [("127.0.0.1", port) for port in free_ports(count)]
        self._started: list[Agreement] = []
        self.are_known = True

    async def start(self, node: int, of: Board, *, plan_hash: str = "p") -> Agreement:
        agreement = Agreement(
            node=node,
            num_nodes=len(self._peers),
            peers=lambda: self._peers if self.are_known else [],
            plan_hash=plan_hash,
        )
        await agreement.start(*self._peers[node])
        agreement.open(of)
        self._started.append(agreement)
        return agreement

    async def close(self) -> None:
        for agreement in self._started:
            await agreement.close()


def run(count: int, test: Callable[[Nodes], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        nodes = Nodes(count)
        try:
            async with asyncio.timeout(20):
                await test(nodes)
        finally:
            await nodes.close()

    asyncio.run(main())


def test_one_node_needs_no_socket() -> None:
    async def main() -> list[Bad]:
        agreement = Agreement(node=0, num_nodes=1, peers=lambda: [], plan_hash="p")
        await agreement.start("no.such.host.invalid", 1)
        one = board()
        agreement.open(one)
        return await agreement.agree(one, 1, [bad(3)])

    assert asyncio.run(main()) == [bad(3)]


def test_all_nodes_get_the_union_of_what_each_found() -> None:
    async def test(nodes: Nodes) -> None:
        boards = [board() for _ in range(3)]
        agreements = [await nodes.start(n, b) for n, b in enumerate(boards)]
        found = [[bad(5)], [], [bad(1), bad(5, "seen by another")]]
        for step in (1, 2):
            agreed = await asyncio.gather(
                *(agreements[n].agree(boards[n], step, found[n]) for n in range(3))
            )
            assert list(agreed) == [[bad(1), bad(5)]] * 3

    run(3, test)


def test_no_step_is_agreed_before_every_node_has_reported() -> None:
    async def test(nodes: Nodes) -> None:
        boards = [board(), board()]
        first = await nodes.start(0, boards[0])
        waiting = asyncio.create_task(first.agree(boards[0], 1, []))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        late = await nodes.start(1, boards[1])
        assert await late.agree(boards[1], 1, [bad(2)]) == [bad(2)]
        assert await waiting == [bad(2)]

    run(2, test)


@pytest.mark.parametrize("restarted", [0, 1])
def test_a_restarted_node_gets_the_same_answers_and_gives_them(restarted: int) -> None:
    async def test(nodes: Nodes) -> None:
        boards = [board(), board()]
        agreements = [await nodes.start(n, b) for n, b in enumerate(boards)]
        found = [[bad(1)], [bad(2)]]
        for step in (1, 2, 3):
            await asyncio.gather(
                *(agreements[n].agree(boards[n], step, found[n]) for n in range(2))
            )
        await agreements[restarted].close()
        fresh = board(floor=3)  # its ranks go on at step 3; the other node is beyond it
        again = await nodes.start(restarted, fresh)
        assert await again.agree(fresh, 3, found[restarted]) == [bad(1), bad(2)]

    run(2, test)


def test_a_restarted_node_answers_for_steps_of_its_earlier_life() -> None:
    """Both died; the one whose ranks are ahead must not keep the other waiting for ever."""

    async def test(nodes: Nodes) -> None:
        behind = board(floor=4)
        ahead = board(floor=5, history=lambda step: [bad(8)] if step == 4 else [])
        first = await nodes.start(0, behind)
        await nodes.start(1, ahead)
        assert await first.agree(behind, 4, []) == [bad(8)]

    run(2, test)


def test_a_newer_pair_sends_the_older_one_away() -> None:
    async def test(nodes: Nodes) -> None:
        old, new = board((0, 1)), board((0, 2))
        first = await nodes.start(0, new)
        second = await nodes.start(1, old)
        with pytest.raises(StaleError, match="taken over"):
            await second.agree(old, 1, [])
        newer = board((0, 2))
        second.open(newer)
        agreed = await asyncio.gather(second.agree(newer, 1, [bad(4)]), first.agree(new, 1, []))
        assert list(agreed) == [[bad(4)]] * 2

    run(2, test)


def test_who_waits_on_an_older_pair_is_told_when_a_newer_one_comes() -> None:
    async def test(nodes: Nodes) -> None:
        old = board((0, 1))
        first = await nodes.start(0, board((0, 1)))
        second = await nodes.start(1, old)
        waiting = asyncio.create_task(second.agree(old, 1, []))
        await asyncio.sleep(0.2)
        first.open(board((1, 0)))
        with pytest.raises(StaleError, match="taken over"):
            await waiting

    run(2, test)


def test_a_node_that_cannot_serve_a_step_fails_it_for_all() -> None:
    async def test(nodes: Nodes) -> None:
        boards = [board(), board()]
        first = await nodes.start(0, boards[0])
        await nodes.start(1, boards[1])
        boards[1].fail(1, DataError("s3://b/k: gone"))
        with pytest.raises(DataError, match="s3://b/k: gone"):
            await first.agree(boards[0], 1, [])

    run(2, test)


def test_node_0_passes_a_failure_of_one_node_on_to_the_others() -> None:
    """They wait for node 0 alone, so without its word they would wait for ever."""

    async def test(nodes: Nodes) -> None:
        boards = [board() for _ in range(3)]
        first, _, third = [await nodes.start(n, b) for n, b in enumerate(boards)]
        boards[1].fail(1, DataError("s3://b/k: gone"))
        answers = await asyncio.gather(
            first.agree(boards[0], 1, []), third.agree(boards[2], 1, []), return_exceptions=True
        )
        assert [str(answer) for answer in answers] == ["s3://b/k: gone"] * 2

    run(3, test)


def test_a_node_waits_until_it_is_told_where_the_others_are() -> None:
    """In a pod the service starts before the supervisors of the attempt have met."""

    async def test(nodes: Nodes) -> None:
        nodes.are_known = False
        boards = [board(), board()]
        agreements = [await nodes.start(n, b) for n, b in enumerate(boards)]
        both = [asyncio.create_task(agreements[n].agree(boards[n], 1, [bad(n)])) for n in range(2)]
        await asyncio.sleep(0.3)
        assert not any(one.done() for one in both)
        nodes.are_known = True
        assert await asyncio.gather(*both) == [[bad(0), bad(1)]] * 2

    run(2, test)
