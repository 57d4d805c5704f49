"""Deal the packed sequences of a step to replicas and microbatches.

Replicas of one reorder group exchange whole sequences among themselves, nothing else moves: the
language model's cost is the same for each sequence, so only the encoders' is balanced. This is
the first place where the topology enters the sample plan.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

REORDER_VERSION = 1


def deal(
    costs: Ints,
    *,
    num_replicas: int,
    microbatch_sequences: int,
    group_replicas: int,
    algorithm: Literal["identity"],
) -> Ints:
    """Sequence numbers by [replica, microbatch, sequence in it]; each sequence exactly once.

    `costs` holds the encoder cost of each sequence in the order packed. identity: in that order,
    microbatch by microbatch over all replicas, so that every replica gets early and late ones.
    """
    per_round = num_replicas * microbatch_sequences
    if len(costs) % per_round or num_replicas % group_replicas:
        raise ValueError(
            f"{len(costs)} sequences do not deal to {num_replicas} replicas in groups of "
            f"{group_replicas}, {microbatch_sequences} a microbatch"
        )
    order: dict[str, Ints] = {"identity": np.arange(len(costs), dtype=np.int64)}
    by_round = order[algorithm].reshape(-1, num_replicas, microbatch_sequences)
    return by_round.transpose(1, 0, 2).copy()
