"""Real nodes for people, until Ctrl-C."""

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

from tests.cluster import binaries
from tests.cluster.real.cluster import RealCluster
from tests.cluster.real.requirements import MissingRequirement


def main() -> None:
    """Run until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.real.dev", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=8, help="that each node says it has")
    parser.add_argument("--archives", type=Path, help="folder with image archives (*.tar)")
    arguments = parser.parse_args()
    archives = sorted(arguments.archives.glob("*.tar")) if arguments.archives else []
    if arguments.archives and not archives:
        sys.exit(f"--archives: {arguments.archives} has no *.tar; make some with `make images`")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            _run(RealCluster(nodes=arguments.nodes, gpus=arguments.gpus, archives=archives))
        except MissingRequirement as exc:
            sys.exit(str(exc))


def _run(cluster: RealCluster) -> None:
    print("Starting; images are imported first.", flush=True)
    with cluster:
        print(f"{len(cluster.nodes)} real nodes are Ready: {', '.join(cluster.nodes)}")
        print("In another terminal, as root:\n")
        print(f"  export KUBECONFIG={cluster.control_plane.admin_kubeconfig}")
        folders = [binaries.path(program).parent for program in ("kubectl", "helm")]
        folders.append(Path(sys.executable).parent)
        print(f"  export PATH={':'.join(map(str, folders))}:$PATH")
        print("  kubectl get nodes\n")
        print("Ctrl-C ends and removes all of it.", flush=True)
        while True:
            time.sleep(1)


if __name__ == "__main__":
    main()
