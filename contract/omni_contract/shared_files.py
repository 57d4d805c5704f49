"""What the two containers of a pod tell each other, through files in the volume they share.

Each file has one writer and is replaced as a whole.
"""

from pathlib import Path
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

PEERS_FILE: Final = "data-peers.json"
END_FILE: Final = "data-end.json"


class SharedFile(BaseModel):
    """A document in a file of its own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Replace the file; a reader sees the old document or the new one."""
        fresh = path.with_suffix(".tmp")
        fresh.write_text(self.model_dump_json())
        fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """The document; None: there is none that can be read."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None


class DataPeers(SharedFile):
    """Where the data services of an attempt are. Written by the supervisor once all have met."""

    attempt: int
    addresses: tuple[str, ...]
    """HOST:PORT of every node, in node order."""


class DataEnd(SharedFile):
    """The data service cannot go on. Written by the data container."""

    exit_code: int
    """`Exit.USER`: a mistake that no restart mends."""
    message: str
    """What it said last."""
