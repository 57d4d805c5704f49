"""The base of every model a user writes, and how its errors read."""

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from omni_contract.errors import SpecError


class SpecModel(BaseModel):
    """A frozen block of the job file: camelCase outside, snake_case inside, no unknown fields.

    `cel_rules` are (CEL expression, message) pairs that the CRD checks for this block; each says
    what a Python validator of the same class says, so kubectl and `omni run` refuse alike.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        ser_json_inf_nan="strings",
    )
    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = ()

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, path: str = "spec") -> Self:
        """Read one block as typed. Raises SpecError that names every wrong field."""
        try:
            return cls.model_validate(raw)
        except ValidationError as exc:
            problems = [_problem(cls, error, path) for error in exc.errors()]
            first, *rest = problems
            raise SpecError(*first, *rest) from None


def _problem(model: type[BaseModel], error: Any, root: str) -> tuple[str, str]:
    loc = list(error["loc"])
    path = (root + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc)).lstrip(".")
    if error["type"] == "extra_forbidden":
        names = _field_names(model, loc[:-1])
        near = difflib.get_close_matches(str(loc[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields here are {', '.join(names)}"
        return path, f"unknown field; {hint}"
    if error["type"] == "missing":
        return path, "this field is required"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and isinstance(error["input"], Mapping):
        # A rule between fields says in its own words which values clash.
        field, _, rest = message.partition(": ")
        return (f"{path}.{field}", rest) if rest and " " not in field else (path, message)
    return path, f"{error['input']!r} is refused: {message[0].lower()}{message[1:]}"


def _field_names(model: type[BaseModel], loc: list[str | int]) -> list[str]:
    """The camelCase names allowed in the block that `loc` points at."""
    here: type[BaseModel] = model
    for part in loc:
        field = next(
            (f for n, f in here.model_fields.items() if part in (n, f.alias)),
            None,
        )
        annotation = field.annotation if field is not None else None
        if annotation is None:
            continue
        here = _model_in(annotation) or here
    return [field.alias or name for name, field in here.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(arg) for arg in get_args(annotation))
    return next((m for m in found if m is not None), None)


def divisors(number: int) -> str:
    """The divisors of a number, for an error that says which values would work."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
