"""Reads a job file, every value as kubectl reads it, so that both ways in give the same job.

Beyond plain text YAML's readers disagree: PyYAML takes 3e-3 for text and 1:30 for 90, kubectl takes
y for true and 2.0 for 2. What kubectl does is copied here; where it guesses, the file is refused.
"""

import math
import re
from pathlib import Path
from typing import Any, Final

import yaml

from omni_contract.errors import SpecError
from omni_contract.spec import Job

_MERGE: Final = "tag:yaml.org,2002:merge"
_STR: Final = "tag:yaml.org,2002:str"
_TRUE: Final = frozenset("y Y yes Yes YES true True TRUE on On ON".split())  # noqa: SIM905
_FALSE: Final = frozenset("n N no No NO false False FALSE off Off OFF".split())  # noqa: SIM905
_NULL: Final = frozenset(("", "~", "null", "Null", "NULL"))
_NO_NUMBERS: Final = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER: Final = re.compile(
    r"(?P<sign>[-+]?)"
    r"(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<bin>[01]+)|0[oO]?(?P<oct>[0-7]+)|(?P<dec>0|[1-9]\d*))",
    re.ASCII,
)
_FLOAT: Final = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", re.ASCII)
_LARGEST_EXACT: Final = 2**63


def plain_value(text: str) -> bool | int | float | str | None:
    """The value of text that stands in a file without quotes.

    Raises ValueError for infinity and for what is no number, which JSON cannot say.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _NO_NUMBERS.fullmatch(text):
        raise ValueError(f"{text} is no number that a job can hold; write a finite one")
    if text[0] not in "+-.0123456789":
        return text
    # Underscores part digits, but not behind a point that comes first.
    digits = text if text[0] == "." else text.replace("_", "")
    integer = _INTEGER.fullmatch(digits)
    if integer is not None:
        return _whole(integer)
    if _FLOAT.fullmatch(digits):
        number = float(digits)
        if math.isinf(number):
            return text
        # On its way as JSON 2.0 becomes 2, as far as whole numbers reach.
        return int(number) if number.is_integer() and abs(number) < _LARGEST_EXACT else number
    return text


def _whole(found: re.Match[str]) -> int | float:
    bases = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
    (value,) = (int(found[name], base) for name, base in bases.items() if found[name])
    number = -value if found["sign"] == "-" else value
    return number if -_LARGEST_EXACT <= number < _LARGEST_EXACT else float(number)


class _Loader(yaml.SafeLoader):
    """Loader that finds values with `plain_value` and refuses what readers disagree about."""

    # Nothing is guessed from the text but the merge key; the constructor below does the rest.
    yaml_implicit_resolvers = {"<": [(_MERGE, re.compile(r"<<"))]}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"the tag {event.tag} is not for job files; write the value", event)
        return super().compose_node(parent, index)

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        """The value of a scalar; quotes make it text."""
        if node.style is not None:
            return node.value
        try:
            return plain_value(node.value)
        except ValueError as exc:
            raise _refusal(str(exc), node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = "<<" if key_node.tag == _MERGE else self._key(key_node)
            if key in seen:
                raise _refusal(f"the key {key!r} stands here twice", key_node)
            if key_node.tag == _MERGE and seen:
                raise _refusal("<< must come first, so that all readers agree who wins", key_node)
            seen.add(key)
        self.flatten_mapping(node)
        return {self._key(k): self.construct_object(v, deep=deep) for k, v in node.value}

    def _key(self, node: yaml.Node) -> str:
        """JSON has no keys but text: a number or a truth value becomes what it is written as."""
        value = self.construct_text(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, bool):
            return str(value).lower()
        if value is None or isinstance(value, float):
            raise _refusal("this is no name for a field; put it in quotes", node)
        return str(value)


_Loader.add_constructor(_STR, _Loader.construct_text)


def _refusal(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)


def read_document(text: str, *, name: str) -> Any:
    """Parse the YAML document of the file `name`. Raises SpecError with the place of a mistake."""
    try:
        # _Loader derives from SafeLoader.
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(name, f"{where}{exc.problem}; mend the YAML there") from None
    except RecursionError:
        raise SpecError(name, "its blocks are nested too deep; this is no job file") from None
    except yaml.YAMLError as exc:
        raise SpecError(name, f"no YAML: {exc}") from None


def read_job(path: Path) -> Job:
    """Read and check a job file. Raises SpecError with every problem in it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(str(path), "there is no such file; give the path of a job YAML") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(str(path), f"cannot be read: {exc}") from None
    return Job.read(read_document(text, name=str(path)))
