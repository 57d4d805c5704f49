"""What real nodes need of this machine, checked before anything is started."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.cluster import binaries

CNI_PLUGINS: Final = Path("/usr/lib/cni")
"""Where Debian's package puts them."""

_PACKAGES: Final = {
    "busybox": "busybox-static",
    "conntrack": "conntrack",
    "containerd": "containerd",
    "containerd-shim-runc-v2": "containerd",
    "ctr": "containerd",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    str(CNI_PLUGINS / "host-local"): "containernetworking-plugins",
}
"""Debian package of each program."""
_PROGRAMS: Final = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "coredns",
    "kubelet",
    "kube-proxy",
)
"""That `make cluster-bin REAL=1` builds."""
_HIDDEN: Final = (Path("/run"), Path("/var"))
"""Folders of which a node has its own."""


class MissingRequirement(RuntimeError):
    """This machine cannot run real nodes as it is."""


def missing_packages(has_program: Callable[[str], bool]) -> list[str]:
    """Debian packages to install, given what is there."""
    return sorted({package for name, package in _PACKAGES.items() if not has_program(name)})


def require(folder: Path, *, user_id: int) -> None:
    """Raise MissingRequirement where this machine lacks something; `folder`: where state goes."""
    if user_id != 0:
        raise MissingRequirement(
            "real nodes need root for namespaces, mounts and cgroups: run this with sudo"
        )
    if missing := missing_packages(_has_program):
        raise MissingRequirement(
            f"real nodes need programs that are not installed; on Debian and Ubuntu: "
            f"apt-get install --no-install-recommends {' '.join(missing)}"
        )
    require_programs()
    require_visible(folder)


def require_programs() -> None:
    """Raise MissingRequirement where a program is not built that these clusters run."""
    if missing := [program for program in _PROGRAMS if not _is_built(program)]:
        folder = os.environ.get(binaries.ENV_FOLDER)
        build = "run `make cluster-bin REAL=1`"
        raise MissingRequirement(
            f"real nodes need programs that are not built: {', '.join(missing)}; "
            + (f"put them into {folder}, which {binaries.ENV_FOLDER} names" if folder else build)
        )


def require_visible(folder: Path) -> None:
    """Raise MissingRequirement where nodes would not see a folder of this machine."""
    for hidden in _HIDDEN:
        if folder.resolve().is_relative_to(hidden):
            raise MissingRequirement(
                f"{folder}: a node has a {hidden} of its own and would not see this folder; "
                f"use another, for temporary files by the variable TMPDIR"
            )


def _is_built(program: str) -> bool:
    try:
        binaries.path(program)
    except FileNotFoundError:
        return False
    return True


def _has_program(name: str) -> bool:
    found = shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")
    return found is not None and (name != "busybox" or _is_static(Path(found)))


def _is_static(program: Path) -> bool:
    """Whether it runs in an image without libraries, so names no loader."""
    with program.open("rb") as file:
        return b"/ld-linux" not in file.read(4096)
