"""The op table: megatron's order, encoder slots, memory bound, deadlocks."""

import itertools

import pytest

from omni_contract.dataflow import Window
from omni_contract.errors import SpecError
from omni_planner.check import check_dataflow, stuck_ops
from omni_planner.schedule import (
    Op,
    OpKind,
    llm_ops,
    on_demand_dataflow,
    op_table,
    peak_live_encoders,
    upfront_dataflow,
)

SIZES = [(p, n) for p in (1, 2, 3, 4, 5, 8, 16) for n in (1, 2, 3, 4, 7, 8, 16, 33, 64)]


def _names(ops: tuple[Op, ...]) -> str:
    return " ".join(str(op).replace(" ", "") for op in ops)


def test_the_llm_order_is_1f1b() -> None:
    ops = llm_ops(num_stages=4, num_microbatches=4, stage=1)
    assert _names(tuple(ops)) == "LF1 LF2 LF3 LB1 LF4 LB2 LB3 LB4"


def test_two_stages_encode_in_turn_just_before_stage_0_needs_them() -> None:
    flow = on_demand_dataflow(num_stages=2, num_microbatches=4)
    first, second = op_table(num_stages=2, num_microbatches=4, dataflow=flow)
    assert _names(first) == "EF1 LF1 LF2 LB1 EB1 EF3 LF3 LB2 LF4 LB3 EB3 LB4"
    assert _names(second) == "EF2 LF1 LB1 EF4 LF2 LB2 LF3 LB3 EB2 LF4 LB4 EB4"


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_on_demand_runs_through_with_at_most_two_alive(p: int, n: int) -> None:
    flow = on_demand_dataflow(num_stages=p, num_microbatches=n)
    table = check_dataflow(num_stages=p, num_microbatches=n, dataflow=flow)
    assert max(peak_live_encoders(ops) for ops in table) <= 2
    encoded = sorted(op.microbatch for ops in table for op in ops if op.kind == "EF")
    assert encoded == list(range(1, n + 1))
    assert encoded == sorted(op.microbatch for ops in table for op in ops if op.kind == "EB")


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_upfront_holds_n_over_p(p: int, n: int) -> None:
    flow = upfront_dataflow(num_stages=p, num_microbatches=n)
    table = check_dataflow(num_stages=p, num_microbatches=n, dataflow=flow)
    assert max(peak_live_encoders(ops) for ops in table) == -(-n // p)


@pytest.mark.parametrize("p", [2, 4])
def test_each_entry_stands_in_its_window(p: int) -> None:
    flow = on_demand_dataflow(num_stages=p, num_microbatches=8)
    table = op_table(num_stages=p, num_microbatches=8, dataflow=flow)
    for key, (stage, (after, before)) in flow.items():
        kinds = ("EF", "LF") if int(key) > 0 else ("EB", "LB")
        order = [str(op) for op in table[stage]]
        here = order.index(f"{kinds[0]} {abs(int(key))}")
        if after:
            assert order.index(f"{kinds[1]} {abs(after)}") < here
        if abs(before) <= 8:
            assert here < order.index(f"{kinds[1]} {abs(before)}")


def _paper_flow() -> dict[str, Window]:
    return on_demand_dataflow(num_stages=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("2", (2, [0, 1]), "stage 2 does not exist; use 0 to 1"),
        ("2", (1, [1, 3]), "no gap between neighbouring"),
        ("2", (1, [4, 5]), "too late"),
        ("-2", (0, [-2, -3]), "does not hold the graph"),
        ("-2", (1, [0, -1]), "before the first LLM backward"),
        ("9", (1, [0, 1]), "only microbatches 1 to 4"),
        ("3", (0, [3, 4]), "deadlock"),
        ("2", (1, [2, 3]), "would encode 4 before 2; a stage encodes in ascending"),
        ("-1", (0, [-4, -5]), None),
    ],
)
def test_a_dataflow_that_cannot_run_is_named(key: str, entry: Window, message: str | None) -> None:
    flow = {**_paper_flow(), key: entry}
    if message is None:
        check_dataflow(num_stages=2, num_microbatches=4, dataflow=flow)
        return
    with pytest.raises(SpecError, match=message):
        check_dataflow(num_stages=2, num_microbatches=4, dataflow=flow)


def test_a_missing_entry_is_named() -> None:
    flow = _paper_flow()
    del flow["-3"]
    with pytest.raises(SpecError, match=r"dataflow\['-3'\]: missing"):
        check_dataflow(num_stages=2, num_microbatches=4, dataflow=flow)


def test_stuck_ops_name_both_sides_of_a_deadlock() -> None:
    table = (
        (Op(OpKind.LLM_FORWARD, 1), Op(OpKind.LLM_BACKWARD, 1)),
        (
            Op(OpKind.LLM_FORWARD, 1),
            Op(OpKind.LLM_BACKWARD, 1),
            Op(OpKind.ENCODER_FORWARD, 1),
            Op(OpKind.ENCODER_BACKWARD, 1),
        ),
    )
    assert [(s, str(op)) for s, op in stuck_ops(table)] == [(0, "LF 1"), (1, "LF 1")]


def test_every_stage_has_every_llm_operation() -> None:
    for p, n in itertools.product((1, 2, 4), (1, 3, 8)):
        for stage in range(p):
            ops = llm_ops(num_stages=p, num_microbatches=n, stage=stage)
            assert len(ops) == 2 * n == len(set(ops))
