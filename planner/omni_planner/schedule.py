"""The joint schedule as data: which LLM and encoder operations each pipeline stage runs, in order.

The trainer executes this table, `check` proves it, the trace viewer draws it. Microbatches and
stages: microbatches count from 1, stages from 0.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

from omni_contract.dataflow import Dataflow, Window


class OpKind(StrEnum):
    """What one operation of the table does."""

    LLM_FORWARD = "LF"
    LLM_BACKWARD = "LB"
    ENCODER_FORWARD = "EF"
    ENCODER_BACKWARD = "EB"

    @property
    def is_llm(self) -> bool:
        """Whether megatron's schedule runs it; encoder operations fill its slots."""
        return self in (OpKind.LLM_FORWARD, OpKind.LLM_BACKWARD)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on one microbatch."""

    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} {self.microbatch}"


OpTable = tuple[tuple[Op, ...], ...]
"""The ordered operations of each stage."""


def llm_ops(*, num_stages: int, num_microbatches: int, stage: int) -> list[Op]:
    """The LLM's operations of one stage in 1F1B order, as megatron-core runs them."""
    warmup = min(num_stages - 1 - stage, num_microbatches)
    ops = [Op(OpKind.LLM_FORWARD, k) for k in range(1, warmup + 1)]
    for backward in range(1, num_microbatches - warmup + 1):
        ops.append(Op(OpKind.LLM_FORWARD, warmup + backward))
        ops.append(Op(OpKind.LLM_BACKWARD, backward))
    cooldown = range(num_microbatches - warmup + 1, num_microbatches + 1)
    return ops + [Op(OpKind.LLM_BACKWARD, k) for k in cooldown]


def on_demand_dataflow(*, num_stages: int, num_microbatches: int) -> dict[str, Window]:
    """Uniform on-demand insertion (paper 4.2): stage s encodes e where (e - 1) mod p == s.

    The p encoder microbatches of round r = (e - 1) // p run at once, one a stage, as stage 0 is
    about to need the first of them. With a backward twice as long as a forward, stage s starts the
    forward of microbatch k one LLM forward per stage after stage 0 does, and a 1F1B cycle is three
    forwards long, so stage s encodes ceil(s / 3) cycles early. Stage 0 ends backward e (2s + 2) / 3
    cycles after stage s does: there the encoder backward stands. Both together keep at most two
    encoder microbatches alive on a stage.
    """
    last = num_microbatches
    flow: dict[str, Window] = {}
    for e in range(1, last + 1):
        round_, stage = divmod(e - 1, num_stages)
        before = max(1, round_ * num_stages + 1 - -(-stage // 3))
        after = min(last, e + -(-(2 * stage + 2) // 3) - 1)
        flow[str(e)] = (stage, [before - 1, before])
        flow[str(-e)] = (stage, [-after, -after - 1])
    return flow


def upfront_dataflow(*, num_stages: int, num_microbatches: int) -> dict[str, Window]:
    """The baseline: all encoder forwards before the first LLM microbatch, all backwards after the
    last. N / p encoder microbatches are alive on a stage."""
    flow: dict[str, Window] = {}
    for e in range(1, num_microbatches + 1):
        stage = (e - 1) % num_stages
        flow[str(e)] = (stage, [0, 1])
        flow[str(-e)] = (stage, [-num_microbatches, -num_microbatches - 1])
    return flow


def op_table(*, num_stages: int, num_microbatches: int, dataflow: Dataflow) -> OpTable:
    """Weave the encoder operations of a dataflow into each stage's LLM operations.

    A forward stands as late as its window allows, directly before the LLM forward that closes it; a
    backward as early as its window allows, directly after the LLM backward that opens it. Where
    both meet, the backward goes first, because it frees memory.
    """
    return tuple(
        _stage_ops(num_stages, num_microbatches, stage, dataflow) for stage in range(num_stages)
    )


def _stage_ops(
    num_stages: int, num_microbatches: int, stage: int, dataflow: Dataflow
) -> tuple[Op, ...]:
    before: defaultdict[int, list[Op]] = defaultdict(list)
    after: defaultdict[int, list[Op]] = defaultdict(list)
    for key, (pp_rank, (opens, closes)) in dataflow.items():
        e = int(key)
        if pp_rank != stage:
            continue
        if e > 0:
            before[closes].append(Op(OpKind.ENCODER_FORWARD, e))
        else:
            after[-opens].append(Op(OpKind.ENCODER_BACKWARD, -e))
    ops: list[Op] = []
    for op in llm_ops(num_stages=num_stages, num_microbatches=num_microbatches, stage=stage):
        if op.kind is OpKind.LLM_FORWARD:
            ops += sorted(before.pop(op.microbatch, []), key=_microbatch)
            ops.append(op)
        else:
            ops.append(op)
            ops += sorted(after.pop(op.microbatch, []), key=_microbatch)
    return tuple(ops)


def _microbatch(op: Op) -> int:
    return op.microbatch


def peak_live_encoders(ops: tuple[Op, ...]) -> int:
    """Most encoder microbatches of one stage alive at once, from forward to end of backward."""
    live = peak = 0
    for op in ops:
        if op.kind is OpKind.ENCODER_FORWARD:
            live += 1
            peak = max(peak, live)
        elif op.kind is OpKind.ENCODER_BACKWARD:
            live -= 1
    return peak
