"""What was measured, beside what it should be."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

LABEL: Final = "control plane only"
"""On every figure: nodes and containers are simulated, and nothing trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    """None: there is none, the number is told only."""
    is_least: bool = False
    """Whether the goal is the least that is wanted, and not the most."""
    how: str = ""
    """What was measured, and the single measurements."""

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None where there is none."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.is_least else self.value <= self.goal

    def __str__(self) -> str:
        if self.goal is None:
            verdict = ""
        else:
            sign = ">=" if self.is_least else "<="
            verdict = f"  (goal {sign} {self.goal:g}: {'met' if self.ok else 'MISSED'})"
        return f"{self.name}: {self.value:.3g} {self.unit}{verdict}"


def write_figures(path: Path, figures: Sequence[Figure], **about: object) -> None:
    """Write all figures as JSON, with what is to be known about the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "label": LABEL,
        **about,
        "figures": [{"label": LABEL, **asdict(figure), "ok": figure.ok} for figure in figures],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
