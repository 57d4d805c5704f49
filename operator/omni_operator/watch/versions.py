"""Which version of each object was seen last, so that old news changes nothing."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Final

_NUM_ENDED: Final = 20_000
"""Ended objects that are remembered: an answer to a write may come after the watch said that the
object is gone."""


class Versions:
    """Objects of one kind, by uid. Resource versions of one kind can be compared as numbers."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, uid: str) -> bool:
        return uid in self._seen

    def is_news(self, uid: str, version: str) -> bool:
        """Take note of an object. False where this version or a newer one was seen before, or its
        end."""
        number = int(version)
        if uid in self._ended or number <= self._seen.get(uid, -1):
            return False
        self._seen[uid] = number
        return True

    def is_older(self, uid: str, other: str) -> bool:
        """Whether an object was last seen before another one of its name, and so was before it."""
        return self._seen.get(uid, -1) < self._seen.get(other, -1)

    def end(self, uid: str) -> bool:
        """Take note of an object's end. False where it was not known."""
        self._ended[uid] = None
        if len(self._ended) > _NUM_ENDED:
            self._ended.popitem(last=False)
        return self._seen.pop(uid, None) is not None

    def missing_in(self, listed: Collection[str], version: str) -> Iterator[str]:
        """Objects that a complete listing should hold and does not: they ended unseen."""
        number = int(version)
        # One that is newer than the listing was made after it.
        yield from [uid for uid, seen in self._seen.items() if seen <= number and uid not in listed]
