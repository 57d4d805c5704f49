"""A cgroup for each node: its kubelet keeps its pods there, apart from those of the others.

With cgroup v1 a cgroup is a folder under each controller, with v2 it is one folder.
"""

from pathlib import Path
from typing import Final

from tests.cluster.processes import Processes

ROOT: Final = Path("/sys/fs/cgroup")

_WANTED: Final = ("cpu", "cpuset", "io", "memory", "pids")


class CgroupError(RuntimeError):
    """This machine gives nodes no cgroups."""


def hierarchies(root: Path) -> list[Path]:
    """The tops of the trees of cgroups: one with v2, one a controller with v1."""
    if (root / "cgroup.controllers").is_file():
        return [root]
    found = sorted(folder for folder in root.glob("*/") if (folder / "cgroup.procs").is_file())
    if not found:
        raise CgroupError(f"{root}: no cgroups are mounted here, neither v1 nor v2")
    return found


def make_cgroups(processes: Processes, cluster: str, nodes: list[str], root: Path = ROOT) -> None:
    """Make the cgroup /CLUSTER/NODE of each node; removed after `processes`, with all below."""
    tops = [top / cluster for top in hierarchies(root)]
    processes.run_at_end("find", *tops, "-depth", "-type", "d", "-delete")
    for top in tops:
        for folder in (top, *(top / node for node in nodes)):
            folder.mkdir()
            hand_down(folder)


def hand_down(folder: Path) -> None:
    """What a new cgroup does not have by itself of the one above."""
    for name in ("cpuset.cpus", "cpuset.mems"):  # v1: empty, and no process may enter
        if (folder / name).is_file() and not (folder / "cgroup.controllers").is_file():
            (folder / name).write_text((folder.parent / name).read_text())
    above = folder.parent / "cgroup.controllers"
    if above.is_file():  # v2: controllers must be handed down from above
        there = sorted(set(_WANTED).intersection(above.read_text().split()))
        enabled = " ".join(f"+{controller}" for controller in there)
        try:
            (folder.parent / "cgroup.subtree_control").write_text(enabled)
        except OSError as exc:
            raise CgroupError(
                f"{folder.parent}/cgroup.subtree_control: {exc.strerror}; real nodes need the "
                f"cgroup of the whole machine: run this outside of containers, or in one with a "
                f"cgroup namespace of the host (--cgroupns=host)"
            ) from exc
