"""Packing sizes into bins: best fit, exact where best fit fails, and the even split. Integers only.

Sizes are nodes of a unit, bins are free nodes of a domain.
"""

from bisect import bisect_left
from collections.abc import Sequence

_SEARCH_STEPS = 5_000
_SEARCH_SIZES = 200
"""Limits of the exact search. The units of a job nearly always have one size, for which best fit is
exact; only odd rank maps and repairs have several."""


def pack(sizes: Sequence[int], bins: Sequence[int]) -> list[int] | None:
    """The bin of each size, or None where they do not fit.

    Best fit, largest first: the fullest bin that still takes the size, so that large ones stay
    whole. Exact up to a search limit.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    chosen, left_over = fill(sizes, bins)
    if not left_over:
        return chosen
    if len(set(sizes)) == 1 or sum(sizes) > sum(bins) or len(sizes) > _SEARCH_SIZES:
        return None
    found = _Search(bins).run([sizes[i] for i in order])
    if found is None:
        return None
    for i, bin_ in zip(order, found, strict=True):
        chosen[i] = bin_
    return chosen


def fill(sizes: Sequence[int], bins: Sequence[int]) -> tuple[list[int], list[int]]:
    """Best fit that goes on where a size does not fit: the bin of each (-1: none), and the sizes
    left over by index, largest first."""
    # Free room as (room, bin), ascending: the first entry that is large enough is the best fit.
    room = sorted((free, i) for i, free in enumerate(bins))
    chosen = [-1] * len(sizes)
    left_over = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(room, (sizes[i], -1))
        if at == len(room):
            left_over.append(i)
            continue
        free, bin_ = room.pop(at)
        chosen[i] = bin_
        rest = (free - sizes[i], bin_)
        room.insert(bisect_left(room, rest), rest)
    return chosen, left_over


def pack_most(sizes: Sequence[int], bins: Sequence[int]) -> list[int]:
    """Pack as many of the sizes as fit; -1 marks those that do not.

    If any k sizes fit then the k smallest do, so the search is over k.
    """
    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    best: list[int] = []
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high + 1) // 2
        packed = pack([sizes[i] for i in order[:middle]], bins)
        if packed is None:
            high = middle - 1
        else:
            low, best = middle, packed
    chosen = [-1] * len(sizes)
    for i, bin_ in zip(order, best, strict=False):  # the rest stays unplaced
        chosen[i] = bin_
    return chosen


def split_evenly(size: int, bins: Sequence[int]) -> dict[int, int]:
    """Share of each bin used for a size that no bin takes: fewest bins, as even as possible.

    Where the even shares fit, each takes the fullest bin it fits in; else the largest bins are
    filled level. The bins must have room for the size.
    """
    by_room = sorted(range(len(bins)), key=lambda i: (-bins[i], i))
    num_bins = room = 0
    while room < size:
        room += bins[by_room[num_bins]]
        num_bins += 1
    share, larger = divmod(size, num_bins)
    quotas = [share + 1] * larger + [share] * (num_bins - larger)
    chosen, left_over = _one_each(quotas, bins)
    if not left_over:
        return {bin_: quotas[i] for i, bin_ in enumerate(chosen)}
    shares: dict[int, int] = {}
    for k, bin_ in enumerate(reversed(by_room[:num_bins])):  # the smallest first
        shares[bin_] = min(bins[bin_], size // (num_bins - k))
        size -= shares[bin_]
    return shares


def _one_each(quotas: list[int], bins: Sequence[int]) -> tuple[list[int], bool]:
    """The fullest bin for each quota (largest first), no bin twice; whether any was left over."""
    room = sorted((free, i) for i, free in enumerate(bins))
    chosen: list[int] = []
    for quota in quotas:
        at = bisect_left(room, (quota, -1))
        if at == len(room):
            return chosen, True
        chosen.append(room.pop(at)[1])
    return chosen, False


class _Search:
    """Depth-first bin packing with equal bins and hopeless states cut."""

    def __init__(self, bins: Sequence[int]) -> None:
        self._room = list(bins)
        self._steps = 0
        self._hopeless: set[tuple[int, tuple[int, ...]]] = set()

    def run(self, sizes: list[int]) -> list[int] | None:
        """The bin of each size (largest first), or None: there is none, or the limit is met."""
        chosen: list[int] = []
        return chosen if self._place(sizes, chosen) else None

    def _place(self, sizes: list[int], chosen: list[int]) -> bool:
        at = len(chosen)
        if at == len(sizes):
            return True
        state = (at, tuple(sorted(self._room)))
        self._steps += 1
        if state in self._hopeless or self._steps > _SEARCH_STEPS:
            return False
        tried = set()
        for bin_ in sorted(range(len(self._room)), key=lambda i: self._room[i]):
            room = self._room[bin_]
            if room < sizes[at] or room in tried:
                continue
            tried.add(room)
            self._room[bin_] -= sizes[at]
            chosen.append(bin_)
            if self._place(sizes, chosen):
                return True
            chosen.pop()
            self._room[bin_] = room
        self._hopeless.add(state)
        return False
