"""Names and numbers two programs share: API group, environment, exit codes, file names."""

from enum import IntEnum
from typing import Final

GROUP: Final = "megascale-omni.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "MultimodalTrainingJob"
PLURAL: Final = "multimodaltrainingjobs"
SINGULAR: Final = "multimodaltrainingjob"
SHORT_NAME: Final = "mmtj"

ENV_PLAN: Final = "OMNI_PLAN"
"""Path of the JobPlan file."""
ENV_NODE: Final = "OMNI_NODE"
"""Index of this node in the plan."""
ENV_ATTEMPT: Final = "OMNI_ATTEMPT"
"""Attempt of this process."""
ENV_GENERATION: Final = "OMNI_GENERATION"
"""Generation of this rank; set by the supervisor."""
ENV_SIDECAR: Final = "OMNI_SIDECAR"
"""Path of the node's sidecar socket."""
ENV_RUN_DIR: Final = "OMNI_RUN_DIR"
"""Folder for this run's logs, metrics and progress files."""
ENV_TRACE_STEPS: Final = "OMNI_TRACE_STEPS"
"""Comma-separated steps whose timeline is written to the run folder."""

PLAN_FILE: Final = "plan.json"
"""The JobPlan of the run, written by the launcher."""
METRICS_FILE: Final = "metrics.jsonl"
"""One StepRecord a line, written by global rank 0."""
EVENTS_FILE: Final = "events.jsonl"
"""One RunEvent a line, appended by launcher and supervisors."""
CONSUMED_FILE: Final = "consumed-{rank}.jsonl"
"""One ConsumedRecord a line, written by each last-stage rank."""
TRACE_FILE: Final = "trace-{step}-{rank}.json"
"""A RankTrace: the operations of one step as executed by one rank."""
PROGRESS_FILE: Final = "progress-{rank}.json"
"""A Progress, replaced at every step by the rank and touched while it is alive."""


class Exit(IntEnum):
    """Exit codes that say why a program ended."""

    OK = 0
    ERROR = 1
    """An unexpected error of the program: class AppError."""
    USER = 2
    """A mistake in job, data or storage that no restart mends: class StartError."""
    PEER_LOST = 75
    """A rank lost another one; never the first cause."""
    STALE = 76
    """A newer (attempt, generation) holds the run."""
    GAVE_UP = 77
    """The restart policy's limit is reached."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM, ended cleanly."""
