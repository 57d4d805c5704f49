"""The executor runs a stage's table in its order, whatever the schedule around it does."""

import pytest

from omni_planner.check import check_dataflow
from omni_planner.schedule import (
    Op,
    OpKind,
    on_demand_dataflow,
    op_table,
    peak_live_encoders,
    upfront_dataflow,
)
from omni_trainer.multiplex.executor import Executor, Timeline


class RecordedWork:
    """Encoder work that only writes down what it was asked for."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.live: set[int] = set()

    @property
    def num_live(self) -> int:
        return len(self.live)

    def flush(self) -> None: ...

    def forward(self, microbatch: int) -> None:
        self.ops.append(Op(OpKind.ENCODER_FORWARD, microbatch))
        self.live.add(microbatch)

    def backward(self, microbatch: int) -> None:
        self.ops.append(Op(OpKind.ENCODER_BACKWARD, microbatch))
        self.live.remove(microbatch)


def timeline(*, is_traced: bool = False) -> Timeline:
    return Timeline(is_traced=is_traced, synchronize=lambda: None)


def walk(ops: tuple[Op, ...]) -> tuple[list[Op], Executor]:
    """Play megatron's part: tell of every LLM operation of the table and of nothing else."""
    work = RecordedWork()
    executor = Executor(ops, work, timeline())
    for op in ops:
        if op.kind is OpKind.LLM_FORWARD:
            assert executor.begin_forward() == op.microbatch
            work.ops.append(op)
            executor.end_llm(OpKind.LLM_FORWARD)
        elif op.kind is OpKind.LLM_BACKWARD:
            work.ops.append(op)
            executor.end_llm(OpKind.LLM_BACKWARD)
            executor.open_slot()  # the communicator's
    executor.finish()
    return work.ops, executor


@pytest.mark.parametrize("make", [on_demand_dataflow, upfront_dataflow])
@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"), [(1, 1), (1, 5), (2, 8), (4, 3), (4, 16)]
)
def test_execution_follows_the_table(make: object, num_stages: int, num_microbatches: int) -> None:
    assert callable(make)
    flow = make(num_stages=num_stages, num_microbatches=num_microbatches)
    table = check_dataflow(num_stages=num_stages, num_microbatches=num_microbatches, dataflow=flow)
    for ops in table:
        executed, executor = walk(ops)
        assert tuple(executed) == ops
        assert executor.max_live == peak_live_encoders(ops)


def small_table() -> tuple[Op, ...]:
    flow = on_demand_dataflow(num_stages=1, num_microbatches=2)
    return op_table(num_stages=1, num_microbatches=2, dataflow=flow)[0]


def test_a_schedule_that_leaves_the_table_is_stopped() -> None:
    executor = Executor(small_table(), RecordedWork(), timeline())
    executor.begin_forward()
    executor.end_llm(OpKind.LLM_FORWARD)
    with pytest.raises(AssertionError, match="runs a forward where the table has LB 1"):
        executor.begin_forward()


def test_a_step_that_ends_early_is_stopped() -> None:
    executor = Executor(small_table(), RecordedWork(), timeline())
    with pytest.raises(AssertionError, match="the step ended before LF 1"):
        executor.finish()


def test_spans_are_in_order_and_do_not_overlap() -> None:
    times = timeline(is_traced=True)
    executor = Executor(small_table(), RecordedWork(), times)
    for _ in range(2):
        executor.begin_forward()
        executor.end_llm(OpKind.LLM_FORWARD)
        executor.end_llm(OpKind.LLM_BACKWARD)
    executor.finish()
    spans = times.spans
    assert spans is not None
    assert [(span.op, span.microbatch) for span in spans] == [
        (op.kind.value, op.microbatch) for op in small_table()
    ]
    assert all(a.end_s <= b.start_s for a, b in zip(spans, spans[1:], strict=False))
    assert [span.live for span in spans][:2] == [1, 1]
