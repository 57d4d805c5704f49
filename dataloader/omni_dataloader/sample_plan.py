"""The plan of a step: which samples, how packed. A pure function of the state before it.

No clock, no network, no topology: every sidecar computes the same step alone, and a state taken
in one layout of ranks goes on in another. Draw, mix and pack meet here; the ranks enter in
`place_step`, after them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omni_contract.errors import OmniError
from omni_contract.plan import JobPlan
from omni_contract.spec_data import MixtureStage
from omni_contract.spec_model import Modality
from omni_dataloader.draw import Permutation
from omni_dataloader.mix import SCALE, by_need, charge, shares_of, weights_at
from omni_dataloader.pack import Packer, Place
from omni_dataloader.reorder import deal

Ints = NDArray[np.int64]

AHEAD_SEQUENCES = 4
"""A source may fill gaps until it is this many sequences ahead of the one most behind; further,
full sequences are not worth a bent mixture."""

_BLOCK = 256  # positions drawn at once; a matter of speed alone

CURSOR = np.dtype(
    [
        ("epoch", "<i8"),
        ("position", "<i8"),
        ("offset", "<i8"),
        ("planned", "<i8"),
        ("credit", "<i8"),
    ]
)
"""Where a source stands: epoch, samples of it drawn, tokens already planned of the next sample (a
text that was cut), tokens planned since the beginning, credit (see `mix.charge`)."""

PIECES = ("sequence", "source", "epoch", "index", "first_token", "start", "tokens")
"""Columns of `StepPlan.pieces`; `start` counts from the sequence's begin."""


