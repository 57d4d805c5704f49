"""Properties of the whole sample plan: nothing lost, nothing twice, full, as mixed."""

import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from omni_contract.spec_data import MixtureStage
from omni_contract.spec_model import Modality
from omni_dataloader.sample_plan import (
    AHEAD_SEQUENCES,
    Ints,
    OutOfSamples,
    PlanState,
    SamplePlan,
    StepPlan,
)
from tests.dataloader.tables import (
    DEMO_MIXTURE,
    demo_tables,
    media_source,
    sample_plan,
    text_source,
)


def walk(plan: SamplePlan, num_steps: int) -> tuple[list[StepPlan], PlanState]:
    steps, state = [], plan.begin()
    for _ in range(num_steps):
        step, state = plan.step(state)
        steps.append(step)
    return steps, state


def fill_rate(steps: list[StepPlan]) -> float:
    return float(np.mean([step.pieces[:, 6].sum() / (16 * 512) for step in steps]))


def ints(low: int, high: int, size: int) -> Ints:
    return np.random.default_rng(1).integers(low, high, size).astype(np.int64)


def test_every_token_of_every_sample_is_planned_exactly_once_an_epoch() -> None:
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    steps, state = walk(plan, 200)
    tokens: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for step in steps:
        for _, source, epoch, index, first, _, count in step.pieces.tolist():
            tokens[source, epoch, index].append((first, count))
    for number, table in enumerate(plan.tables):
        epochs = int(state.cursors["epoch"][number])
        for epoch in range(epochs):  # finished epochs: each sample, whole
            seen = {row for s, e, row in tokens if (s, e) == (number, epoch)}
            assert seen == set(table.rows.tolist())
        unfinished = 0
        for (source, _, index), pieces in tokens.items():
            if source != number:
                continue
            end = 0
            for first, count in sorted(pieces):  # no gap, no overlap
                assert first == end
                end += count
            assert end <= table.tokens[index]
            unfinished += end < table.tokens[index]
        assert unfinished <= 1
    assert state.cursors["epoch"].max() >= 2


def test_sequences_are_full_and_pieces_do_not_overlap() -> None:
    steps, _ = walk(sample_plan(demo_tables(), DEMO_MIXTURE), 122)
    for step in steps:
        for sequence in range(16):
            pieces = step.pieces[step.pieces[:, 0] == sequence]
            ends = pieces[:, 5] + pieces[:, 6]
            assert (pieces[1:, 5] >= ends[:-1]).all() and ends.max(initial=0) <= 512
    assert fill_rate(steps) > 0.97
    assert min(fill_rate([step]) for step in steps) > 0.93


def test_media_alone_pack_well_without_texts_to_fill_gaps() -> None:
    tables = [t for t in demo_tables() if t.name != "books"]
    steps, _ = walk(sample_plan(tables), 100)
    assert fill_rate(steps) > 0.95


def test_token_shares_follow_the_weights() -> None:
    mixture = [
        MixtureStage.parse({"weights": {"pictures": 13, "drawings": 13, "speech": 61, "books": 13}})
    ]
    steps, _ = walk(sample_plan(demo_tables(), mixture), 100)
    total = sum(sum(step.tokens_by_source.values()) for step in steps)
    for name, weight in steps[0].weights.items():
        got = sum(step.tokens_by_source[name] for step in steps)
        assert abs(got - weight * total) <= AHEAD_SEQUENCES * 512 + 512
    late = steps[50:]  # and no source starves for a while
    assert min(step.tokens_by_source["drawings"] for step in late) > 300


def test_the_ramp_moves_the_shares_step_by_step() -> None:
    steps, _ = walk(sample_plan(demo_tables(), DEMO_MIXTURE), 122)
    weights = [step.weights["speech"] for step in steps]
    assert weights[0] == 0 and weights[-1] == pytest.approx(0.61, abs=0.03)
    assert weights == sorted(weights)
    assert steps[10].tokens_by_source["speech"] == 0
    shares = [step.tokens_by_source["speech"] / (16 * 512) for step in steps]
    assert np.mean(shares[-10:]) == pytest.approx(np.mean(weights[-10:]), abs=0.05)


def test_media_are_never_cut_and_long_texts_fill_whole_sequences() -> None:
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    steps, _ = walk(plan, 60)
    books = plan.names.index("books")
    whole = 0
    for step in steps:
        for _, source, _, index, first, _, count in step.pieces.tolist():
            if source == books:
                whole += count == 512
            else:
                assert first == 0 and count == plan.tables[source].tokens[index]
    assert whole > 20


def test_the_plan_is_a_pure_function_of_the_state() -> None:
    first, second = (sample_plan(demo_tables(), DEMO_MIXTURE) for _ in range(2))
    steps, _ = walk(first, 30)
    state = second.begin()
    for step in steps:
        second.step(state)  # asking twice, as a prefetch does, moves nothing
        again, state = second.step(state)
        assert (again.pieces == step.pieces).all()


def test_threads_may_draw_at_once() -> None:
    """A restart in place plans anew while a thread of the generation before still does."""
    plan = sample_plan([text_source("notes", np.arange(1, 60_001))])
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            drawn = list(
                threads.map(
                    lambda _: [plan.index_at(0, 0, at) for at in range(0, 60_000, 256)], range(16)
                )
            )
    finally:
        sys.setswitchinterval(switch_s)
    assert drawn == [drawn[0]] * 16 and len(set(drawn[0])) == len(drawn[0])


def test_a_small_source_repeats_in_a_new_order() -> None:
    tables = [media_source("few", Modality.IMAGE, ints(40, 60, 30), ints(3, 9, 30))]
    steps, state = walk(sample_plan(tables), 3)
    assert int(state.cursors["epoch"][0]) >= 3
    pieces = np.concatenate([step.pieces for step in steps])
    orders = [pieces[pieces[:, 2] == epoch][:, 3].tolist() for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(30))
    assert orders[0] != orders[1]


def test_a_source_that_stops_ends_the_data_after_its_last_sample() -> None:
    few = media_source("few", Modality.IMAGE, ints(40, 60, 300), ints(3, 9, 300), stop=True)
    plan = sample_plan([few, text_source("books", ints(500, 3000, 50))])
    state, steps = plan.begin(), []
    with pytest.raises(OutOfSamples, match=r"data\.sources\.few: all 300 samples"):
        while True:
            step, state = plan.step(state)
            steps.append(step)
    consumed = [
        index for step in steps for _, source, _, index, *_ in step.pieces.tolist() if source == 1
    ]
    assert sorted(consumed) == list(range(300))
    with pytest.raises(OutOfSamples):
        plan.step(state)


def test_a_source_that_stops_does_not_matter_once_its_weight_is_0() -> None:
    few = media_source("few", Modality.IMAGE, ints(40, 60, 40), ints(3, 9, 40), stop=True)
    mixture = [
        MixtureStage.parse({"until": 2000, "weights": {"few": 1}}),
        MixtureStage.parse({"weights": {"books": 1}}),
    ]
    _, state = walk(sample_plan([few, text_source("books", ints(50, 90, 50))], mixture), 10)
    assert state.next_step == 11


def test_one_document_longer_than_a_step_fills_steps_without_a_gap() -> None:
    steps, _ = walk(sample_plan([text_source("book", np.array([50_000]))]), 5)
    assert fill_rate(steps) == 1
