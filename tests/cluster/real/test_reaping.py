"""However a cluster of real nodes ends, the machine is as it was."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.api import wait_for
from tests.cluster.chart import ROOT
from tests.cluster.processes import ENV_MARK
from tests.cluster.real import cgroups
from tests.cluster.real.machine_init import KERNEL

_OWNER = """
import time
from pathlib import Path
from tests.cluster.real.cluster import RealCluster
with RealCluster(Path("state"), nodes=1) as cluster:
    kubectl = cluster.control_plane.kubectl
    kubectl("run", "sleeper", "--image=localhost/tiny:1")
    kubectl("wait", "pod/sleeper", "--for=condition=Ready")
    print("up", flush=True)
    time.sleep(120)
"""
_SHARED = ("/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet")


def traces(state: Path) -> set[str]:
    """What can be seen of clusters on this machine, and what they might change."""
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


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_nothing_is_left(end: signal.Signals, tmp_path: Path) -> None:
    before = traces(tmp_path)
    command = [sys.executable, "-c", _OWNER]
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        kinds = {trace.split()[0] for trace in traces(tmp_path) - before}
        owner.send_signal(end)
    assert kinds == {"cgroup", "file", "link", "process", "route"}  # and no mount
    with contextlib.suppress(AssertionError):  # the next line says what is left
        wait_for(lambda: not traces(tmp_path) - before, "no trace", 20)
    assert traces(tmp_path) - before == set()
