"""Numbers with a unit as people type them: `1M` tokens, `20 steps`. Pure text to int."""

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictInt, WithJsonSchema

_SCALE = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_MAX_TOKENS = 10**16
_MAX_STEPS = 10**9

COUNT_PATTERN = r"^[0-9]{1,17}(\.[0-9]{1,12})?[kKmMbBgGtT]?$"
STEPS_PATTERN = r"^[1-9][0-9]{0,8}( steps?)?$"


def parse_count(value: Any) -> Any:
    """`50k` -> 50000, `1M` -> 1000000; what is no text goes on to pydantic unchanged."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(COUNT_PATTERN, value):
        raise ValueError("write a whole number, or one with k, M, B or T behind it, such as 50k")
    digits, unit = (value, "") if value[-1].isdigit() else (value[:-1], value[-1])
    scaled = Decimal(digits) * _SCALE[unit.lower()]
    if scaled != int(scaled):
        raise ValueError("this is not a whole number of tokens; write fewer decimals, such as 50k")
    return int(scaled)


def parse_steps(value: Any) -> Any:
    """`20 steps` -> 20; what is no text goes on to pydantic unchanged."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(STEPS_PATTERN, value):
        raise ValueError("write a whole number of steps from 1 on, such as 20 steps")
    return int(value.split()[0])


def _int_or_string(pattern: str, *, least: int, most: int) -> WithJsonSchema:
    """The form that Kubernetes accepts for a number or a text: bounds and pattern side by side."""
    return WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": least,
            "maximum": most,
            "pattern": pattern,
            "maxLength": 32,
            "x-kubernetes-int-or-string": True,
        }
    )


Tokens = Annotated[
    StrictInt,
    BeforeValidator(parse_count),
    Field(ge=0, le=_MAX_TOKENS),
    _int_or_string(COUNT_PATTERN, least=0, most=_MAX_TOKENS),
]
"""A number of tokens: an integer, or text such as `50k`, `1M`, `2.5B`."""

SomeTokens = Annotated[
    StrictInt,
    BeforeValidator(parse_count),
    Field(ge=1, le=_MAX_TOKENS),
    _int_or_string(COUNT_PATTERN, least=1, most=_MAX_TOKENS),
]
"""`Tokens`, at least one."""

AutoTokens = Annotated[
    Literal["auto"] | Tokens,
    _int_or_string(f"^auto$|{COUNT_PATTERN}", least=0, most=_MAX_TOKENS),
]
"""`Tokens`, or `auto`."""

Steps = Annotated[
    StrictInt,
    BeforeValidator(parse_steps),
    Field(ge=1, le=_MAX_STEPS),
    _int_or_string(STEPS_PATTERN, least=1, most=_MAX_STEPS),
]
"""A number of optimizer steps: an integer, or text such as `20 steps`."""
