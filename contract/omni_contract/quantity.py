"""Numbers with a unit as people type them: `1M` tokens, `20 steps`. Pure text to int."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMbBgGtT]?)")
_STEPS = re.compile(r"(\d+)\s*(?:steps?)?")

COUNT_PATTERN = r"^[0-9]+(\.[0-9]+)?[kKmMbBgGtT]?$"
STEPS_PATTERN = r"^[0-9]+( steps?)?$"


def parse_count(value: Any) -> Any:
    """`50k` -> 50000, `1M` -> 1000000; what is no text goes on to pydantic unchanged."""
    if not isinstance(value, str):
        return value
    match = _COUNT.fullmatch(value.strip())
    if match is None:
        raise ValueError("write a whole number, or one with k, M, B or T behind it, such as 50k")
    scaled = float(match[1]) * _SCALE[match[2].lower()]
    if scaled != int(scaled):
        raise ValueError("this is not a whole number of tokens")
    return int(scaled)


def parse_steps(value: Any) -> Any:
    """`20 steps` -> 20; what is no text goes on to pydantic unchanged."""
    if not isinstance(value, str):
        return value
    match = _STEPS.fullmatch(value.strip())
    if match is None:
        raise ValueError("write a whole number of steps, such as 20 steps")
    return int(match[1])


def _int_or_string(pattern: str) -> WithJsonSchema:
    return WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": pattern}]}
    )


Tokens = Annotated[
    int, BeforeValidator(parse_count), Field(ge=0, le=10**16), _int_or_string(COUNT_PATTERN)
]
"""A number of tokens: an integer, or text such as `50k`, `1M`, `2.5B`."""

Steps = Annotated[
    int, BeforeValidator(parse_steps), Field(ge=1, le=10**9), _int_or_string(STEPS_PATTERN)
]
"""A number of optimizer steps: an integer, or text such as `20 steps`."""
