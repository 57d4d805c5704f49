"""Reading a job file: YAML text to a validated `Job`."""

from pathlib import Path

import yaml

from omni_contract.errors import SpecError
from omni_contract.spec import Job


def read_job(path: Path) -> Job:
    """Read and validate one job file.

    Raises SpecError: no such file, no YAML (with line and column), or any wrong field.
    """
    try:
        text = path.read_text()
    except OSError as exc:
        raise SpecError(str(path), f"cannot be read: {exc.strerror}") from None
    try:
        raw = yaml.safe_load(text)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SpecError(str(path), f"no YAML: {where}{exc.problem or exc}") from None
    except yaml.YAMLError as exc:
        raise SpecError(str(path), f"no YAML: {exc}") from None
    return Job.read(raw)
