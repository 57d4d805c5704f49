"""A cgroup for each node: its kubelet keeps its pods there, apart from those of the others.

With cgroup v1 a cgroup is a folder under each controller, with v2 it is one folder.
"""

from pathlib import Path
from typing import Final

from tests.cluster.processes import Processes

ROOT: Final = Path("/sys/fs/cgroup")

_CONTROLLERS: Final = "cgroup.controllers"
_HANDED_DOWN: Final = "cgroup.subtree_control"
"""With v2: the files with the controllers of a cgroup, and of those below it."""
_WANTED: Final = ("cpu", "cpuset", "io", "memory", "pids")


class CgroupError(RuntimeError):
    """This machine gives nodes no cgroups."""


def hierarchies(root: Path) -> list[Path]:
    """The tops of the trees of cgroups: one with v2, one a controller with v1."""
    if (root / _CONTROLLERS).is_file():
        return [root]
    found = sorted(folder for folder in root.glob("*/") if (folder / "cgroup.procs").is_file())
    if not found:
        raise CgroupError(f"{root}: no cgroups are mounted here, neither v1 nor v2")
    return found


def make_cgroups(processes: Processes, cluster: str, nodes: list[str], root: Path = ROOT) -> None:
    """Make the cgroup /CLUSTER/NODE of each node; removed after `processes`, with all below."""
    tops = hierarchies(root)
    for top in tops:
        if added := _not_handed_down(top):
            taken_back = " ".join(f"-{controller}" for controller in added)
            processes.run_at_end("sh", "-c", f'echo "{taken_back}" > "$0"', top / _HANDED_DOWN)
    folders = [top / cluster for top in tops]
    processes.run_at_end("find", *folders, "-depth", "-type", "d", "-delete")
    for folder in folders:
        for made in (folder, *(folder / node for node in nodes)):
            made.mkdir()
            hand_down(made)


def hand_down(folder: Path) -> None:
    """What a new cgroup does not have by itself of the one above."""
    for name in ("cpuset.cpus", "cpuset.mems"):  # v1: empty, and no process may enter
        if (folder / name).is_file() and not (folder / _CONTROLLERS).is_file():
            (folder / name).write_text((folder.parent / name).read_text())
    added = _not_handed_down(folder.parent)
    if not added:
        return
    try:
        enabled = " ".join(f"+{controller}" for controller in added)
        (folder.parent / _HANDED_DOWN).write_text(enabled)
    except OSError as exc:
        raise CgroupError(
            f"{folder.parent / _HANDED_DOWN}: {exc.strerror}; real nodes need the cgroup of the "
            f"whole machine: run this outside of containers, or in one with a cgroup namespace of "
            f"the host (--cgroupns=host)"
        ) from exc


def _not_handed_down(above: Path) -> list[str]:
    """Controllers that a cgroup of v2 has, and that those below it still lack; v1: none."""
    there, handed_down = (
        (above / name).read_text().split() if (above / name).is_file() else []
        for name in (_CONTROLLERS, _HANDED_DOWN)
    )
    return sorted({*_WANTED}.intersection(there).difference(handed_down))
