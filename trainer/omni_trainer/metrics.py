"""What a rank leaves in the run folder: steps, consumed samples, events, timelines.

Every line is one write to a file opened for appending, so lines of several processes never mix
and a killed writer leaves whole lines, or one cut at the end that readers skip.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from omni_contract import names
from omni_contract.errors import StorageError
from omni_contract.records import (
    ConsumedRecord,
    ConsumedSample,
    RankTrace,
    Record,
    StepRecord,
)
from omni_contract.spec_model import Modality
from omni_contract.topology import Coords
from omni_trainer.batch import StepInputs, StepResult
from omni_trainer.data import StepData
from omni_trainer.environment import Pair
from omni_trainer.events import record_event

TENSORBOARD_FOLDER = "tensorboard"
LOSS_KINDS = (Modality.TEXT, Modality.IMAGE, Modality.AUDIO)


def append(path: Path, record: Record) -> None:
    """Append one line in a single write."""
    line = record.model_dump_json().encode() + b"\n"
    try:
        with path.open("a+b", buffering=0) as file:
            # A line that a killed writer cut short must not swallow this one.
            if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                line = b"\n" + line
            file.write(line)
    except OSError as exc:
        raise StorageError(
            f"{path}: cannot be written: {exc.strerror}; free space, or take another --run-dir"
        ) from None


def step_record(
    *, pair: Pair, data: StepData, result: StepResult, step_s: float, time_s: float
) -> StepRecord:
    """The line of one step."""
    total = result.loss_sums["all"]
    return StepRecord(
        step=data.inputs.step,
        attempt=pair.attempt,
        generation=pair.generation,
        time_s=time_s,
        step_s=step_s,
        loss=total.loss / max(total.tokens, 1),
        loss_by={k: result.loss_sums[k] for k in LOSS_KINDS if k in result.loss_sums},
        grad_norm=result.grad_norm,
        learning_rate=result.learning_rate,
        tokens=sum(data.tokens_by_source.values()),
        tokens_by_modality={Modality(k): n for k, n in data.tokens_by_modality.items()},
        tokens_by_source=dict(data.tokens_by_source),
        weights=dict(data.weights),
        corrupt_samples=data.corrupt_samples,
        max_live_encoder_microbatches=result.max_live_encoder_microbatches,
    )


def consumed_record(
    *, pair: Pair, rank: int, inputs: StepInputs, sources: Sequence[str]
) -> ConsumedRecord:
    """The samples of a step whose loss this rank computed. `sources`: sorted names."""
    samples = []
    for microbatch in inputs.microbatches:
        corrupt = {int(span[0]) for span in microbatch.spans if span[5]}
        samples += [
            ConsumedSample(
                microbatch=microbatch.index,
                source=sources[int(source)],
                epoch=int(epoch),
                index=int(index),
                first_token=int(first_token),
                num_tokens=int(num_tokens),
                corrupt=row in corrupt,
            )
            for row, (source, epoch, index, first_token, _, num_tokens) in enumerate(
                microbatch.samples
            )
        ]
    return ConsumedRecord(
        step=inputs.step,
        attempt=pair.attempt,
        generation=pair.generation,
        rank=rank,
        samples=samples,
    )


class RunFolder:
    """The run folder as one rank writes it."""

    def __init__(self, path: Path, *, rank: int, pair: Pair) -> None:
        self._path = path
        self._rank = rank
        self._pair = pair
        self._board: SummaryWriter | None = None

    def write_step(self, record: StepRecord) -> None:
        """Append a step to the metrics and to TensorBoard. Rank 0 only."""
        append(self._path / names.METRICS_FILE, record)
        if self._board is None:
            self._board = SummaryWriter(
                str(self._path / TENSORBOARD_FOLDER),
                purge_step=record.step,  # hides what an earlier generation wrote beyond it
                flush_secs=10,
                filename_suffix=f".{self._pair}",
            )
        for name, value in _scalars(record).items():
            self._board.add_scalar(name, value, record.step)

    def write_consumed(self, record: ConsumedRecord) -> None:
        """Append the samples a last-stage rank consumed."""
        append(self._path / names.CONSUMED_FILE.format(rank=self._rank), record)

    def write_trace(self, step: int, coords: Coords, begin_s: float, result: StepResult) -> None:
        """Write the timeline of a traced step."""
        trace = RankTrace(
            step=step,
            rank=self._rank,
            pp_rank=coords.pp_rank,
            dp_rank=coords.dp_rank,
            begin_s=begin_s,
            spans=list(result.spans or ()),
        )
        path = self._path / names.TRACE_FILE.format(step=step, rank=self._rank)
        path.write_text(trace.model_dump_json())

    def write_event(
        self,
        kind: str,
        message: str,
        *,
        step: int | None = None,
        seconds: float | None = None,
    ) -> None:
        """Append an event of the run."""
        record_event(
            self._path,
            kind=kind,
            attempt=self._pair.attempt,
            generation=self._pair.generation,
            message=message,
            step=step,
            rank=self._rank,
            seconds=seconds,
        )

    def close(self) -> None:
        """Flush and end TensorBoard's thread."""
        if self._board is not None:
            self._board.close()


def _scalars(record: StepRecord) -> Mapping[str, float]:
    scalars = {
        "loss/all": record.loss,
        "gradient norm": record.grad_norm,
        "learning rate": record.learning_rate,
        "tokens per second": record.tokens / max(record.step_s, 1e-9),
        "corrupt samples": float(record.corrupt_samples),
    }
    for kind, total in record.loss_by.items():
        if total.tokens:
            scalars[f"loss/{kind}"] = total.loss / total.tokens
    for source, weight in record.weights.items():
        scalars[f"weight/{source}"] = weight
    for modality, tokens in record.tokens_by_modality.items():
        scalars[f"tokens/{modality}"] = float(tokens)
    return scalars
