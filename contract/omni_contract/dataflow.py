"""The dataflow: on which stage, and between which LLM microbatches, each encoder microbatch runs.

Written as in the paper: {"5": (0, [4, 5])} runs the forward of encoder microbatch 5 on stage 0
after LLM microbatch 4 and before 5; {"-5": (0, [-5, -6])} runs its backward after the backward of
LLM microbatch 5 and before that of 6. Microbatches count from 1; 0 and num_microbatches + 1 (and
their negatives) stand for the ends of the schedule.
"""

from collections.abc import Mapping

Window = tuple[int, list[int]]
Dataflow = Mapping[str, Window]


def stage_of(dataflow: Dataflow, microbatch: int) -> int:
    """The pipeline stage that encodes a microbatch."""
    return dataflow[str(microbatch)][0]


def encoded_by(dataflow: Dataflow, stage: int) -> list[int]:
    """The microbatches that a stage encodes, ascending."""
    return sorted(int(key) for key, (pp, _) in dataflow.items() if pp == stage and int(key) > 0)
