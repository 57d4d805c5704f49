"""Kubernetes, etcd, KWOK and Helm, built from the Go modules that `tools/` pins: path(tool) finds them.

Each tool lies in a folder of the user's cache that is named by its pins, so an edit of one go.mod
builds that tool alone, and every checkout shares them.
"""

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

ENV_FOLDER: Final = "OMNI_CLUSTER_BIN"
"""A folder with ready binaries, used instead of the cache."""
_TOOLS: Final = Path(__file__).parent / "tools"


def path(tool: str) -> Path:
    found = Path(os.environ[ENV_FOLDER]) / tool
    assert found.exists(), found
    return found


@cache
def module_dir(tool: str, module: str) -> Path:
    done = subprocess.run(
        ["go", "list", "-m", "-f", "{{.Dir}}", module],
        cwd=_TOOLS / tool,
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())
