"""Job documents, valid and not, drawn from a seed: valid ones with a few fields changed.

What may stand in a field is read from the CRD's schema, so a new field is drawn as soon as it is
there. Whether a document is accepted is not known here; that is for the API server to say.
"""

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from omni_contract.crd_schema import Schema
from omni_contract.quantity import COUNT_PATTERN, STEPS_PATTERN
from tests.cluster.api import Object
from tests.contract.jobs import DEMO, changed
from tests.contract.kubernetes import root_schema

Path = tuple[str | int, ...]
Kind = Literal["valid value", "wrong type", "bound", "missing", "unknown", "null", "clash"]

KINDS: Final[tuple[Kind, ...]] = (
    "valid value", "wrong type", "bound", "missing", "unknown", "null", "clash",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field of a document, set or taken away."""

    kind: Kind
    path: Path

    @property
    def fields(self) -> frozenset[str]:
        """Names of which an error about it must hold one: the field's own, or a block's around."""
        return frozenset(step for step in self.path[1:][-3:] if isinstance(step, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A document and how it came about."""

    number: int
    base: int
    """Which of `BASES` it was."""
    changes: tuple[Change, ...]
    document: Object

    @property
    def fields(self) -> frozenset[str]:
        """Names that were touched."""
        return frozenset().union(*(change.fields for change in self.changes))


def _text_job() -> Object:
    job = changed("spec.model.encoders", ...)
    job["spec"]["data"] = {"sources": {"books": DEMO["spec"]["data"]["sources"]["books"]}}
    return job


def _gpu_job() -> Object:
    job = changed("spec.train.precision", "bf16")
    job["spec"]["resources"] = {"nodes": 16, "ranksPerNode": 8, "device": "cuda", "spares": 1}
    job["spec"]["batch"]["globalSequences"] = 256
    job["spec"]["topology"] = {"reorderGroupWithin": "rack", "onUnsatisfied": "Relax"}
    job["spec"]["restart"] = {"rules": [{"when": {"class": ["OOM"]}, "do": "FailJob"}]}
    job["spec"]["podTemplate"] = {
        "env": {"A": "b"},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "trainer", "resources": {"limits": {"cpu": "8"}}}],
    }
    return job


def _small_job() -> Object:
    job = _text_job()
    job["spec"]["resources"] = {"device": "cpu"}
    del job["spec"]["parallelism"]
    return job


