"""Proof that a dataflow can run: every microbatch encoded once, in its window, without deadlock."""

from itertools import pairwise

from omni_contract.dataflow import Dataflow
from omni_contract.errors import SpecError
from omni_planner.schedule import Op, OpKind, OpTable, op_table


def check_dataflow(*, num_stages: int, num_microbatches: int, dataflow: Dataflow) -> OpTable:
    """Return the op table of a dataflow that can run. Raises SpecError that names the entry."""
    for e in range(1, num_microbatches + 1):
        for key in (str(e), str(-e)):
            if key not in dataflow:
                raise SpecError(f"dataflow[{key!r}]", "missing; each encoder microbatch needs one")
            _check_entry(key, dataflow, num_stages=num_stages, num_microbatches=num_microbatches)
        if dataflow[str(e)][0] != dataflow[str(-e)][0]:
            raise SpecError(
                f"dataflow['-{e}']",
                f"stage {dataflow[str(-e)][0]} does not hold the graph of encoder microbatch {e}; "
                f"its backward must run on stage {dataflow[str(e)][0]}",
            )
    known = {str(sign * e) for e in range(1, num_microbatches + 1) for sign in (1, -1)}
    for key in dataflow:
        if key not in known:
            raise SpecError(
                f"dataflow[{key!r}]", f"there are only microbatches 1 to {num_microbatches}"
            )
    table = op_table(num_stages=num_stages, num_microbatches=num_microbatches, dataflow=dataflow)
    for stage, ops in enumerate(table):
        _check_order(stage, ops)
    stuck = stuck_ops(table)
    if stuck:
        waiting = "; ".join(f"stage {stage} at {op}" for stage, op in stuck)
        raise SpecError("dataflow", f"the schedule would deadlock: {waiting}")
    return table


def _check_entry(key: str, dataflow: Dataflow, *, num_stages: int, num_microbatches: int) -> None:
    stage, (after, before) = dataflow[key]
    if not 0 <= stage < num_stages:
        raise SpecError(
            f"dataflow[{key!r}]", f"stage {stage} does not exist; use 0 to {num_stages - 1}"
        )
    sign = 1 if int(key) > 0 else -1
    first, last = after * sign, before * sign
    if last != first + 1 or not 0 <= first <= num_microbatches:
        raise SpecError(
            f"dataflow[{key!r}]",
            f"[{after}, {before}] is no gap between neighbouring LLM microbatches 0 to "
            f"{num_microbatches + 1}; write [{sign * 4}, {sign * 5}] for after 4 and before 5",
        )
    if sign > 0 and last > num_microbatches:
        raise SpecError(
            f"dataflow[{key!r}]",
            "a forward after the last LLM microbatch comes too late for any of them",
        )
    if sign < 0 and first < 1:
        raise SpecError(
            f"dataflow[{key!r}]", "a backward cannot stand before the first LLM backward"
        )


def _check_order(stage: int, ops: tuple[Op, ...]) -> None:
    """Messages between two stages keep one order: embeddings leave in the order they are used."""
    forwards = [op.microbatch for op in ops if op.kind is OpKind.ENCODER_FORWARD]
    for before, e in pairwise(forwards):
        if e < before:
            raise SpecError(
                f"dataflow['{e}']",
                f"stage {stage} would encode {before} before {e}; a stage encodes in ascending "
                "order",
            )


def stuck_ops(table: OpTable) -> list[tuple[int, Op]]:
    """Where each stage waits for ever, as (stage, operation); nothing when the table runs through.

    Operations block until what they read is there; sends never block, since the executor posts
    them before it opens a slot. The reduction at the end of the step stands in no table: it cannot
    deadlock as long as stage 0 sends the gradients of its last backwards before it joins in, which
    the executor does.
    """
    last_stage = len(table) - 1
    done: set[tuple[int, Op]] = set()
    encoded_on = {
        op.microbatch: stage
        for stage, ops in enumerate(table)
        for op in ops
        if op.kind is OpKind.ENCODER_FORWARD
    }

    def is_ready(stage: int, op: Op) -> bool:
        k = op.microbatch
        match op.kind:
            case OpKind.ENCODER_FORWARD:
                return True
            case OpKind.ENCODER_BACKWARD:
                return (0, Op(OpKind.LLM_BACKWARD, k)) in done
            case OpKind.LLM_FORWARD if stage == 0:
                source = (encoded_on[k], Op(OpKind.ENCODER_FORWARD, k)) if k in encoded_on else None
                return source is None or source in done
            case OpKind.LLM_FORWARD:
                return (stage - 1, op) in done
            case OpKind.LLM_BACKWARD:
                return stage == last_stage or (stage + 1, op) in done

    position = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for stage, ops in enumerate(table):
            while position[stage] < len(ops) and is_ready(stage, ops[position[stage]]):
                done.add((stage, ops[position[stage]]))
                position[stage] += 1
                moved = True
    return [(s, ops[position[s]]) for s, ops in enumerate(table) if position[s] < len(ops)]
