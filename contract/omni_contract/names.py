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

LABEL_JOB: Final = f"{GROUP}/job"
"""On everything that belongs to a job: its name."""
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
"""On every pod of a job: the job's UID, which a job of the same name that came later has not."""
LABEL_LOG_READER: Final = f"{GROUP}/log-reader"
"""On a pod that reads a job's stored logs for somebody: the job's UID."""
GATE: Final = f"{GROUP}/gang"
"""Scheduling gate of every pod, lifted for the whole attempt at once."""
ANNOTATION_ATTEMPT: Final = f"{GROUP}/attempt"
"""On a pod: the attempt it belongs to now. Its supervisor reads it from a file."""
ANNOTATION_INDEX: Final = f"{GROUP}/index"
"""On a pod: its node index in the plan; empty for a spare."""
ANNOTATION_RENDEZVOUS: Final = f"{GROUP}/rendezvous"
"""On a pod: HOST:PORT where the supervisors of this attempt meet."""
ANNOTATION_HISTORY: Final = f"{GROUP}/history"
"""On a pod: the restarts spent before this attempt, a `History` as JSON."""
ANNOTATION_NODE: Final = f"{GROUP}/planned-node"
"""On a pod: the node that is reserved for it."""
ANNOTATION_RESTART: Final = f"{GROUP}/restart"
"""On a job: a new value asks for one restart of all its pods."""
ANNOTATION_PROGRESS: Final = f"{GROUP}/progress"
"""On the progress Lease: a `JobHeartbeat` as JSON, written by rank 0's supervisor."""

TRAINER_CONTAINER: Final = "trainer"
"""The container with the supervisor and its ranks."""
DATA_CONTAINER: Final = "data"
"""The native sidecar with the data service."""
RENDEZVOUS_PORT: Final = 29400
"""Port of the supervisors' store in a pod."""
DATA_PORT: Final = 29500
"""Port on which data services talk to each other in a pod."""
PLAN_DIR: Final = "/etc/omni/plan"
"""Where a pod finds its packed JobPlan."""
POD_INFO_DIR: Final = "/etc/omni/pod"
"""Where a pod finds its own annotations (downward API): the file `annotations`."""
SHARED_DIR: Final = "/run/omni"
"""Memory volume that trainer and data service share: the socket."""
SIDECAR_SOCKET: Final = "/run/omni/data.sock"
"""Socket of a pod's data service."""
RUN_DIR: Final = "/run/omni/run"
"""Run folder in a pod: a volume on disk, as logs may grow."""
LEASE_TOKEN_DIR: Final = "/var/run/secrets/omni"
"""Token, CA and namespace for the progress Lease, in pods that may hold rank 0."""

ENV_LEASE: Final = "OMNI_PROGRESS_LEASE"
"""NAMESPACE/NAME of the Lease that rank 0's supervisor renews; unset: none."""
ENV_PLAN: Final = "OMNI_PLAN"
"""Path of the JobPlan file."""
ENV_NODE: Final = "OMNI_NODE"
"""Index of this node in the plan."""
ENV_ATTEMPT: Final = "OMNI_ATTEMPT"
"""Attempt of this process."""
ENV_JOB_UID: Final = "OMNI_JOB_UID"
"""UID of the job in its cluster, a constant of its pods; unset under `omni run`."""
ENV_GENERATION: Final = "OMNI_GENERATION"
"""Generation of this rank; set by the supervisor."""
ENV_SIDECAR: Final = "OMNI_SIDECAR"
"""Path of the node's sidecar socket."""
ENV_RUN_DIR: Final = "OMNI_RUN_DIR"
"""Folder for this run's logs, metrics and progress files."""
ENV_TRACE_STEPS: Final = "OMNI_TRACE_STEPS"
"""Comma-separated steps whose timeline is written to the run folder."""

PLAN_FILE: Final = "plan.json"
"""The JobPlan of the run, written by the launcher; packed under this name in its ConfigMap."""
PLACEMENT_FILE: Final = "placement.json"
"""A JobPlacement, packed under this name in the ConfigMap of its attempt."""
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

_UID_CHARACTERS: Final = 5


def base_name(job: str, uid: str) -> str:
    """What the names of a job's objects begin with. A later job of the same name has another."""
    return f"{job}-{uid[:_UID_CHARACTERS]}"


class Exit(IntEnum):
    """Exit codes that say why a program ended."""

    OK = 0
    ERROR = 1
    """An unexpected error of the program: class AppError."""
    USER = 2
    """A mistake in job, data or storage that no restart mends: class StartError."""
    UNAVAILABLE = 69
    """The object store or the data service did not answer for long: class DataService."""
    PEER_LOST = 75
    """A rank lost another one; never the first cause."""
    STALE = 76
    """A newer (attempt, generation) holds the run."""
    GAVE_UP = 77
    """The restart policy's limit is reached."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM, ended cleanly."""
