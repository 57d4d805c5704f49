"""What the API server would say about a job: structural schema, unknown fields, CEL rules."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema
from cel_expr_python import cel

from omni_contract.crd import crd
from omni_contract.crd_schema import RULES, Schema

ENV = cel.NewEnv(variables={"self": cel.Type.DYN, "oldSelf": cel.Type.DYN})


@cache
def root_schema() -> Schema:
    schema: Schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def refusals(job: Any, *, old: Any = None) -> list[str]:
    """Why kubectl would be refused; empty where the job is accepted."""
    schema = root_schema()
    job, old = _dropped(schema, job), _dropped(schema, old)
    # OpenAPI 3.0 is draft 4 of JSON schema, with `nullable` beside it.
    validator = jsonschema.Draft4Validator(_with_null(schema))
    found = [f"{e.json_path}: {e.message}" for e in validator.iter_errors(job)]
    found += list(_unknown(schema, job, "$"))
    return found or list(_broken_rules(schema, job, old, "$"))


def _dropped(schema: Schema, value: Any) -> Any:
    """Without the nulls that the API server drops: those of fields that are not nullable."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    if isinstance(value, Mapping):
        return {
            name: inner if child is None else _dropped(child, inner)
            for name, child, inner in _children(schema, value)
            if inner is not None or child is None or child.get("nullable")
        }
    if isinstance(value, list) and "items" in schema:
        return [_dropped(schema["items"], inner) for inner in value]
    return value


def _with_null(schema: Schema) -> Schema:
    made: Schema = {}
    for key, value in schema.items():
        if key in ("properties",):
            made[key] = {name: _with_null(child) for name, child in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            made[key] = _with_null(value)
        elif key == "anyOf":
            made[key] = value
        else:
            made[key] = value
    return {"anyOf": [{"type": "null"}, made]} if schema.get("nullable") else made


def _unknown(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Strict field validation, which is kubectl's default."""
    if path == "$.metadata" or schema.get("x-kubernetes-preserve-unknown-fields"):
        return
    for name, child, inner in _children(schema, value):
        if child is None:
            yield f"{path}.{name}: unknown field"
        else:
            yield from _unknown(child, inner, f"{path}.{name}")


def _children(schema: Schema, value: Any) -> Iterator[tuple[str, Schema | None, Any]]:
    if isinstance(value, Mapping) and schema.get("type") == "object":
        for name, inner in value.items():
            yield (
                name,
                schema.get("properties", {}).get(name, schema.get("additionalProperties")),
                inner,
            )
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield str(i), schema["items"], inner


def _broken_rules(schema: Schema, value: Any, old: Any, path: str) -> Iterator[str]:
    for rule in schema.get(RULES, ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        data = {"self": _typed(schema, value), "oldSelf": _typed(schema, old)}
        if ENV.compile(rule["rule"]).eval(data=data).plain_value() is not True:
            yield f"{path}: {rule['message']}"
    for name, child, inner in _children(schema, value):
        before = old.get(name) if isinstance(old, Mapping) else None
        if child is not None and inner is not None:
            yield from _broken_rules(child, inner, before, f"{path}.{name}")


def _typed(schema: Schema | None, value: Any) -> Any:
    """As CEL sees it: a null field is absent, and a `number` is a double."""
    if isinstance(value, Mapping) and schema is not None:
        known = schema.get("properties", {})
        other = schema.get("additionalProperties")
        return {
            name: _typed(known.get(name, other), inner)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list) and schema is not None:
        return [_typed(schema.get("items"), inner) for inner in value]
    if schema is not None and schema.get("type") == "number":
        return float(value)
    return value
