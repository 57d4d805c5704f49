"""What a rank leaves in the run folder reads back as written, also after kills and restarts."""

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from omni_contract import names
from omni_contract.errors import StorageError
from omni_contract.records import ConsumedSample, LossSum, OpSpan, RankTrace, RunEvent, StepRecord
from omni_contract.spec_model import Modality
from omni_contract.topology import Coords
from omni_trainer.batch import MicrobatchInputs, StepInputs, StepResult
from omni_trainer.data import StepData
from omni_trainer.environment import Pair
from omni_trainer.metrics import TENSORBOARD_FOLDER, RunFolder, append, consumed_record, step_record

FIRST = Pair(attempt=1, generation=0)
SECOND = Pair(attempt=1, generation=1)


def step_data(step: int) -> StepData:
    microbatch = MicrobatchInputs(
        index=2,
        samples=np.array([[1, 0, 7, 0, 0, 5], [0, 3, 9, 128, 5, 4]]),
        spans=np.array([[0, 1, 0, 2, 8, 1]]),
    )
    return StepData(
        inputs=StepInputs(step=step, microbatches=(microbatch,)),
        tokens_by_source={"books": 4, "pictures": 5},
        tokens_by_modality={"text": 7, "image": 2, "audio": 0},
        weights={"books": 0.25, "pictures": 0.75},
        corrupt_samples=1,
    )


def result(loss: float) -> StepResult:
    return StepResult(
        loss_sums={
            "all": LossSum(loss=loss, tokens=4),
            "text": LossSum(loss=loss / 2, tokens=1),
            "image": LossSum(loss=loss / 2, tokens=3),
            "audio": LossSum(loss=0, tokens=0),
        },
        grad_norm=1.5,
        learning_rate=0.01,
        max_live_encoder_microbatches=2,
        spans=(OpSpan(op="LF", microbatch=1, start_s=0.0, end_s=0.1, live=0),),
    )


def record(step: int, pair: Pair, loss: float) -> StepRecord:
    return step_record(
        pair=pair, data=step_data(step), result=result(loss), step_s=0.5, time_s=100.0
    )


def test_a_step_is_the_global_mean_over_loss_tokens() -> None:
    step = record(3, FIRST, 8.0)
    assert (step.step, step.loss, step.tokens) == (3, 2.0, 9)
    assert step.loss_by["image"] == LossSum(loss=4.0, tokens=3)
    assert step.tokens_by_modality == {Modality.TEXT: 7, Modality.IMAGE: 2, Modality.AUDIO: 0}


def test_a_step_without_loss_tokens_is_no_division_by_zero() -> None:
    empty = dict.fromkeys(("all", "text", "image", "audio"), LossSum(loss=0, tokens=0))
    step = step_record(
        pair=FIRST,
        data=step_data(1),
        result=StepResult(
            loss_sums=empty,
            grad_norm=0.0,
            learning_rate=0.0,
            max_live_encoder_microbatches=0,
            spans=None,
        ),
        step_s=0.5,
        time_s=100.0,
    )
    assert step.loss == 0


def test_consumed_samples_have_names_and_only_the_masked_one_is_corrupt() -> None:
    consumed = consumed_record(
        pair=FIRST, rank=1, inputs=step_data(3).inputs, sources=["books", "pictures"]
    )
    assert consumed.samples == [
        ConsumedSample(microbatch=2, source="pictures", epoch=0, index=7, first_token=0,
                       num_tokens=5, corrupt=True),
        ConsumedSample(microbatch=2, source="books", epoch=3, index=9, first_token=128,
                       num_tokens=4, corrupt=False),
    ]  # fmt: skip


def test_lines_after_a_cut_one_stay_readable(tmp_path: Path) -> None:
    """A writer killed in the middle of a line must not swallow the next generation's first."""
    folder = RunFolder(tmp_path, rank=0, pair=FIRST)
    folder.write_step(record(1, FIRST, 8.0))
    folder.close()
    path = tmp_path / names.METRICS_FILE
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    folder = RunFolder(tmp_path, rank=0, pair=SECOND)
    folder.write_step(record(2, SECOND, 7.0))
    folder.close()
    assert [(r.step, r.generation) for r in StepRecord.read_all(path)] == [(1, 0), (2, 1)]


def test_a_full_disk_is_one_sentence() -> None:
    with pytest.raises(
        StorageError, match=r"/dev/full: cannot be written: No space left.*--run-dir"
    ):
        append(Path("/dev/full"), record(1, FIRST, 8.0))


def test_events_and_timelines_read_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, rank=0, pair=SECOND)
    folder.write_event("checkpoint", "saved after step 20", step=20, seconds=0.5)
    folder.write_trace(20, Coords(pp_rank=0, dp_rank=1), 100.0, result(8.0))
    folder.close()
    (event,) = RunEvent.read_all(tmp_path / names.EVENTS_FILE)
    assert (event.kind, event.step, event.generation, event.rank) == ("checkpoint", 20, 1, 0)
    path = tmp_path / names.TRACE_FILE.format(step=20, rank=0)
    trace = RankTrace.model_validate_json(path.read_bytes())
    assert (trace.dp_rank, [span.op for span in trace.spans]) == (1, ["LF"])


def test_tensorboard_shows_each_step_once_after_a_restart(tmp_path: Path) -> None:
    for pair, steps in ((FIRST, (1, 2, 3)), (SECOND, (2, 3, 4))):
        folder = RunFolder(tmp_path, rank=0, pair=pair)
        for step in steps:
            folder.write_step(record(step, pair, 4.0 * step))
        folder.close()
    shown = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss/all")] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)
    ]  # fmt: skip
    assert shown.Scalars("tokens per second")[0].value == 18
    assert "loss/audio" not in shown.Tags()["scalars"], "no audio token had a loss"
