"""The command line of the operator."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omni_operator.settings import Settings

_DEFAULTS: Final = Settings(image="")
_PULL_POLICIES: Final = ("Always", "IfNotPresent", "Never")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    settings: Settings
    lease_namespace: str
    lease_name: str
    port: int
    log_level: str


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line. Ends the process where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_operator.main",
        description="Runs MultimodalTrainingJobs: places their pods, starts them all at once and "
        "replaces what fails. Several may run: the one that holds the Lease works, others wait.",
        epilog="The API server is found by KUBECONFIG, else by the pod's service account, else by "
        "~/.kube/config. On one's own machine: KUBECONFIG=cluster.yaml python -m "
        "omni_operator.main --image=trainer:dev --lease=default/omni --port=8080",
    )
    add = parser.add_argument
    add("--image", required=True, help="image of the trainer where a job names none")
    add(
        "--image-pull-policy",
        default=_DEFAULTS.image_pull_policy,
        choices=_PULL_POLICIES,
        help="when nodes pull it (default: %(default)s)",
    )
    add("--data-image", help="image of the data service where a job names none (default: --image)")
    add(
        "--data-image-pull-policy",
        choices=_PULL_POLICIES,
        help="when nodes pull it (default: --image-pull-policy)",
    )
    add("--priority-class", metavar="NAME", help="of pods whose job names none (default: none)")
    add("--watched-namespace", metavar="NAME", help="take jobs of this one only (default: of all)")
    add(
        "--cluster-domain",
        default=_DEFAULTS.cluster_domain,
        metavar="DOMAIN",
        help="in which pods find each other by name (default: %(default)s)",
    )
    add(
        "--with-kueue",
        action="store_true",
        help="jobs with a queueName wait until Kueue admits them",
    )
    add(
        "--lease",
        required=True,
        type=_lease,
        metavar="NAMESPACE/NAME",
        help="Lease whose holder works; the same for all that run on one cluster",
    )
    add(
        "--port",
        type=int,
        default=8080,
        help="serves /healthz, /readyz and /metrics; 0 takes a free one (default: %(default)s)",
    )
    add(
        "--max-concurrent-writes",
        type=_positive,
        default=_DEFAULTS.max_concurrent_writes,
        metavar="N",
        help="requests to the API server at once (default: %(default)s)",
    )
    add(
        "--resync-seconds",
        type=_positive,
        default=_DEFAULTS.resync_s,
        metavar="S",
        help="how often everything is listed and looked at again (default: %(default)s)",
    )
    add(
        "--log-level",
        default="INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        help="least important lines that are logged (default: %(default)s)",
    )
    read = parser.parse_args(arguments)
    namespace, name = read.lease
    return Options(
        settings=Settings(
            image=read.image,
            image_pull_policy=read.image_pull_policy,
            data_image=read.data_image,
            data_image_pull_policy=read.data_image_pull_policy,
            priority_class=read.priority_class,
            watched_namespace=read.watched_namespace,
            cluster_domain=read.cluster_domain,
            with_kueue=read.with_kueue,
            max_concurrent_writes=read.max_concurrent_writes,
            resync_s=read.resync_seconds,
        ),
        lease_namespace=namespace,
        lease_name=name,
        port=read.port,
        log_level=read.log_level,
    )


def _lease(text: str) -> tuple[str, str]:
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAMESPACE/NAME")
    return namespace, name


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)
