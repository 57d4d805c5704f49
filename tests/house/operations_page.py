"""docs/operations.md as tests read it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from omni_contract.status import CONDITIONS

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
SECTIONS: Final[Mapping[str, str]] = dict(
    re.findall(r"^##+ ([^\n]+)\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S)
)
"""Text by heading."""


def first_words(text: str) -> set[str]:
    """What the rows, points and paragraphs of a text begin with, in backticks."""
    heads = re.findall(r"^(?:\| |\* )?(`\w+`(?:, (?:or )?`\w+`)*)", text, re.M)
    return {word for head in heads for word in re.findall(r"`(\w+)`", head)}


def reasons_by_condition() -> dict[str, set[str]]:
    """What the page says that a condition of each type may have as its reason."""
    found: dict[str, set[str]] = {type_: set() for type_ in CONDITIONS}
    for heading, text in SECTIONS.items():
        for type_ in found.keys() & set(heading.split()):
            found[type_] |= first_words(text)
    shared = SECTIONS["Reasons of several conditions"]
    for words, types in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", shared, re.M):
        for type_ in types.split(", "):
            found[type_] |= set(re.findall(r"`(\w+)`", words))
    return found
