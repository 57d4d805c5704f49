"""The order in which a source's samples are drawn: a permutation that needs no memory.

Keyed by (seed, source name, epoch) and computed with integers alone, so it is the same on every
machine, for every number of ranks, and any position of any epoch can be asked for at once.
"""

import hashlib
import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

DRAW_VERSION = 1
_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """A permutation of 0..size-1 with random access.

    A Feistel network over pairs (left, right) of base `side`, the smallest square that holds
    `size`; a result outside is sent through again (cycle walking), which is seldom needed as
    side**2 is at most size + 2 * sqrt(size).
    """

    size: int
    keys: tuple[int, ...]
    """One 64-bit key a round."""

    @classmethod
    def of(cls, size: int, *, seed: int, source: str, epoch: int) -> Self:
        """The order of one epoch of one source."""
        name = f"omni-draw-{DRAW_VERSION}:{seed}:{epoch}:{source}".encode()
        digest = hashlib.blake2b(name, digest_size=8 * _ROUNDS).digest()
        return cls(size=size, keys=tuple(int(k) for k in np.frombuffer(digest, "<u8")))

    def at(self, positions: Ints) -> Ints:
        """The elements at these positions."""
        values = np.asarray(positions).astype(np.uint64)
        values = self._once(values)
        while True:
            outside = np.flatnonzero(values >= self.size)
            if not len(outside):
                return values.astype(np.int64)
            values[outside] = self._once(values[outside])

    def _once(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        side = np.uint64(math.isqrt(self.size - 1) + 1)
        left, right = np.divmod(values, side)
        for key in self.keys:
            left, right = right, (left + _mix(right, key) % side) % side
        return left * side + right


def _mix(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every input bit moves every output bit."""
    x = values ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
