"""Real nodes for people, until Ctrl-C; with images also the operator and an S3 server on them."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests.cluster import binaries
from tests.cluster.chart import CHART, RELEASE, helm
from tests.cluster.dev import NAMESPACE
from tests.cluster.real.cluster import RealCluster
from tests.cluster.real.requirements import MissingRequirement


def main() -> None:
    """Run until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.real.dev", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=8, help="that each node says it has")
    parser.add_argument(
        "--archives", type=Path, help="folder with image archives (*.tar); the chart is installed"
    )
    arguments = parser.parse_args()
    archives = sorted(arguments.archives.glob("*.tar")) if arguments.archives else []
    if arguments.archives and not archives:
        sys.exit(
            f"--archives: {arguments.archives} has no *.tar; `make images ARCHIVE=...` makes some"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            _run(
                RealCluster(nodes=arguments.nodes, gpus=arguments.gpus, archives=archives), archives
            )
        except MissingRequirement as exc:
            sys.exit(str(exc))


def _run(cluster: RealCluster, archives: Sequence[Path]) -> None:
    names = [archive.name for archive in archives] or ["none, so no chart is installed"]
    print(f"Starting. Image archives: {', '.join(names)}", flush=True)
    with cluster:
        print(f"{len(cluster.nodes)} real nodes are Ready: {', '.join(cluster.nodes)}")
        if archives:
            _install_chart(cluster)
        print("In another terminal, as root:\n")
        print(f"  export KUBECONFIG={cluster.control_plane.admin_kubeconfig}")
        folders = [binaries.path(program).parent for program in ("kubectl", "helm")]
        folders.append(Path(sys.executable).parent)
        print(f"  export PATH={':'.join(map(str, folders))}:$PATH")
        print("  kubectl get nodes,pods --all-namespaces\n")
        print("Ctrl-C ends and removes all of it.", flush=True)
        while True:
            time.sleep(1)


def _install_chart(cluster: RealCluster) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    # No image can be pulled; ours has the same S3 server in it.
    store = {"repository": "megascale-omni/cli", "tag": version}
    told = helm(
        *("install", RELEASE, str(CHART), f"--values={CHART / 'values-dev.yaml'}"),
        *(f"--set-string=objectStore.image.{key}={value}" for key, value in store.items()),
        *(f"--namespace={NAMESPACE}", "--create-namespace"),
        f"--kubeconfig={cluster.control_plane.admin_kubeconfig}",
    )
    print(f"\n{told}")


if __name__ == "__main__":
    main()
