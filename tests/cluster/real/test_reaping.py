"""However a cluster of real nodes ends, the machine is as it was."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.api import wait_for
from tests.cluster.chart import ROOT
from tests.cluster.real.traces import traces

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
