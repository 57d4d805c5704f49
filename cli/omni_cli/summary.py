"""What a run did, in numbers: computed from the records in its folder. Pure.

A step that was done again after a restart has several records; the one of the highest (attempt,
generation) is the final one, and the final ones in order are the history of the model that came
out.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_contract.records import ConsumedRecord, ConsumedSample, RunEvent, StepRecord
from omni_contract.spec_model import Modality

NUM_ENDS = 10
"""Steps at either end of a run over which a loss is averaged."""

Pair = tuple[int, int]
"""(attempt, generation)."""

Piece = tuple[str, int, int, int, int]
"""(source, epoch, index, first token, number of tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of an incident."""

    name: str
    begin_s: float
    """Seconds since the fault."""
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A fault and how the run came back from it."""

    time_s: float
    """Unix time of the fault."""
    step: int
    """Last step finished before it."""
    pair: Pair
    """The generation it ended."""
    message: str
    stages: Sequence[Stage]
    resume_s: float | None
    """Seconds from the fault to the end of the first step after it; None: no step came after."""
    replayed_steps: int
    """Steps done again because they came after the checkpoint."""


def pair_of(record: StepRecord | ConsumedRecord | RunEvent) -> Pair:
    """The (attempt, generation) that wrote a record."""
    return record.attempt, record.generation


def final_steps(records: Iterable[StepRecord]) -> list[StepRecord]:
    """The final record of each step, by step."""
    final: dict[int, StepRecord] = {}
    for record in records:
        known = final.get(record.step)
        if known is None or pair_of(record) >= pair_of(known):
            final[record.step] = record
    return [final[step] for step in sorted(final)]


def final_samples(records: Sequence[ConsumedRecord]) -> dict[int, list[ConsumedSample]]:
    """All pieces consumed by the final doing of each step, over all ranks, by step."""
    newest: dict[int, Pair] = {}
    for record in records:
        newest[record.step] = max(newest.get(record.step, (-1, -1)), pair_of(record))
    final: dict[int, list[ConsumedSample]] = {step: [] for step in sorted(newest)}
    for record in records:
        if pair_of(record) == newest[record.step]:
            final[record.step] += record.samples
    return final


def piece_of(sample: ConsumedSample) -> Piece:
    """What makes a consumed piece that piece."""
    return (
        sample.source, sample.epoch, sample.index, sample.first_token, sample.num_tokens,
    )  # fmt: skip


def repeated_and_lost(
    consumed: Mapping[int, Sequence[ConsumedSample]], planned: Mapping[int, Sequence[Piece]]
) -> tuple[int, int]:
    """Pieces consumed more often than planned, and pieces planned but never consumed.

    An epoch is part of a piece, so a sample that comes again in the next epoch is no repetition.
    """
    taken = Counter(piece_of(sample) for samples in consumed.values() for sample in samples)
    wanted = Counter(piece for pieces in planned.values() for piece in pieces)
    return (taken - wanted).total(), (wanted - taken).total()


def mean_losses(steps: Sequence[StepRecord]) -> dict[str, float | None]:
    """Loss per loss token over some steps, for all samples and by kind of sample."""
    means: dict[str, float | None] = {}
    for kind in Modality:
        sums = [step.loss_by[kind] for step in steps if kind in step.loss_by]
        tokens = sum(one.tokens for one in sums)
        means[kind] = sum(one.loss for one in sums) / tokens if tokens else None
    counts = [sum(one.tokens for one in step.loss_by.values()) for step in steps]
    total = sum(counts)
    weighted = sum(step.loss * count for step, count in zip(steps, counts, strict=True))
    means["all"] = weighted / total if total else None
    return means


def end_losses(
    steps: Sequence[StepRecord],
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """The losses of the first and the last `NUM_ENDS` steps that contain each kind of sample."""
    first, last = mean_losses(steps[:NUM_ENDS]), mean_losses(steps[-NUM_ENDS:])
    for kind in Modality:
        holding = [s for s in steps if kind in s.loss_by and s.loss_by[kind].tokens]
        first[kind] = mean_losses(holding[:NUM_ENDS])[kind]
        last[kind] = mean_losses(holding[-NUM_ENDS:])[kind]
    return first, last


def num_restarts(events: Iterable[RunEvent], records: Iterable[StepRecord]) -> int:
    """Generations after the first one, over all attempts."""
    pairs = {pair_of(event) for event in events} | {pair_of(record) for record in records}
    return max(0, len(pairs) - 1)


def incidents(events: Sequence[RunEvent], records: Sequence[StepRecord]) -> list[Incident]:
    """The faults of a run in order, each with the stages up to where it had been before."""
    faults: dict[Pair, RunEvent] = {}
    for event in sorted(events, key=lambda e: e.time_s):
        if event.kind == "fault":
            faults.setdefault(pair_of(event), event)
    return [_incident(fault, events, records) for _, fault in sorted(faults.items())]


def _incident(
    fault: RunEvent, events: Sequence[RunEvent], records: Sequence[StepRecord]
) -> Incident:
    pair, begin = pair_of(fault), _struck(fault, events)
    before = [r for r in records if pair_of(r) <= pair]
    after = sorted((r for r in records if pair_of(r) > pair), key=lambda r: r.time_s)
    reached = max((r.step for r in before), default=0)
    first_step = after[0].time_s if after else None
    new_step = next((r.time_s for r in after if r.step > reached), None)
    marks = [
        ("noticed", fault.time_s if fault.time_s > begin else None),
        ("restart decided", _first(events, begin, "restart")),
        ("checkpoint restored", _first(events, begin, "resumed", newer_than=pair)),
        ("first step done", first_step),
        ("lost steps done again", new_step),
    ]
    return Incident(
        time_s=begin,
        step=reached,
        pair=pair,
        message=fault.message,
        stages=_stages(begin, marks),
        resume_s=None if first_step is None else first_step - begin,
        replayed_steps=sum(
            1 for r in after if r.step <= reached and pair_of(r) == pair_of(after[0])
        ),
    )


def _struck(fault: RunEvent, events: Sequence[RunEvent]) -> float:
    """When the fault happened: known where it was rehearsed, else when it was seen."""
    times = [
        e.time_s
        for e in events
        if e.kind == "rehearsed_fault"
        and pair_of(e) == pair_of(fault)
        and e.time_s <= fault.time_s
        and not e.message.startswith("kill-sidecar")  # cured within the generation
    ]
    return max(times, default=fault.time_s)


def _first(
    events: Sequence[RunEvent], begin: float, kind: str, *, newer_than: Pair = (-1, -1)
) -> float | None:
    found = (
        e.time_s for e in events if e.kind == kind and e.time_s >= begin and pair_of(e) > newer_than
    )
    return min(found, default=None)


def _stages(begin: float, marks: Sequence[tuple[str, float | None]]) -> list[Stage]:
    """The time between each mark and the one before, marks that were not seen left out."""
    stages: list[Stage] = []
    last = 0.0
    for name, time_s in marks:
        if time_s is not None and time_s - begin >= last:
            stages.append(Stage(name=name, begin_s=last, end_s=time_s - begin))
            last = time_s - begin
    return stages


def summarize(
    *,
    records: Sequence[StepRecord],
    events: Sequence[RunEvent],
    consumed: Sequence[ConsumedRecord],
    planned: Mapping[int, Sequence[Piece]] | None,
) -> dict[str, Any]:
    """The content of summary.json. `planned`: the sample plan by step; None where it is unknown."""
    steps = final_steps(records)
    first, last = end_losses(steps)
    repeated: int | None = None
    lost: int | None = None
    if planned is not None:
        repeated, lost = repeated_and_lost(final_samples(consumed), planned)
    tokens = Counter[str]()
    for step in steps:
        tokens.update({str(kind): count for kind, count in step.tokens_by_modality.items()})
    resumes = [i.resume_s for i in incidents(events, records) if i.resume_s is not None]
    return {
        "steps": len(steps),
        "first_loss": first,
        "last_loss": last,
        "restarts": num_restarts(events, records),
        "samples_repeated": repeated,
        "samples_lost": lost,
        "tokens_per_modality": {str(kind): tokens[str(kind)] for kind in Modality},
        "max_live_encoder_microbatches": max(
            (step.max_live_encoder_microbatches for step in steps), default=0
        ),
        "seconds_to_resume": max(resumes, default=None),
    }
