"""What a pod is told while it lives: its annotations, in a file that the kubelet keeps fresh."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pydantic import ValidationError

from omni_contract.errors import OmniError
from omni_contract.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_HISTORY,
    ANNOTATION_INDEX,
    ANNOTATION_RENDEZVOUS,
)
from omni_contract.records import History

ANNOTATIONS_FILE: Final = "annotations"

_ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)")
_SIMPLE: Final = dict(zip('abfnrtv\\"', '\a\b\f\n\r\t\v\\"', strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The part of a pod in an attempt."""

    attempt: int
    index: int | None
    """Node index in the plan; None for a spare."""
    rendezvous: str
    """HOST:PORT where the supervisors of the attempt meet."""
    history: History
    """The restarts spent before the attempt."""

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the annotations file. None: it is not there, as in the middle of a refresh.

        Raises OmniError where an annotation is missing or wrong.
        """
        try:
            text = path.read_text()
        except OSError:
            return None
        return cls.parse(parse_annotations(text))

    @classmethod
    def parse(cls, annotations: Mapping[str, str]) -> Self:
        """Take it from a pod's annotations. Raises OmniError where one is missing or wrong."""
        name = ANNOTATION_ATTEMPT
        try:
            attempt = int(annotations[name])
            name = ANNOTATION_INDEX
            index = int(annotations[name]) if annotations[name] else None
            name = ANNOTATION_RENDEZVOUS
            rendezvous = annotations[name]
            name = ANNOTATION_HISTORY
            history = History.model_validate_json(annotations.get(name) or "{}")
        except (KeyError, ValueError, ValidationError) as exc:
            raise OmniError(
                f"annotation {name} of this pod: {annotations.get(name)!r} cannot be used "
                f"({type(exc).__name__}); the operator writes it, leave it as it is"
            ) from None
        return cls(attempt=attempt, index=index, rendezvous=rendezvous, history=history)


def parse_annotations(text: str) -> dict[str, str]:
    """Read lines of KEY="VALUE" as the kubelet writes them: values are quoted as Go does."""
    pairs = (line.partition("=") for line in text.split("\n") if line)
    return {key: _unquote(value) for key, _, value in pairs}


def _unquote(quoted: str) -> str:
    if len(quoted) < 2 or quoted[0] != '"' or quoted[-1] != '"':
        raise OmniError(f"a pod's annotations: {quoted!r} is no quoted value")
    # \xNN stands for one byte that is no valid UTF-8 by itself, so bytes are put together first.
    raw = bytearray()
    at = 0
    body = quoted[1:-1]
    for found in _ESCAPE.finditer(body):
        raw += body[at : found.start()].encode()
        code = found[1]
        if code[0] == "x":
            raw.append(int(code[1:], 16))
        elif code[0] in "uU" and len(code) > 1:
            raw += chr(int(code[1:], 16)).encode()
        else:
            raw += _SIMPLE[code].encode()
        at = found.end()
    raw += body[at:].encode()
    return raw.decode(errors="replace")
