"""How an attempt ended for one supervisor, left in a file for the program that started it."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from omni_contract.records import History
from omni_trainer.supervisor.verdict import Verdict


class AttemptEnd(BaseModel):
    """What a supervisor knew when it ended by itself."""

    model_config = ConfigDict(frozen=True)

    exit_code: int
    generation: int
    step: int
    """Most steps finished by one of this node's ranks in the attempt."""
    message: str
    """Why, in a sentence; empty where all went well."""
    verdict: Verdict | None = None
    """The newest one; None where no generation ended."""
    history: History
    """With the restarts in place of this attempt counted."""

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.model_dump_json())

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """Read the file; None: the supervisor was killed before it wrote one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
