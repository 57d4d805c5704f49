"""What clusters of real nodes leave on the machine while they run, and must not leave behind."""

import json
import subprocess
from pathlib import Path
from typing import Final

import psutil

from tests.cluster.processes import ENV_MARK
from tests.cluster.real import cgroups
from tests.cluster.real.machine_init import KERNEL

_SHARED: Final = ("/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet")


def traces(state: Path) -> set[str]:
    """What can be seen of clusters on this machine, with state below a folder, and what they might
    change. Each begins with its kind."""
    found = {f"setting {key}={Path('/proc/sys', key).read_text()}" for key in KERNEL}
    for kind, key in {"link": "ifname", "route": "dev"}.items():
        listed = json.loads(subprocess.check_output(["ip", "-json", kind, "show"]))
        found |= {f"{kind} {one}" for one in listed if one[key].startswith("omni")}
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found |= {f"mount {line}" for line in mounts if str(state) in line}
    found |= {f"cgroup {path}" for path in cgroups.ROOT.glob("**/omni*/")}
    files = [
        *state.glob("**/omni-cluster-*"),
        *(path for one in _SHARED for path in Path(one).glob("*")),
    ]
    found |= {f"file {path}" for path in files}
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get(ENV_MARK, "").startswith(str(state)):
            found.add(f"process {process.pid}")
    return found
