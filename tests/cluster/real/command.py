"""Run one of the machine's programs and fail with what it said."""

import subprocess
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str | Path], *, stdin: str | None = None, timeout_s: float = 60) -> str:
    """What the program printed. Raises RuntimeError where it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
