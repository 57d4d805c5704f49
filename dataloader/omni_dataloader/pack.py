"""Fill sequences of one fixed length: samples with media stay whole, texts are cut to fit.

Hybrid packing: every sequence has the same number of positions, whatever modalities share it, so
the language model's work is the same in each microbatch.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

PACK_VERSION = 1

MIN_PIECE_TOKENS = 32
"""A text is not cut to fill less than this: each cut costs the label of the piece's last token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a piece lies."""

    sequence: int
    start: int
    tokens: int


class Packer:
    """The sequences of one step while they are filled; empty at the step's begin."""

    def __init__(self, *, num_sequences: int, sequence_tokens: int) -> None:
        self._sequence_tokens = sequence_tokens
        # Ascending (room, sequence): the best fit is one bisection away.
        self._rooms = [(sequence_tokens, number) for number in range(num_sequences)]

    def place(self, tokens: int) -> Place | None:
        """Put a whole sample where it leaves the least room; None where it fits nowhere."""
        at = bisect_left(self._rooms, (tokens, -1))
        return self._take(at, tokens) if at < len(self._rooms) else None

    def place_text(self, tokens: int) -> Place | None:
        """Put what is left of a text, or as much of it as the largest room holds."""
        whole = self.place(tokens)
        if whole is not None:
            return whole
        room = self._rooms[-1][0]
        if room < min(MIN_PIECE_TOKENS, self._sequence_tokens):
            return None
        return self._take(bisect_left(self._rooms, (room, -1)), room)

    def _take(self, at: int, tokens: int) -> Place:
        room, number = self._rooms.pop(at)
        insort(self._rooms, (room - tokens, number))
        return Place(sequence=number, start=self._sequence_tokens - room, tokens=tokens)
