"""Job documents for tests: the demo's, and changed copies of it."""

import copy
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "manifests" / "examples"
DEMO: dict[str, Any] = yaml.safe_load((EXAMPLES / "demo.yaml").read_text())


def changed(path: str, value: Any) -> dict[str, Any]:
    """The demo job with one value set; `...` takes it away, numbers in `path` index lists."""
    job = copy.deepcopy(DEMO)
    *before, last = path.split(".")
    here: Any = job
    for step in before:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is ...:
        del here[last]
    elif isinstance(here, list):
        here[int(last)] = value
    else:
        here[last] = value
    return job
