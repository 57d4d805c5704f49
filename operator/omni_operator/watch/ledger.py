"""What is taken on each node, kept up to date claim by claim. Knows neither pods nor jobs."""

from collections.abc import Iterator, Mapping
from typing import Final

_NOTHING: Final[Mapping[str, int]] = {}
_PLAIN: Final = ""
"""Stands for the resource of a claim that asks for none: so many share the node."""


class Ledger:
    """Sums of claims by node, in all and by owner."""

    def __init__(self) -> None:
        self._total: dict[str, dict[str, int]] = {}
        self._by_owner: dict[str, dict[str, dict[str, int]]] = {}

    def add(self, owner: str | None, node: str, resources: Mapping[str, int]) -> None:
        """Enter a claim. One of an owner that asks for no resource counts as an occupant."""
        self._change(owner, node, resources, 1)

    def remove(self, owner: str | None, node: str, resources: Mapping[str, int]) -> None:
        """Take out a claim that was entered with the same words."""
        self._change(owner, node, resources, -1)

    def used_without(self, owner: str) -> Mapping[str, Mapping[str, int]]:
        """Resources taken on each node by all but one owner. Live: it follows later changes."""
        return _Used(self._total, self._by_owner, owner)

    def occupied_without(self, owner: str) -> Mapping[str, int]:
        """Occupants of each node but those of one owner. Live: it follows later changes."""
        return _Occupied(self._total, self._by_owner, owner)

    def owners_on(self, node: str) -> list[str]:
        """Owners of claims on a node."""
        return [owner for owner, nodes in self._by_owner.items() if node in nodes]

    def _change(
        self, owner: str | None, node: str, resources: Mapping[str, int], sign: int
    ) -> None:
        if not resources:
            if owner is None:
                return
            resources = {_PLAIN: 1}
        _sum(self._total, node, resources, sign)
        if owner is not None:
            own = self._by_owner.setdefault(owner, {})
            _sum(own, node, resources, sign)
            if not own:
                del self._by_owner[owner]


def _sum(
    sums: dict[str, dict[str, int]], node: str, resources: Mapping[str, int], sign: int
) -> None:
    on_node = sums.setdefault(node, {})
    for name, count in resources.items():
        left = on_node.get(name, 0) + sign * count
        if left:
            on_node[name] = left
        else:
            on_node.pop(name, None)
    if not on_node:
        del sums[node]


class _Used(Mapping[str, Mapping[str, int]]):
    """A difference that is worked out node by node as it is asked for: jobs look at few nodes of
    many, and often."""

    __slots__ = ("_by_owner", "_owner", "_total")

    def __init__(
        self,
        total: Mapping[str, Mapping[str, int]],
        by_owner: Mapping[str, Mapping[str, Mapping[str, int]]],
        owner: str,
    ) -> None:
        self._total, self._by_owner, self._owner = total, by_owner, owner

    def __getitem__(self, node: str) -> Mapping[str, int]:
        found = self._total[node]
        own = self._by_owner.get(self._owner, {}).get(node, _NOTHING)
        return {
            name: count - own.get(name, 0)
            for name, count in found.items()
            if name != _PLAIN and count != own.get(name, 0)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._total)

    def __len__(self) -> int:
        return len(self._total)


class _Occupied(Mapping[str, int]):
    """As `_Used`, of the claims without resources."""

    __slots__ = ("_by_owner", "_owner", "_total")

    def __init__(
        self,
        total: Mapping[str, Mapping[str, int]],
        by_owner: Mapping[str, Mapping[str, Mapping[str, int]]],
        owner: str,
    ) -> None:
        self._total, self._by_owner, self._owner = total, by_owner, owner

    def __getitem__(self, node: str) -> int:
        own = self._by_owner.get(self._owner, {}).get(node, _NOTHING)
        return self._total[node].get(_PLAIN, 0) - own.get(_PLAIN, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(self._total)

    def __len__(self) -> int:
        return len(self._total)
