"""Reads a record file as it grows."""

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from omni_contract.records import Record

R = TypeVar("R", bound=Record)


class Tail(Generic[R]):
    """The lines of a record file not yet read; a line being written waits for the next call."""

    def __init__(self, path: Path, model: type[R], *, from_end: bool = False) -> None:
        self._path = path
        self._model = model
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[R]:
        """New whole lines, in order. A line that a killed writer cut short is left out."""
        try:
            if self._path.stat().st_size == self._offset:
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole + newline)
        found: list[R] = []
        for line in whole.splitlines():
            try:
                found.append(self._model.model_validate_json(line))
            except ValidationError:
                continue
        return found
