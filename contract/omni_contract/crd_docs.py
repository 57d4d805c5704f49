"""Writes the reference of the job file: every field, its type, default and meaning."""

import json
from collections.abc import Iterator
from typing import Any

from omni_contract.crd_schema import RULES, Schema, structural
from omni_contract.spec import Job, JobSpec

_HEAD = """\
# The job file

Written from the models in `contract/omni_contract` by `make manifests`; edit there. An example is
`manifests/examples/demo.yaml`. `omni plan job.yaml` checks a file and shows what it means;
`manifests/job.schema.json` lets an editor check while you type.

```yaml
apiVersion: megascale-omni.dev/v1alpha1
kind: MultimodalTrainingJob
metadata:
  name: stamps        # at most 40 characters
spec:                 # the blocks below
```

*tokens* are a whole number, or one with k, M, B or T behind it: `50k`. *steps* are a whole number,
or `20 steps`. A field in **bold** is required. A dash as default means: left out.
"""


def reference() -> str:
    """The text of docs/job.md."""
    defaults = JobSpec.model_json_schema(by_alias=True)
    parts = [_HEAD]
    for path, block, definition in _blocks("spec", structural(JobSpec), defaults, defaults):
        rows = [
            f"| {_name(name, block)} | {_type(child)} | {_default(definition, name)} | "
            f"{_cell(child.get('description', ''))} |"
            for name, child in block["properties"].items()
        ]
        rules = dict.fromkeys(f"* {rule['message']}" for rule in block.get(RULES, ()))
        parts.append(
            "\n".join(
                [
                    f"## {path}\n",
                    f"{block.get('description', '')}\n",
                    "| field | type | default | meaning |",
                    "| --- | --- | --- | --- |",
                    *rows,
                    *(["", "Rules:", "", *rules] if rules else []),
                ]
            )
            + "\n"
        )
    return "\n".join(parts)


def _blocks(
    path: str, block: Schema, definition: Schema, root: Schema
) -> Iterator[tuple[str, Schema, Schema]]:
    """Every block of fields with its path, outer ones first."""
    yield path, block, definition
    for name, child in block["properties"].items():
        suffix, inner = "", child
        if "items" in inner:
            suffix, inner = "[]", inner["items"]
        elif "additionalProperties" in inner:
            suffix, inner = ".NAME", inner["additionalProperties"]
        if "properties" in inner:
            found = _definition(definition["properties"][name], root)
            yield from _blocks(f"{path}.{name}{suffix}", inner, found, root)


def _definition(node: Any, root: Schema) -> Schema:
    """The block that a field, its items or its values refer to."""
    if isinstance(node, dict):
        if "$ref" in node:
            found: Schema = root["$defs"][node["$ref"].rsplit("/", 1)[-1]]
            return found if "properties" in found else {}
        for key, inner in node.items():
            if key in ("anyOf", "items", "additionalProperties", "patternProperties"):
                for one in inner if isinstance(inner, list) else [inner, *_values(inner)]:
                    if definition := _definition(one, root):
                        return definition
    return {}


def _values(node: Any) -> list[Any]:
    return list(node.values()) if isinstance(node, dict) else []


def _name(name: str, block: Schema) -> str:
    return f"**`{name}`**" if name in block.get("required", ()) else f"`{name}`"


def _type(schema: Schema) -> str:
    if "enum" in schema:
        return _cell(", ".join(f"`{value}`" for value in schema["enum"]))
    if schema.get("x-kubernetes-int-or-string"):
        kind = "steps" if "steps" in schema["pattern"] else "tokens"
        return f"{kind} or `auto`" if "auto" in schema["pattern"] else kind
    if "items" in schema:
        return f"list of {_plural(schema['items'])}"
    if "additionalProperties" in schema:
        return f"map of {_plural(schema['additionalProperties'])}"
    if "properties" in schema:
        return "block"
    kinds = {"integer": "whole number", "string": "text", "boolean": "true, false"}
    return f"{kinds.get(schema['type'], schema['type'])}{_bounds(schema)}"


def _plural(schema: Schema) -> str:
    kinds = {"string": "texts", "number": "numbers", "integer": "whole numbers"}
    return kinds.get(schema.get("type", ""), "blocks")


def _bounds(schema: Schema) -> str:
    if "minimum" not in schema:
        return ""
    if "maximum" not in schema:
        return f", {schema['minimum']} or more"
    low = ("above " if schema.get("exclusiveMinimum") else "") + f"{schema.get('minimum', '')}"
    high = ("below " if schema.get("exclusiveMaximum") else "") + f"{schema.get('maximum', '')}"
    return f", {low} to {high}"


def _default(definition: Schema, name: str) -> str:
    field = definition["properties"][name]
    if name in definition.get("required", ()):
        return ""
    value = field.get("default")
    if value is None or isinstance(value, dict | list):
        return "-"
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def job_schema() -> Schema:
    """The JSON schema of a whole job file, for editors."""
    schema = Job.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
