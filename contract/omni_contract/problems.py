"""Turns pydantic's errors into sentences: the path as typed, the value, the rule, a way out."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Problem = tuple[str, str]
"""(path as typed, what is wrong with it and what would be right)."""


def explain(model: type[BaseModel], errors: Sequence[Any], *, root: str) -> list[Problem]:
    """One problem a field, in the order of the errors; never empty for a ValidationError."""
    found: dict[str, list[str]] = {}
    for error in errors:
        for path, message in _problems(model, error, root):
            found.setdefault(path, []).append(message)
    # A value that fits no branch of a union fails each of them: one sentence for all.
    return [(path, ", or ".join(dict.fromkeys(messages))) for path, messages in found.items()]


def _problems(model: type[BaseModel], error: Any, root: str) -> list[Problem]:
    steps, block, field = _walk(model, list(error["loc"]))
    path = _join(root, steps)
    kind = error["type"]
    if kind == "extra_forbidden":
        return [(path, f"unknown field; {_suggest(str(steps[-1]), _field_names(block))}")]
    if kind == "missing":
        missing = block.model_fields.get(_attribute(block, str(steps[-1])) or "")
        what = f" ({missing.description.rstrip('.')})" if missing and missing.description else ""
        return [(path, f"this field is required{what}")]
    if kind == "value_error":
        return _from_rule(path, error)
    if kind in _BLOCK_KINDS:
        inner = _model_in(field.annotation) if field is not None else None
        names = f" with the fields {', '.join(_field_names(inner))}" if inner else ""
        return [(path, f"{_shown(error['input'])} is refused: this is a block{names}")]
    say = _SAYINGS.get(kind)
    if say is not None:
        return [(path, say(error, field))]
    message = error["msg"]
    return [(path, f"{_shown(error['input'])} is refused: {message[0].lower()}{message[1:]}")]


def _from_rule(path: str, error: Any) -> list[Problem]:
    """What a validator of ours says; a rule between fields says itself which values clash."""
    cause = error["ctx"]["error"]
    clashes = getattr(cause, "problems", None)
    if clashes is not None:
        return [(f"{path}.{where}".lstrip("."), message) for where, message in clashes]
    message = str(cause)
    if isinstance(error["input"], Mapping):
        where, _, rest = message.partition(": ")
        if rest and " " not in where:
            return [(f"{path}.{where}".lstrip("."), rest)]
        return [(path, message)]
    return [(path, f"{_shown(error['input'])} is refused: {message}")]


def _walk(
    model: type[BaseModel], loc: list[str | int]
) -> tuple[list[str | int], type[BaseModel], FieldInfo | None]:
    """The steps a person typed, the block that holds the last one, and the last field passed."""
    steps: list[str | int] = []
    block, inner, field = model, model, None
    here: type[BaseModel] | None = model
    free = False  # inside a map or list, where keys are the user's own
    for part in loc:
        if part == "[key]":
            continue
        if here is not None:
            name = _attribute(here, str(part))
            block = here
            steps.append(part)
            if name is None:
                here = None
                continue
            field = here.model_fields[name]
            inner = _model_in(field.annotation) or inner
            free = _is_container(field.annotation)
            here = None if free else _model_in(field.annotation)
        elif free or isinstance(part, int):
            steps.append(part)
            here = _model_in(field.annotation) if field is not None else None
            free = here is None and field is not None
        # Anything else is a branch of a union, which nobody typed.
    return steps, block, field


def _attribute(block: type[BaseModel], part: str) -> str | None:
    """The Python name of a field, by either of its names."""
    return next((n for n, f in block.model_fields.items() if part in (n, f.alias)), None)


def _field_names(block: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in block.model_fields.items()]


def _is_container(annotation: Any) -> bool:
    origin = getattr(annotation, "__origin__", annotation)
    return origin in (dict, list) or any(
        _is_container(arg) for arg in get_args(annotation) if getattr(arg, "__origin__", None)
    )


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(arg) for arg in get_args(annotation))
    return next((m for m in found if m is not None), None)


def _join(root: str, steps: Sequence[str | int]) -> str:
    return (root + "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in steps)).lstrip(".")


def _suggest(typed: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(typed, allowed, n=1, cutoff=0.5)
    # `nodeCount` for `nodes`: the right word inside, too far away for the ratio.
    near = near or [name for name in allowed if name.lower() in typed.lower()][:1]
    return f"did you mean {near[0]!r}?" if near else f"the fields here are {', '.join(allowed)}"


def _shown(value: Any) -> str:
    if value is None:
        return "an empty value (null)"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def _closed_set(error: Any, _: FieldInfo | None) -> str:
    value, allowed = error["input"], re.split(r", | or ", error["ctx"]["expected"])
    if value is None:
        return f"an empty value (null) is refused; use {_one_of(allowed)} or leave the field out"
    near = difflib.get_close_matches(str(value), [a.strip("'") for a in allowed], n=1)
    hint = f"did you mean {near[0]!r}? " if near and len(allowed) > 1 else ""
    return f"{_shown(value)} is not available in this version; {hint}use {_one_of(allowed)}"


def _one_of(allowed: Sequence[str]) -> str:
    return allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"


def _pattern(error: Any, field: FieldInfo | None) -> str:
    means = f" ({field.description.rstrip('.')})" if field and field.description else ""
    if str(error["loc"][-1]) == "[key]":
        means = ": lower-case letters, digits and dashes in between"
    return f"{_shown(error['input'])} does not match {error['ctx']['pattern']}{means}"


def _bound(word: str, limit: str, way_out: str) -> Callable[[Any, FieldInfo | None], str]:
    def say(error: Any, _: FieldInfo | None) -> str:
        bound = error["ctx"][limit]
        return f"{_shown(error['input'])} is {word} {bound}; use {way_out.format(bound)}"

    return say


def _length(word: str, limit: str) -> Callable[[Any, FieldInfo | None], str]:
    def say(error: Any, _: FieldInfo | None) -> str:
        has = len(error["input"])
        return f"{has} entries or characters; {word} {error['ctx'][limit]} are allowed"

    return say


def _whole_number(error: Any, _: FieldInfo | None) -> str:
    value = error["input"]
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        return f"{value!r} is text; write the number without quotes"
    return f"{_shown(value)} is no whole number; write digits such as 4"


def _expects(what: str) -> Callable[[Any, FieldInfo | None], str]:
    return lambda error, _: f"{_shown(error['input'])} is refused: write {what}"


_BLOCK_KINDS = {"model_type", "model_attributes_type", "dict_type", "mapping_type"}
_SAYINGS: dict[str, Callable[[Any, FieldInfo | None], str]] = {
    "literal_error": _closed_set,
    "enum": _closed_set,
    "string_pattern_mismatch": _pattern,
    "greater_than_equal": _bound("below", "ge", "{} or more"),
    "greater_than": _bound("not above", "gt", "more than {}"),
    "less_than_equal": _bound("above", "le", "{} or less"),
    "less_than": _bound("not below", "lt", "less than {}"),
    "too_short": _length("at least", "min_length"),
    "too_long": _length("at most", "max_length"),
    "string_too_short": _length("at least", "min_length"),
    "string_too_long": _length("at most", "max_length"),
    "int_type": _whole_number,
    "int_parsing": _whole_number,
    "int_from_float": _whole_number,
    "float_type": _expects("a number such as 0.003 or 3e-3, without quotes"),
    "finite_number": _expects("a finite number"),
    "bool_type": _expects("true or false, without quotes"),
    "bool_parsing": _expects("true or false, without quotes"),
    "string_type": _expects("text, in quotes where it looks like a number or true/false"),
    "list_type": _expects("a list: [a, b], or lines that begin with a dash"),
}
