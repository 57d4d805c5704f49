"""The numbers of a run follow from its records alone, whatever was done twice."""

import pytest

from omni_cli.summary import (
    end_losses,
    final_samples,
    final_steps,
    incidents,
    num_restarts,
    repeated_and_lost,
    summarize,
)
from omni_contract.records import ConsumedRecord
from tests.cli.runs import (
    DETECT_S,
    KILLED_AFTER,
    NOTICE_S,
    RESTORE_S,
    RESUMED_FROM,
    STEP_S,
    consumed_records,
    killed_run,
    planned,
    step_record,
)


def consumed(*steps: tuple[int, int]) -> list[ConsumedRecord]:
    """Records of (step, generation) pairs."""
    return [r for step, generation in steps for r in consumed_records(step, generation=generation)]


def test_a_step_done_again_counts_once_and_the_newest_doing_counts() -> None:
    steps, _ = killed_run()
    final = final_steps(steps)
    assert [s.step for s in final] == list(range(1, 31))
    assert {s.step: s.generation for s in final}[RESUMED_FROM] == 0
    assert {s.step: s.generation for s in final}[RESUMED_FROM + 1] == 1
    assert final_steps(reversed(steps)) == final


def test_an_exact_resume_repeats_and_loses_nothing() -> None:
    records = consumed((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 1))
    assert repeated_and_lost(final_samples(records), planned(4)) == (0, 0)


def test_a_step_that_was_left_out_is_lost() -> None:
    records = consumed((1, 0), (2, 0), (4, 1))
    assert repeated_and_lost(final_samples(records), planned(4)) == (0, 4)


def test_a_rank_that_consumed_the_samples_of_another_step_repeats_and_loses() -> None:
    shifted = [r.model_copy(update={"step": 3}) for r in consumed_records(2, generation=1)]
    records = consumed((1, 0), (2, 0)) + shifted
    assert repeated_and_lost(final_samples(records), planned(3)) == (4, 4)


def test_one_rank_missing_from_the_final_doing_is_lost() -> None:
    records = consumed((1, 0)) + consumed_records(1, generation=1)[:1]
    assert repeated_and_lost(final_samples(records), planned(1)) == (0, 2)


def test_the_next_epoch_is_no_repetition() -> None:
    def of_epoch(epoch: int) -> list[ConsumedRecord]:
        return [
            r.model_copy(
                update={
                    "step": 1 + epoch,
                    "samples": [s.model_copy(update={"epoch": epoch}) for s in r.samples],
                }
            )
            for r in consumed_records(1)
        ]

    wanted = {1 + e: [("books", e, 4 + i, 0, 500) for i in range(4)] for e in (0, 1)}
    assert repeated_and_lost(final_samples(of_epoch(0) + of_epoch(1)), wanted) == (0, 0)
    wanted[2] = wanted[1]
    assert repeated_and_lost(final_samples(of_epoch(0) + of_epoch(1)), wanted) == (4, 4)


def test_losses_are_means_over_loss_tokens_of_the_ends() -> None:
    first, last = end_losses(final_steps(killed_run()[0]))
    # Text is in every step: steps 1..10 and 21..30 of 8 - 0.1 step.
    assert first["text"] == pytest.approx(8 - 0.1 * 5.5)
    assert last["text"] == pytest.approx(8 - 0.1 * 25.5)
    # Pictures come from step 5 on: steps 5..14 are their first ten.
    assert first["image"] == pytest.approx(6 - 0.1 * 9.5)
    assert last["image"] == pytest.approx(6 - 0.1 * 25.5)
    assert first["audio"] is None and last["audio"] is None


def test_tokens_weigh_not_steps() -> None:
    light, heavy = step_record(5), step_record(6)
    heavy = heavy.model_copy(
        update={"loss_by": {"text": heavy.loss_by["text"].model_copy(update={"tokens": 300})}}
    )
    first, _ = end_losses([light, heavy])
    assert first["text"] == pytest.approx((7.5 * 100 + 7.4 * 100) / 400)


def test_an_incident_is_told_in_stages() -> None:
    steps, events = killed_run()
    (incident,) = incidents(events, steps)
    assert incident.step == KILLED_AFTER
    assert incident.replayed_steps == KILLED_AFTER - RESUMED_FROM
    assert incident.resume_s == pytest.approx(DETECT_S + RESTORE_S + STEP_S)
    assert [stage.name for stage in incident.stages] == [
        "noticed",
        "restart decided",
        "checkpoint restored",
        "first step done",
        "lost steps done again",
    ]
    lengths = [stage.end_s - stage.begin_s for stage in incident.stages]
    assert lengths == pytest.approx([NOTICE_S, DETECT_S - NOTICE_S, RESTORE_S, STEP_S, 7 * STEP_S])


def test_a_fault_nobody_rehearsed_counts_from_when_it_was_seen() -> None:
    steps, events = killed_run()
    (incident,) = incidents([e for e in events if e.kind != "rehearsed_fault"], steps)
    assert incident.resume_s == pytest.approx(DETECT_S - NOTICE_S + RESTORE_S + STEP_S)
    assert incident.stages[0].name == "restart decided"


def test_a_run_that_never_came_back_has_no_time_to_resume() -> None:
    steps, events = killed_run()
    before = [s for s in steps if s.generation == 0]
    (incident,) = incidents(events[:5], before)
    assert incident.resume_s is None
    assert num_restarts(events[:5], before) == 0


def test_the_summary_has_every_number() -> None:
    steps, events = killed_run()
    records = [
        record
        for step in steps
        for record in consumed_records(step.step, generation=step.generation)
    ]
    summary = summarize(records=steps, events=events, consumed=records, planned=planned(30))
    assert summary["steps"] == 30
    assert summary["restarts"] == 1
    assert (summary["samples_repeated"], summary["samples_lost"]) == (0, 0)
    assert summary["tokens_per_modality"] == {"text": 180_000, "image": 60_000, "audio": 0}
    assert summary["max_live_encoder_microbatches"] == 2
    assert summary["seconds_to_resume"] == pytest.approx(DETECT_S + RESTORE_S + STEP_S)
    assert (
        set(summary["first_loss"])
        == set(summary["last_loss"])
        == {
            "all",
            "text",
            "image",
            "audio",
        }
    )


def test_without_a_plan_what_was_lost_is_unknown_not_zero() -> None:
    steps, events = killed_run()
    summary = summarize(records=steps, events=events, consumed=[], planned=None)
    assert summary["samples_repeated"] is None and summary["samples_lost"] is None