class OutOfSamples(OmniError):
    """A source with whenExhausted: stop has no sample left for the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTable:
    """One modality of every sample of a source. Arrays have one entry a sample."""

    modality: Modality
    first: Ints
    """Position in the sample of its first language model token."""
    tokens: Ints
    """Language model tokens."""
    units: Ints
    """Patches or frames the encoder gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTable:
    """What the plan knows of a source. Arrays have one entry a sample."""

    name: str
    fingerprint: str
    """Identity of samples and lengths: equal exactly when the plan would be."""
    rows: Ints
    """Samples that are drawn: those that fit into a sequence."""
    tokens: Ints
    """Tokens of the whole sample, media and end token included."""
    media: Sequence[MediaTable]
    """In template order; none: a text, which may be cut."""
    cost: Ints
    """Modelled work of its encoders."""
    stop: bool
    """End the data after one epoch instead of starting the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanState:
    """The state before a step. Arrays of references, never samples."""

    next_step: int
    cursors: NDArray[np.void]
    """One CURSOR a source, by sorted name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The packed sequences of one step, for any topology."""

    step: int
    pieces: Ints
    """[n, 7], columns PIECES; ascending by sequence, then by start."""
    weights: Mapping[str, float]
    """Mixture weights in force."""
    tokens_by_source: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """One LLM microbatch of one replica, arrays as in omni_contract.wire."""

    replica: int
    index: int
    samples: Ints
    spans: Ints


class SamplePlan:
    """The function from the state before a step to its plan and the state after it."""

    def __init__(
        self,
        tables: Sequence[SourceTable],
        *,
        mixture: Sequence[MixtureStage],
        seed: int,
        global_sequences: int,
        sequence_tokens: int,
        total_tokens: int,
    ) -> None:
        self.tables = tuple(sorted(tables, key=lambda table: table.name))
        self.names = [table.name for table in self.tables]
        self._mixture = mixture
        self._seed = seed
        self._global_sequences = global_sequences
        self._sequence_tokens = sequence_tokens
        self._total_tokens = total_tokens
        # A cache that threads may share: planning for an older pair may still be under way.
        self._block = lru_cache(maxsize=2 * len(self.tables))(self._draw_block)

    def begin(self) -> PlanState:
        """The state before step 1."""
        return PlanState(next_step=1, cursors=np.zeros(len(self.tables), CURSOR))

    def step(self, state: PlanState) -> tuple[StepPlan, PlanState]:
        """Plan one step. Raises OutOfSamples where the data has ended before it."""
        planned = int(state.cursors["planned"].sum())
        weights = weights_at(self._mixture, self.names, planned=planned, total=self._total_tokens)
        shares = shares_of(weights)
        cursors = [
            _Cursor(self, number, record) for number, record in enumerate(state.cursors.tolist())
        ]
        for cursor, share in zip(cursors, shares, strict=True):
            if share and cursor.is_exhausted:
                raise OutOfSamples(
                    f"data.sources.{cursor.table.name}: all {len(cursor.table.rows)} samples are "
                    "consumed and whenExhausted is stop"
                )
        pieces = self._fill(cursors, shares)
        step_plan = StepPlan(
            step=state.next_step,
            pieces=_sorted(np.array(pieces, dtype=np.int64).reshape(-1, len(PIECES))),
            weights=weights,
            tokens_by_source={
                cursor.table.name: cursor.planned - int(before)
                for cursor, before in zip(cursors, state.cursors["planned"], strict=True)
            },
        )
        after = np.array([cursor.record() for cursor in cursors], CURSOR)
        return step_plan, PlanState(next_step=state.next_step + 1, cursors=after)

    def _fill(self, cursors: list["_Cursor"], shares: list[int]) -> list[tuple[int, ...]]:
        packer = Packer(num_sequences=self._global_sequences, sequence_tokens=self._sequence_tokens)
        ahead = AHEAD_SEQUENCES * self._sequence_tokens * SCALE
        pieces: list[tuple[int, ...]] = []
        credits = [cursor.credit for cursor in cursors]
        placed = True
        while placed:
            placed = False
            order = by_need(credits, shares)
            for number in order:
                if credits[order[0]] - credits[number] > ahead:
                    break
                cursor = cursors[number]
                place = None if cursor.is_exhausted else cursor.fit(packer)
                if place is not None:
                    pieces.append(cursor.take(place))
                    charge(credits, shares, source=number, tokens=place.tokens)
                    placed = True
                    break
        for cursor, credit in zip(cursors, credits, strict=True):
            cursor.credit = credit
        return pieces

    def index_at(self, source: int, epoch: int, position: int) -> int:
        """The sample at a position of an epoch."""
        block, within = divmod(position, _BLOCK)
        return int(self._block(source, epoch, block)[within])

    def _draw_block(self, source: int, epoch: int, block: int) -> Ints:
        table = self.tables[source]
        order = Permutation.of(len(table.rows), seed=self._seed, source=table.name, epoch=epoch)
        stop = min(len(table.rows), (block + 1) * _BLOCK)
        return table.rows[order.at(np.arange(block * _BLOCK, stop))]


class _Cursor:
    """A source while a step is planned."""

    def __init__(self, plan: SamplePlan, number: int, record: tuple[int, ...]) -> None:
        self._plan = plan
        self._number = number
        self.table = plan.tables[number]
        self._epoch, self._position, self._offset, self.planned, self.credit = record
        self._index = -1  # of the next sample, once it is known

    @property
    def is_exhausted(self) -> bool:
        """Whether no sample is left."""
        return self.table.stop and self._epoch > 0

    def fit(self, packer: Packer) -> Place | None:
        """Try to place the next sample, or what is left of a text."""
        if self._index < 0:
            self._index = self._plan.index_at(self._number, self._epoch, self._position)
        tokens = int(self.table.tokens[self._index])
        if self.table.media:
            return packer.place(tokens)
        return packer.place_text(tokens - self._offset)

    def take(self, place: Place) -> tuple[int, ...]:
        """The piece that was placed; the next one begins behind it."""
        piece = (
            place.sequence, self._number, self._epoch, self._index, self._offset, place.start,
            place.tokens,
        )  # fmt: skip
        self.planned += place.tokens
        self._offset += place.tokens
        if self._offset == self.table.tokens[self._index]:
            self._offset, self._index = 0, -1
            self._position += 1
            if self._position == len(self.table.rows):
                self._epoch, self._position = self._epoch + 1, 0
        return piece

    def record(self) -> tuple[int, ...]:
        """The CURSOR."""
        return (self._epoch, self._position, self._offset, self.planned, self.credit)


def _sorted(pieces: Ints) -> Ints:
    return pieces[np.lexsort((pieces[:, 5], pieces[:, 0]))]


def place_step(
    step_plan: StepPlan, tables: Sequence[SourceTable], plan: JobPlan
) -> dict[tuple[int, int], MicrobatchPlan]:
    """Deal the sequences of a step to (replica, microbatch); microbatches count from 1."""
    batch = plan.spec.batch
    by_sequence: list[list[list[int]]] = [[] for _ in range(batch.global_sequences)]
    costs = np.zeros(batch.global_sequences, np.int64)
    for piece in step_plan.pieces.tolist():
        by_sequence[piece[0]].append(piece[1:])
        costs[piece[0]] += tables[piece[1]].cost[piece[3]]
    order = deal(
        costs,
        num_replicas=plan.layout.dp_size,
        microbatch_sequences=batch.microbatch_sequences,
        group_replicas=plan.spec.data.reorder.group_replicas,
        algorithm=plan.spec.data.reorder.algorithm,
    )
    placed: dict[tuple[int, int], MicrobatchPlan] = {}
    for replica, microbatches in enumerate(order.tolist()):
        for index, sequences in enumerate(microbatches, start=1):
            samples = [
                [source, epoch, row, first, start + slot * batch.sequence_tokens, tokens]
                for slot, sequence in enumerate(sequences)
                for source, epoch, row, first, start, tokens in by_sequence[sequence]
            ]
            placed[replica, index] = MicrobatchPlan(
                replica=replica,
                index=index,
                samples=np.array(samples, np.int64).reshape(-1, 6),
                spans=_spans(samples, tables),
            )
    return placed


def _spans(samples: list[list[int]], tables: Sequence[SourceTable]) -> Ints:
    spans = [
        (
            row, media.modality.number, start + int(media.first[index]), int(media.tokens[index]),
            int(media.units[index]), 0,
        )
        for row, (source, _, index, _, start, _) in enumerate(samples)
        for media in tables[source].media
    ]  # fmt: skip
    return np.array(spans, np.int64).reshape(-1, 6)
