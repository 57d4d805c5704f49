"""What ranks trained, read from the run folders of their pods on the nodes' disks while they live.

A folder goes with its pod. Its files are held open, so that nothing written at the very end is
missed, also on a node that nobody reaches any more.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

from pydantic import ValidationError

from omni_contract import names
from omni_contract.records import ConsumedRecord, ConsumedSample, StepRecord
from tests.e2e.cluster.record import Steps

Pair = tuple[int, int]
"""Attempt and generation."""

_R = TypeVar("_R", StepRecord, ConsumedRecord)


@dataclass(slots=True, kw_only=True)
class _Trained:
    steps: dict[int, StepRecord] = field(default_factory=dict)
    consumed: dict[int, dict[int, ConsumedRecord]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By step and rank."""

    def as_steps(self, pair: Pair) -> Steps:
        return Steps(
            attempt=pair[0],
            generation=pair[1],
            losses={step: line.loss for step, line in sorted(self.steps.items())},
            times_s={step: line.time_s for step, line in sorted(self.steps.items())},
            samples={
                step: [_id(sample) for _, line in sorted(ranks.items()) for sample in line.samples]
                for step, ranks in sorted(self.consumed.items())
            },
        )


class RunFolders:
    """The run folders of the pods of one job. `read` them often enough to open each in time."""

    def __init__(self) -> None:
        self._open: dict[Path, _Lines] = {}
        self._trained: dict[Pair, _Trained] = defaultdict(_Trained)
        self._files = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def read(self, folders: Iterable[Path]) -> None:
        """Take in what is new in these folders, and in those of before."""
        patterns = (names.METRICS_FILE, names.CONSUMED_FILE.format(rank="*"))
        for folder in folders:
            for path in (path for pattern in patterns for path in folder.glob(pattern)):
                if path not in self._open:
                    file = self._files.enter_context(path.open("rb", buffering=0))
                    self._open[path] = _Lines(file)
        for path, lines in self._open.items():
            if path.name == names.METRICS_FILE:
                for step in _records(StepRecord, lines):
                    self._of(step).steps[step.step] = step
            else:
                for consumed in _records(ConsumedRecord, lines):
                    self._of(consumed).consumed[consumed.step][consumed.rank] = consumed

    def newest(self) -> tuple[Pair, int]:
        """The highest pair that has done a step, and its last step; zeros where there is none."""
        pairs = [pair for pair, trained in self._trained.items() if trained.steps]
        if not pairs:
            return (0, 0), 0
        return max(pairs), max(self._trained[max(pairs)].steps)

    def step_times(self) -> list[tuple[Pair, int, float]]:
        """Pair, step and Unix time of the end of every step done."""
        return [
            (pair, step, line.time_s)
            for pair, trained in self._trained.items()
            for step, line in trained.steps.items()
        ]

    def steps(self) -> list[Steps]:
        """All of it, in order of the pairs."""
        return [trained.as_steps(pair) for pair, trained in sorted(self._trained.items())]

    def _of(self, line: StepRecord | ConsumedRecord) -> _Trained:
        return self._trained[line.attempt, line.generation]


class _Lines:
    """Whole lines of a file that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._rest = b""

    def new(self) -> list[bytes]:
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [line for line in lines if line]


def _records(kind: type[_R], lines: _Lines) -> Iterator[_R]:
    """All but lines that a killed writer cut short."""
    for line in lines.new():
        try:
            yield kind.model_validate_json(line)
        except ValidationError as exc:
            if any(error["type"] != "json_invalid" for error in exc.errors()):
                raise


def _id(sample: ConsumedSample) -> str:
    mark = "!" if sample.corrupt else ""
    return f"{sample.source}/{sample.epoch}/{sample.index}/{sample.first_token}{mark}"
