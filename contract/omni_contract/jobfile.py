"""Reads a job file. The YAML dialect is PyYAML's safe one, with duplicate keys refused."""

from pathlib import Path
from typing import Any

import yaml

from omni_contract.errors import SpecError
from omni_contract.spec import Job


class _Loader(yaml.SafeLoader):
    """SafeLoader that does not let a second key silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                continue
            key = key_node.value
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_job(path: Path) -> Job:
    """Read and check a job file. Raises SpecError with every problem in it."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise SpecError(str(path), "there is no such file; give the path of a job YAML") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(str(path), f"cannot be read: {exc}") from None
    try:
        # _Loader derives from SafeLoader.
        raw = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(str(path), f"{where}{exc.problem}; mend the YAML there") from None
    except RecursionError:
        raise SpecError(str(path), "its blocks are nested too deep; this is no job file") from None
    except yaml.YAMLError as exc:
        raise SpecError(str(path), f"no YAML: {exc}") from None
    return Job.read(raw)
