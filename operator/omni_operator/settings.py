"""What an installation of the operator is told; the chart's values become these."""

from dataclasses import dataclass


class SetupError(Exception):
    """The process cannot run with what its environment or its files say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of one operator process."""

    image: str
    """Image of the trainer where a job names none."""
    image_pull_policy: str = "IfNotPresent"
    """Of trainers, whoever names the image."""
    data_image: str | None = None
    """Image of the data service where a job names none; None: `image`, which then holds both."""
    data_image_pull_policy: str | None = None
    """Of data services, whoever names the image; None: `image_pull_policy`."""
    priority_class: str | None = None
    """Priority class of the pods where a job names none. It says whether they may preempt others: a
    pod's own preemptionPolicy must equal its class's."""
    watched_namespace: str | None = None
    """Namespace whose jobs are reconciled; None: all."""
    cluster_domain: str = "cluster.local"
    with_kueue: bool = False
    """Whether jobs with a queueName wait for a Kueue Workload."""
    max_concurrent_writes: int = 32
    """API writes under way at once."""
    resync_s: float = 600
    """Every job is reconciled at least this often."""
    progress_poll_s: float = 10
    """How often the progress Lease of a running job is read."""
    status_progress_s: float = 30
    """Progress alone goes into a job's status at most this often."""
