"""Optimizer state that is spread over ranks (ZeRO-1), joined anew for another number of replicas.

Pure: knows nothing of megatron, nor of where saved state lies.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from omni_contract.errors import OmniError
from omni_contract.topology import Layout
from omni_trainer.multiplex.tensors import copy_tensors

_KEY = re.compile(r"(?P<name>.+)\[(?P<start>\d+):(?P<end>\d+)\]")


def shard_key(name: str, start: int, end: int) -> str:
    """How a shard is called where it is saved: a parameter and its range in the flat values."""
    return f"{name}[{start}:{end}]"


class ShardFiller:
    """Fills the shard of one parameter from saved ones, whichever ranges those have."""

    def __init__(self, name: str, start: int, end: int, tensors: Mapping[str, Tensor]) -> None:
        self._name = name
        self._start = start
        self._tensors = tensors
        self._gaps = [(start, end)]

    @property
    def missing(self) -> str | None:
        """A range that was in no saved shard so far; None: all is there."""
        return shard_key(self._name, *self._gaps[0]) if self._gaps else None

    def take(self, start: int, end: int, saved: Mapping[str, Tensor], *, where: str) -> bool:
        """Copy from the saved shard [start:end] what is missing; whether anything was."""
        gaps = []
        for low, high in self._gaps:
            first, last = max(low, start), min(high, end)
            if first >= last:
                gaps.append((low, high))
                continue
            copy_tensors(
                {n: t[first - self._start : last - self._start] for n, t in self._tensors.items()},
                {n: saved[n][first - start : last - start] for n in self._tensors},
                where=f"{where}: {shard_key(self._name, start, end)}",
            )
            gaps += [(a, b) for a, b in ((low, first), (last, high)) if a < b]
        was_taken = gaps != self._gaps
        self._gaps = gaps
        return was_taken


def by_name(
    shards: Mapping[str, Mapping[str, Any]], *, where: str
) -> dict[str, list[tuple[int, int, Mapping[str, Any]]]]:
    """Saved shards by parameter, each with its range. Raises OmniError for a wrong key."""
    found: dict[str, list[tuple[int, int, Mapping[str, Any]]]] = {}
    for key, value in shards.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise OmniError(f"{where}: {key!r} is no shard of a parameter; restore the checkpoint")
        place = (int(match["start"]), int(match["end"]), value)
        found.setdefault(match["name"], []).append(place)
    return found


def donors(rank: int, layout: Layout, saved_by: Layout) -> list[int]:
    """All ranks of another layout, those first that hold what `rank` of `layout` needs.

    State of a stage lies evenly over its replicas, that of the encoders over the world. Padding
    moves the bounds a little, so those that come next may be needed, too.
    """
    coords = layout.coords(rank)

    def place(other: int) -> tuple[float, int]:
        there = saved_by.coords(other)
        apart = _apart(rank, layout.world_size, other, saved_by.world_size)
        if there.pp_rank == coords.pp_rank:
            in_stage = _apart(coords.dp_rank, layout.dp_size, there.dp_rank, saved_by.dp_size)
            apart = min(apart, in_stage)
        return apart, abs(other - rank)

    return sorted(range(saved_by.world_size), key=place)


def _apart(part: int, num_parts: int, other: int, num_others: int) -> float:
    """How far two parts of the same whole lie from each other; 0 where they touch."""
    after = other / num_others - (part + 1) / num_parts
    before = part / num_parts - (other + 1) / num_others
    return max(0.0, after, before)
