"""Measures the operator: `python -m benchmarks.operator.main`. Writes out/bench/operator.json."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.operator import placement
from benchmarks.operator.faults import measure_faults
from benchmarks.operator.figures import Figure, write_figures
from benchmarks.operator.scene import NAMESPACE, RELEASE, Scene
from benchmarks.operator.start import measure_first_start, measure_starts
from tests.cluster.chart import install_chart
from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.history import History
from tests.cluster.nodes import Grid, Nodes

OUT: Final = Path(__file__).resolve().parents[2] / "out" / "bench" / "operator.json"

_QPS: Final = 500
_HEARTBEAT_S: Final = 18.0
"""Of the simulated nodes. A thousand kubelets' usual 10 s would take a third of a small machine."""
_KWOK_HEARTBEAT_S: Final = 25.0
_GRACE_S: Final = 50.0
"""After which a node without one is NotReady: Kubernetes' default."""
_IN_RACK: Final = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and tell. Returns 0 also where a goal is missed: that is a result."""
    given = _parse(arguments)
    begin_s = time.monotonic()
    racks = -(-given.nodes // _IN_RACK)
    blocks = -(-racks // 5)
    grid = Grid(blocks=blocks, racks=-(-racks // blocks), nodes=_IN_RACK)
    figures = list(_told(placement.measure(grid, given.job_nodes)))
    options = Options(
        heartbeat_s=_KWOK_HEARTBEAT_S,
        node_monitor_grace_s=_GRACE_S,
        kube_api_qps=_QPS,
        patience_s=60,
    )
    with ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane(options))
        names = Nodes(control_plane).add(grid)
        control_plane.processes.start(
            "heartbeats",
            [sys.executable, "-m", "benchmarks.operator.heartbeats", str(_HEARTBEAT_S)],
            env={
                "KUBECONFIG": str(control_plane.admin_kubeconfig),
                "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            },
        )
        control_plane.create_namespace(NAMESPACE)
        control_plane.create_namespace(RELEASE)
        installed = install_chart(control_plane, RELEASE)
        history = stack.enter_context(History(control_plane.api))
        scene = Scene(control_plane, history)
        scene.say(f"{len(names)} simulated nodes are ready")
        scene.start_operator(installed)
        user = f"system:serviceaccount:{installed.namespace}:{installed.service_account}"
        figures += _told(
            measure_first_start(
                scene, num_nodes=given.job_nodes, num_small=given.small_jobs, user=user
            )
        )
        figures += _told(measure_starts(scene, num_nodes=given.job_nodes, times=given.times))
        figures += _told(measure_faults(scene, num_nodes=given.job_nodes, times=given.times))
        usage = scene.usage()
        memory = Figure(
            name="memory of the operator",
            value=usage.most_memory_mb,
            unit="MB",
            goal=200,
            how="most resident memory (VmHWM) over the whole run",
        )
        cpu = Figure(
            name="CPU of the operator",
            value=usage.cpu_s,
            unit="s",
            how=f"over the whole run of {time.monotonic() - begin_s:.0f} s",
        )
        figures += _told(iter([memory, cpu]))
    write_figures(
        given.out,
        figures,
        seconds=round(time.monotonic() - begin_s),
        nodes=len(names),
        job_nodes=given.job_nodes,
        small_jobs=given.small_jobs,
        cores=os.cpu_count(),
    )
    missed = [figure for figure in figures if figure.ok is False]
    print(f"\n{len(figures)} figures are in {given.out}.")
    for figure in missed:
        print(f"GOAL MISSED  {figure}")
    if not missed:
        print("All goals are met.")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator.main", description=__doc__)
    add = parser.add_argument
    add("--nodes", type=int, default=1000, help="simulated, 8 GPUs each (default: %(default)s)")
    add("--job-nodes", type=int, default=512, help="of the large job (default: %(default)s)")
    add("--small-jobs", type=int, default=50, help="beside it (default: %(default)s)")
    add("--times", type=int, default=3, help="each measurement is made (default: %(default)s)")
    add("--out", type=Path, default=OUT, help="file to write (default: %(default)s)")
    return parser.parse_args(arguments)


def _told(figures: Iterator[Figure]) -> Iterator[Figure]:
    for figure in figures:
        print(f"          {figure}", flush=True)
        yield figure


if __name__ == "__main__":
    sys.exit(main())
