"""The base of every model a user writes, and how its errors read."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from omni_contract.errors import SpecError
from omni_contract.problems import explain


class Clash(ValueError):
    """Values of a block that are right alone and wrong together. Paths are relative to it."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{path}: {message}" for path, message in problems))


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
        allow_inf_nan=False,
    )
    cel_rules: ClassVar[tuple[tuple[str, str], ...]] = ()
    immutable: ClassVar[tuple[str, ...]] = ()
    """Fields, by their camelCase name, that kubectl may not change in a job that exists."""

    @classmethod
    def parse(cls, raw: Mapping[str, Any], *, path: str = "spec") -> Self:
        """Read one block as typed. Raises SpecError that names every wrong field."""
        try:
            return cls.model_validate(raw)
        except ValidationError as exc:
            first, *rest = explain(cls, exc.errors(), root=path)
            raise SpecError(*first, *rest) from None


def divisors(number: int) -> str:
    """The divisors of a number, for an error that says which values would work."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
