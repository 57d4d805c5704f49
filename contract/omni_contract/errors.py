"""Errors that are the user's to mend: they print as one sentence and never as a traceback."""

from collections.abc import Sequence


class OmniError(Exception):
    """An error with a message fit for the user: field or file, value, rule, way out."""


class SpecError(OmniError):
    """The job file is wrong. Retrying cannot mend it.

    `problems` holds (path as typed, what is wrong with it and what would be right).
    """

    def __init__(self, path: str, message: str, *more: tuple[str, str]) -> None:
        self.problems: Sequence[tuple[str, str]] = ((path, message), *more)
        super().__init__("\n".join(f"{path}: {message}" for path, message in self.problems))


class DataError(OmniError):
    """A source, shard or sample cannot be used as the job asks."""


class StorageError(OmniError):
    """The object store or a disk refused: missing bucket or key, no space, no credentials."""


class UnavailableError(StorageError):
    """The object store or the data service does not answer: an outage, which may pass."""


class StaleError(OmniError):
    """A newer (attempt, generation) holds the run; this process must end and change nothing."""
