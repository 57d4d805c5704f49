"""Kubernetes, etcd, KWOK and their like, built once from the Go modules that `tools/` pins.

Each tool lies in the user's cache under a hash of its pins and flags, so that an edit of one go.mod
builds that tool alone, and all checkouts share what is built.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.cluster.go import GoError, run_go

ENV_FOLDER: Final = "OMNI_CLUSTER_BIN"
"""A folder with ready binaries, used instead of the cache."""

_MODULES: Final = Path(__file__).parent / "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """What one Go module without code of its own builds, by its `tool` lines."""

    name: str
    """Of the folder with its go.mod."""
    programs: tuple[str, ...]
    modules: Path = _MODULES
    stamped_by: str | None = None
    """Module whose version Kubernetes' programs report; without it they call themselves v0.0.0."""

    @property
    def folder(self) -> Path:
        """Where its go.mod and go.sum are."""
        return self.modules / self.name

    @property
    def ldflags(self) -> str:
        """What the linker is told."""
        flags = ["-s", "-w"]
        if self.stamped_by is not None:
            pins = (self.folder / "go.mod").read_text()
            match = re.search(rf"^\s*{re.escape(self.stamped_by)} (v(\d+)\.(\d+)\S*)", pins, re.M)
            assert match, f"{self.folder}/go.mod does not require {self.stamped_by}"
            base, client = "k8s.io/component-base/version", "k8s.io/client-go/pkg/version"
            flags += [f"-X {base}.gitVersion={match[1]}", f"-X {client}.gitVersion={match[1]}"]
            flags += [f"-X {base}.gitMajor={match[2]}", f"-X {base}.gitMinor={match[3]}"]
        return " ".join(flags)

    def built(self, cache_folder: Path) -> Path:
        """The folder of its programs, there or not."""
        pins = hashlib.sha256(self.ldflags.encode())
        for name in ("go.mod", "go.sum"):
            pins.update(b"\0" + (self.folder / name).read_bytes())
        return cache_folder / f"{self.name}-{pins.hexdigest()[:16]}"


_KUBERNETES: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
TOOLS: Final = (
    Tool(name="etcd", programs=("etcd",)),
    Tool(name="kubernetes", programs=_KUBERNETES, stamped_by="k8s.io/kubernetes"),
    Tool(name="kwok", programs=("kwok",)),
    Tool(name="helm", programs=("helm",)),
    Tool(name="kueue", programs=("kueue",)),
)
"""What the cluster tests need."""
PEERS: Final = (Tool(name="jobset", programs=("jobset",)),)
"""What the benchmark compares with."""
REAL: Final = (
    # Beside `kubernetes`, with the same pins: whoever simulates nodes need not build this.
    Tool(
        name="kubernetes-node", programs=("kubelet", "kube-proxy"), stamped_by="k8s.io/kubernetes"
    ),
    Tool(name="coredns", programs=("coredns",)),
)
"""What real nodes run."""

_OPTIONS: Final = {"PEERS": PEERS, "REAL": REAL}
"""What is only built when asked for, by the variable of `make cluster-bin` that does."""


def cache_folder() -> Path:
    """Where built programs are kept; removing it costs the time to build them again."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "megascale-omni" / "cluster"


def path(program: str) -> Path:
    """A built program. Raises FileNotFoundError where it is missing: tests must not skip then."""
    ready = os.environ.get(ENV_FOLDER)
    if ready:
        found, way_out = Path(ready) / program, f"{ENV_FOLDER} must name a folder that has it"
    else:
        tool = next(tool for tool in TOOLS + PEERS + REAL if program in tool.programs)
        asked = "".join(f" {name}=1" for name, tools in _OPTIONS.items() if tool in tools)
        found = tool.built(cache_folder()) / program
        way_out = f"run `make cluster-bin{asked}`"
    if not found.is_file():
        raise FileNotFoundError(f"{found}: this program is not built; {way_out}")
    return found


@cache
def module_dir(tool: str, module: str) -> Path:
    """The source folder of a pinned module: its CRDs, roles and stages are read from there."""
    printed = run_go("mod", "download", "-json", module, cwd=_MODULES / tool)
    return Path(json.loads(printed)["Dir"])


def build(tools: Sequence[Tool], folder: Path) -> None:
    """Build what is missing into `folder`, one tool after the other. A second builder waits."""
    with _locked(folder):
        for tool in tools:
            target = tool.built(folder)
            if target.is_dir():
                continue
            print(f"{tool.name}: building {', '.join(tool.programs)}", flush=True)
            start = time.monotonic()
            _build(tool, target)
            print(f"{tool.name}: built in {time.monotonic() - start:.0f} s", flush=True)


def _build(tool: Tool, target: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f".{tool.name}-", dir=target.parent))
    try:
        # A folder as output takes the programs' names from their packages, a file its own.
        output = f"{partial}/" if len(tool.programs) > 1 else str(partial / tool.programs[0])
        run_go(
            *("build", "-trimpath", "-ldflags", tool.ldflags, "-o", output, "tool"),
            cwd=tool.folder,
            env={"CGO_ENABLED": "0"},
        )
        missing = [name for name in tool.programs if not (partial / name).is_file()]
        assert not missing, f"{tool.folder}/go.mod: its tool lines do not build {missing}"
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another build is running; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Build from the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.binaries", description=__doc__)
    parser.add_argument(
        "--peers", action="store_true", help="also what the benchmark compares with"
    )
    parser.add_argument("--real", action="store_true", help="also what real nodes run")
    arguments = parser.parse_args()
    tools = TOOLS + (PEERS if arguments.peers else ()) + (REAL if arguments.real else ())
    try:
        build(tools, cache_folder())
    except GoError as exc:
        sys.exit(str(exc))
    print(f"all built: {', '.join(tool.name for tool in tools)}, in {cache_folder()}")


if __name__ == "__main__":
    main()
