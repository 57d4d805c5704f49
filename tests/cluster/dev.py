"""A control plane for people: simulated nodes and ranks, an operator with the chart's rights, until
Ctrl-C."""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from typing import Final

from tests.cluster import binaries
from tests.cluster.chart import install_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.history import History
from tests.cluster.job_kind import install_job_kind
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.processes import Processes, free_port, last_lines
from tests.cluster.ranks import STEP_S, Ranks

NAMESPACE: Final = "omni-system"

_ZONES: Final = 2
_RACKS: Final = 2
"""In each zone."""


def start_operator(control_plane: ControlPlane) -> int:
    """Run this checkout's operator with the chart's rights and arguments; returns its HTTP port."""
    control_plane.create_namespace(NAMESPACE)
    chart = install_chart(control_plane, NAMESPACE)
    port = free_port()
    command = [sys.executable, "-m", "omni_operator.main", *chart.arguments, f"--port={port}"]
    control_plane.processes.start("operator", command, env={"KUBECONFIG": str(chart.kubeconfig)})
    return port


def revive_operator(processes: Processes) -> None:
    """Start it again where it ended, as its Deployment would."""
    if processes.has_ended("operator"):
        print(f"The operator ended and is started again. {last_lines(processes.log('operator'))}")
        processes.stop("operator")
        processes.start_again("operator")


def main() -> None:
    """Run until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.dev", description=__doc__)
    parser.add_argument("--nodes", type=int, default=16, help="rounded up to whole racks")
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--no-operator", action="store_true", help="the job kind alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        contextlib.suppress(KeyboardInterrupt),
        ControlPlane() as control_plane,
        contextlib.ExitStack() as stack,
    ):
        in_rack = -(-arguments.nodes // (_ZONES * _RACKS))
        grid = Grid(zones=_ZONES, racks=_RACKS, nodes=in_rack, gpus=arguments.gpus)
        names = Nodes(control_plane).add(grid)
        print(f"{len(names)} simulated nodes with {arguments.gpus} GPUs, {in_rack} in each rack.")
        if arguments.no_operator:
            install_job_kind(control_plane)
        else:
            port = start_operator(control_plane)
            print(f"Operator: log {control_plane.processes.log('operator')},")
            print(f"  http://127.0.0.1:{port}/metrics")
        recorded = stack.enter_context(History(control_plane.api))
        ranks = stack.enter_context(Ranks(control_plane.api, recorded))
        print(f"Ranks are simulated: a step takes {STEP_S:g} s and learns nothing.")
        print("In another terminal:\n")
        print(f"  export KUBECONFIG={control_plane.admin_kubeconfig}")
        folders = (binaries.path("kubectl").parent, Path(sys.executable).parent)
        print(f"  export PATH={':'.join(map(str, folders))}:$PATH")
        print("  kubectl apply -f manifests/examples/demo.yaml")
        print("  kubectl mmtj status --watch\n")
        print("Ctrl-C ends and removes all of it.", flush=True)
        while True:
            time.sleep(1)
            ranks.check()
            if not arguments.no_operator:
                revive_operator(control_plane.processes)


if __name__ == "__main__":
    main()
