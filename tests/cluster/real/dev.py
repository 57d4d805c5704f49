"""Real nodes for people, until Ctrl-C; if asked, with the operator and an S3 server on them."""

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run until Ctrl-C or SIGTERM."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            _run(
                RealCluster(nodes=options.nodes, gpus=options.gpus, archives=options.archives),
                options,
            )
        except MissingRequirement as exc:
            sys.exit(str(exc))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.real.dev", description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=8, help="that each node says it has")
    parser.add_argument(
        "--archives", type=_archives, default=[], help="folder with image archives (*.tar)"
    )
    parser.add_argument("--install", action="store_true", help="the chart, with values-dev.yaml")
    options = parser.parse_args(arguments)
    if options.install and not options.archives:
        parser.error("--install: its pods need images; name their folder by --archives")
    return options


def _archives(folder: str) -> list[Path]:
    found = sorted(Path(folder).glob("*.tar"))
    if not found:
        raise argparse.ArgumentTypeError(
            f"{folder} has no *.tar; `make images ARCHIVE={folder}` makes some"
        )
    return found


def _run(cluster: RealCluster, options: argparse.Namespace) -> None:
    names = [archive.name for archive in options.archives] or ["none"]
    print(f"Starting. Image archives: {', '.join(names)}", flush=True)
    with cluster:
        print(f"{len(cluster.nodes)} real nodes are Ready: {', '.join(cluster.nodes)}")
        if options.install:
            _install_chart(cluster)
        print("In another terminal, as root:\n")
        print(f"  export KUBECONFIG={cluster.control_plane.admin_kubeconfig}")
        folders = [binaries.path(program).parent for program in ("kubectl", "helm")]
        folders.append(Path(sys.executable).parent)
        print(f"  export PATH={':'.join(map(str, folders))}:$PATH")
        print("  kubectl get nodes,pods --all-namespaces\n")
        if not options.install:
            print("Nothing is installed. docs/install.md says how, also for such a cluster.")
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
