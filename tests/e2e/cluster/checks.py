"""What is looked at beside the faults."""

from typing import Final

from tests.cluster.real.images import TINY_IMAGE
from tests.e2e.cluster.play import Play
from tests.e2e.cluster.record import Check
from tests.e2e.cluster.stage import NAMESPACE

_SHOWN: Final = 600
"""Characters of a log in the record."""


def check_stored_logs(play: Play, attempt: int, node: int) -> None:
    """Ask the plugin for what the trainer of an attempt that is over has said."""
    try:
        log = play.stage.mmtj("logs", play.job, f"--attempt={attempt}", f"--node={node}")
    except RuntimeError as exc:
        log = str(exc)
    play.check(
        Check.STORED_LOGS,
        f"attempt {attempt}: this pod is node {node}" in log,
        f"kubectl mmtj logs --attempt {attempt} --node {node} ends with {log[-_SHOWN:]!r}",
    )


def check_pod_security(play: Play) -> None:
    """Ask for a pod with more rights in the job's namespace."""
    asked = ("run", "privileged", f"--image={TINY_IMAGE}", "--privileged", "--dry-run=server")
    try:
        said = play.stage.kubectl(*asked, f"--namespace={NAMESPACE}")
    except RuntimeError as exc:
        said = str(exc)
    play.check(Check.RESTRICTED, 'violates PodSecurity "restricted' in said, said)
