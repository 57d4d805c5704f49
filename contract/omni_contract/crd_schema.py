"""Turns a model into the structural schema that Kubernetes wants: no references, no unions.

What a structural schema cannot say (names of map keys, rules between fields, what may not change)
becomes CEL rules beside it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

Schema = dict[str, Any]

RULES = "x-kubernetes-validations"
_KEPT = (
    "type", "format", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "minItems", "maxItems", "minProperties", "maxProperties", "anyOf",
    "x-kubernetes-int-or-string", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
)  # fmt: skip


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model and of every block in it, descriptions kept."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    blocks = {block.__name__: block for block in _blocks(model)}
    return _convert(document, document.get("$defs", {}), blocks)


def _blocks(model: type[BaseModel]) -> Iterable[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for inner in _models_in(field.annotation):
            yield from _blocks(inner)


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for arg in get_args(annotation):
        yield from _models_in(arg)


def _convert(
    node: Mapping[str, Any],
    definitions: Mapping[str, Schema],
    blocks: Mapping[str, type[BaseModel]],
) -> Schema:
    described = {"description": " ".join(node["description"].split())} if _text(node) else {}
    if "$ref" in node:
        target = definitions[node["$ref"].rsplit("/", 1)[-1]]
        return _convert(target, definitions, blocks) | described
    if "anyOf" in node and "x-kubernetes-int-or-string" not in node:
        (one,) = (branch for branch in node["anyOf"] if branch.get("type") != "null")
        made = _convert(one, definitions, blocks) | described
        # The API server drops null where it is not nullable, but would hold it against an enum.
        return made if "enum" in made else made | {"nullable": True}
    made = described | {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        made["enum"] = [node["const"]]
    if made.get("type") == "integer":
        made["format"] = "int64"
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if exclusive in node:  # OpenAPI 3.0 says it with a flag
            made |= {bound: node[exclusive], exclusive: True}
    if "items" in node:
        made["items"] = _convert(node["items"], definitions, blocks)
    if node.get("type") == "object":
        made |= _object(node, definitions, blocks)
    return made


def _text(node: Mapping[str, Any]) -> bool:
    return isinstance(node.get("description"), str)


def _object(
    node: Mapping[str, Any],
    definitions: Mapping[str, Schema],
    blocks: Mapping[str, type[BaseModel]],
) -> Schema:
    if "properties" not in node:
        return _map(node, definitions, blocks)
    properties = {
        name: _convert(child, definitions, blocks) for name, child in node["properties"].items()
    }
    made: Schema = {"properties": properties}
    if node.get("required"):
        made["required"] = list(node["required"])
    block = blocks[node["title"]]
    rules = [{"rule": r, "message": m} for r, m in getattr(block, "cel_rules", ())]
    for name in getattr(block, "immutable", ()):
        message = f"{name} cannot change in a job that exists; create a new job"
        properties[name].setdefault(RULES, []).append(
            {"rule": "self == oldSelf", "message": message}
        )
        if name not in made.get("required", ()):
            # A rule on the field itself sleeps while the field comes or goes.
            rules.append({"rule": f"has(self.{name}) == has(oldSelf.{name})", "message": message})
    if rules:
        made[RULES] = rules
    return made


def _map(
    node: Mapping[str, Any],
    definitions: Mapping[str, Schema],
    blocks: Mapping[str, type[BaseModel]],
) -> Schema:
    """A map with names of the user's choice, or an object in another project's form."""
    names = dict(node.get("propertyNames", {}))
    if "$ref" in names:
        names = dict(definitions[names["$ref"].rsplit("/", 1)[-1]])
    values = node.get("additionalProperties", True)
    for pattern, schema in node.get("patternProperties", {}).items():
        names["pattern"], values = pattern, schema
    if values is True:
        return {"x-kubernetes-preserve-unknown-fields": True}
    made: Schema = {"additionalProperties": _convert(values, definitions, blocks)}
    rules = []
    if "enum" in names:
        allowed = ", ".join(f"'{name}'" for name in names["enum"])
        rules.append((f"self.all(k, k in [{allowed}])", f"the names here are {allowed}"))
    elif "pattern" in names:
        # The pattern bounds the length, too.
        rules.append(
            (f"self.all(k, k.matches('{names['pattern']}'))", f"names match {names['pattern']}")
        )
    elif "maxLength" in names:
        most = names["maxLength"]
        rules.append((f"self.all(k, size(k) <= {most})", f"names have at most {most} characters"))
    if rules:
        made[RULES] = [{"rule": rule, "message": message} for rule, message in rules]
    return made