BASES: Final[tuple[Object, ...]] = (DEMO, _text_job(), _gpu_job(), _small_job())
"""Valid jobs to begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """A place in a document that the schema knows."""

    path: Path
    schema: Schema
    is_there: bool


def cases(seed: int, number: int) -> Iterator[Case]:
    """Documents with one to three changes each; the same seed gives the same ones."""
    for at in range(number):
        draw = random.Random(f"{seed}/{at}")
        base = draw.randrange(len(BASES))
        document = copy.deepcopy(BASES[base])
        kinds = draw.choices(KINDS, k=draw.choice((1, 1, 1, 2, 3)))
        changes = [change for kind in kinds if (change := _MAKERS[kind](draw, document, kind))]
        yield Case(number=at, base=base, changes=tuple(changes), document=document)


def _sites(schema: Schema, value: Any, path: Path = ()) -> Iterator[_Site]:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            yield _Site(path=(*path, name), schema=inner, is_there=name in value)
            if name in value:
                yield from _sites(inner, value[name], (*path, name))
        if "additionalProperties" in schema:
            values: Schema = schema["additionalProperties"]
            for name in value:
                yield _Site(path=(*path, name), schema=values, is_there=True)
                yield from _sites(values, value[name], (*path, name))
    elif isinstance(value, list) and "items" in schema:
        for index, inner in enumerate(value):
            yield _Site(path=(*path, index), schema=schema["items"], is_there=True)
            yield from _sites(schema["items"], inner, (*path, index))


def _spec_sites(document: Object) -> list[_Site]:
    schema = root_schema()["properties"]["spec"]
    return list(_sites(schema, document["spec"], ("spec",)))


def _holder(document: Object, path: Path) -> Any:
    here: Any = document
    for step in path[:-1]:
        here = here[step]
    return here


def _set(document: Object, kind: Kind, path: Path, value: Any) -> Change:
    _holder(document, path)[path[-1]] = value
    return Change(kind=kind, path=path)


def _valid(draw: random.Random, document: Object, kind: Kind) -> Change:
    site = draw.choice(_spec_sites(document))
    return _set(document, kind, site.path, _value(draw, site.schema))


def _wrong_type(draw: random.Random, document: Object, kind: Kind) -> Change:
    site = draw.choice(_spec_sites(document))
    wrong: tuple[Any, ...] = (
        True, 0, 7, -1, 1.5, 7.0, 10**30, "", "x", "7", "true", "é" * 20, [], ["a"], [7], [None],
        {}, {"a": 1}, {"a": {"b": []}},
    )  # fmt: skip
    return _set(document, kind, site.path, copy.deepcopy(draw.choice(wrong)))


def _bound(draw: random.Random, document: Object, kind: Kind) -> Change | None:
    bounded = [(s, values) for s in _spec_sites(document) if (values := _edges(s.schema))]
    site, values = draw.choice(bounded)
    return _set(document, kind, site.path, draw.choice(values))


def _edges(schema: Schema) -> list[Any]:
    """Values at a bound of the schema and just beyond it."""
    found: list[Any] = []
    step = 1 if schema.get("type") == "integer" or "anyOf" in schema else 1e-9
    for key in ("minimum", "maximum"):
        if key in schema:
            found += [schema[key] - step, schema[key], schema[key] + step]
    if schema.get("type") == "string" and "enum" not in schema:
        longest = schema.get("maxLength", 63)
        found += ["a" * longest, "a" * (longest + 1), "", "é" * longest, "A_!", "s3://omni/x/"]
    if schema.get("type") == "array" and "maxItems" in schema:
        item = _value(random.Random(0), schema["items"])
        found += [[copy.deepcopy(item) for _ in range(n)] for n in (0, schema["maxItems"] + 1)]
    if schema.get("x-kubernetes-int-or-string"):
        found += ["0", "1.5", "1.5k", "1.23456k", "1 step", "0 steps", "10 steps", "k", "9" * 17]
    return found


def _missing(draw: random.Random, document: Object, kind: Kind) -> Change | None:
    there = [site for site in _spec_sites(document) if site.is_there]
    path = draw.choice(there).path
    del _holder(document, path)[path[-1]]
    return Change(kind=kind, path=path)


def _unknown(draw: random.Random, document: Object, kind: Kind) -> Change:
    blocks = [site for site in _spec_sites(document) if site.is_there]
    names = ("layrs", "Nodes", "node_count", "x", "apiVersion")
    paths: list[Path] = [("spec", draw.choice(names))]
    for site in blocks:
        if isinstance(_holder(document, site.path)[site.path[-1]], dict):
            paths.append((*site.path, draw.choice(names)))
    return _set(document, kind, draw.choice(paths), draw.choice((1, "a", {}, [])))


def _null(draw: random.Random, document: Object, kind: Kind) -> Change:
    return _set(document, kind, draw.choice(_spec_sites(document)).path, None)


def _clash(draw: random.Random, document: Object, kind: Kind) -> Change | None:
    """Values that are right alone: sizes that divide or not, parts, templates, weights."""
    spec = document["spec"]
    path, values = draw.choice(_CLASHES)
    here: Any = spec
    for step, following in itertools.pairwise(path):
        if isinstance(step, int):
            here = here[step] if len(here) > step else None
        elif isinstance(following, str):
            here = here.setdefault(step, {})
        else:
            here = here.get(step)
        if not isinstance(here, dict | list):
            return None
    if not isinstance(here, dict):
        return None
    here[path[-1]] = copy.deepcopy(draw.choice(values))
    return Change(kind=kind, path=("spec", *path))


_SIZES: Final = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 64)
_CLASHES: Final[tuple[tuple[Path, tuple[Any, ...]], ...]] = (
    (("parallelism", "llm", "pipeline"), _SIZES),
    (("model", "llm", "layers"), _SIZES),
    (("model", "llm", "heads"), _SIZES),
    (("model", "llm", "kvHeads"), _SIZES),
    (("model", "llm", "hiddenSize"), (64, 60, 96, 128)),
    (("model", "encoders", "image", "heads"), _SIZES),
    (("model", "encoders", "image", "mergePatches"), (1, 2, 8)),
    (("model", "encoders", "image", "maxPatches"), (4, 16, 63, 64)),
    (("resources", "nodes"), _SIZES),
    (("resources", "ranksPerNode"), _SIZES),
    (("resources", "device"), ("auto", "cpu", "cuda")),
    (("train", "precision"), ("fp32", "bf16")),
    (("batch", "globalSequences"), (*_SIZES, 15, 256, 255)),
    (("batch", "microbatchSequences"), _SIZES),
    (("data", "reorder", "groupReplicas"), _SIZES),
    (("data", "sources", "books", "template"), ("{text}", "<image>{text}", "{text}{text}", "")),
    (("data", "sources", "books", "parts"), ({"text": "txt"}, {"text": "txt", "audio": "ogg"})),
    (("data", "sources", "books", "parts"), ({"image": "png"}, {})),
    (("data", "mixture"), ([], [{"weights": {"books": 1}}], [{"weights": {"boks": 1}}])),
    (("data", "mixture"), ([{"weights": {"books": 0}}], [{"weights": {}, "ramp": "linear"}])),
    (("data", "mixture", 0, "until"), ("100k", "900k", 5, None)),
    (("data", "mixture", 1, "until"), ("100k", "900k", 200_000, 200_001)),
    (("podTemplate", "containers"), ([{"name": "trainer", "command": ["sh"]}], [{}])),
    (("model", "llm", "weights"), ("s3://omni/w", None)),
)  # fmt: skip
_MAKERS: Final[Mapping[Kind, Callable[[random.Random, Object, Kind], Change | None]]] = {
    "valid value": _valid,
    "wrong type": _wrong_type,
    "bound": _bound,
    "missing": _missing,
    "unknown": _unknown,
    "null": _null,
    "clash": _clash,
}


def _value(draw: random.Random, schema: Schema) -> Any:
    """A value that the schema alone allows."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        words = {COUNT_PATTERN: ("50k", "1M", 4096), STEPS_PATTERN: ("20 steps", "1 step", 7)}
        return draw.choice(words.get(schema["pattern"], ("auto", "4k", 4096)))
    kind = schema["type"]
    if kind == "integer":
        low = schema.get("minimum", 0)
        return draw.choice((low, low + 1, min(low + 7, schema.get("maximum", 10**6))))
    if kind == "number":
        low, high = schema.get("minimum", 0), schema.get("maximum", 10)
        return draw.choice((low + (high - low) / 2, low + (high - low) / 7))
    if kind == "boolean":
        return draw.random() < 0.5
    if kind == "string":
        return _text(draw, schema)
    if kind == "array":
        return [_value(draw, schema["items"]) for _ in range(draw.choice((0, 1, 2)))]
    if "properties" in schema:
        required = schema.get("required", ())
        return {
            name: _value(draw, inner)
            for name, inner in schema["properties"].items()
            if name in required or draw.random() < 0.3
        }
    if "additionalProperties" in schema:
        keys = draw.sample(("text", "books", "image", "a.b/c", "A"), k=draw.choice((1, 2)))
        return {key: _value(draw, schema["additionalProperties"]) for key in keys}
    return draw.choice(({}, {"name": "a"}, {"key": "a", "operator": "Exists"}, {"n": [1, None]}))


def _text(draw: random.Random, schema: Schema) -> str:
    pattern = schema.get("pattern", "")
    if pattern.startswith("^s3"):
        return draw.choice(("s3://omni/x", "s3://omni", "s3://a.b-c/d/e"))
    if pattern.startswith("^http"):
        return draw.choice(("http://127.0.0.1:8333", "https://s3.example"))
    return draw.choice(("txt", "a", "rack", "png"))


def shown(case: Case) -> str:
    """A case for a message: its changes and what stands there."""
    said = []
    for change in case.changes:
        try:
            value = json.dumps(_holder(case.document, change.path)[change.path[-1]])[:60]
        except (KeyError, IndexError, TypeError):
            value = "nothing"
        said.append(f"{change.kind} at {'.'.join(map(str, change.path))}: {value}")
    return f"case {case.number}: {'; '.join(said)}"
