"""What one run of `make e2e` saw: written by who drives it, read by who judges it."""

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict


class Fault(StrEnum):
    """What is done to the job, in this order."""

    RANK_KILLED = "rank-killed"
    """A rank's process is killed."""
    POD_DELETED = "pod-deleted"
    """A pod with ranks is deleted by hand."""
    SIDECAR_KILLED = "sidecar-killed"
    """The first process of a pod's data container is killed; the kubelet starts it again."""
    NODE_CUT_OFF = "node-cut-off"
    """The rendezvous host's node loses its cable; put back once the job has recovered."""
    API_CUT_OFF = "api-cut-off"
    """The rendezvous host's node loses the API server only. Its trainer is stopped in the middle of
    a save, and goes on when the next attempt has claimed the run."""
    LEADER_KILLED = "leader-killed"
    """A pod with ranks is deleted by hand, and in the restart that follows the operator's leader
    is killed."""
    STORE_RESTARTED = "store-restarted"
    """The S3 server ends and is started again by its kubelet."""
    CHART_UPGRADED = "chart-upgraded"
    """`helm upgrade` with another value for the operator, whose pods are replaced."""


class Check(StrEnum):
    """What is looked at beside the faults."""

    RESTRICTED = "pod-security"
    """The job's namespace refuses a pod that pod security `restricted` forbids."""
    STORED_LOGS = "stored-logs"
    """`kubectl mmtj logs --attempt` shows what a pod said that is gone."""
    NODE_CLEAN = "node-clean"
    """A node that came back runs no pod and no process of the attempt that it has missed the end
    of."""
    LATE_MOVE = "late-move"
    """The trainer that went on too late was refused when it moved `latest`."""
    LEADER_CHANGED = "leader-changed"
    """Another replica of the operator led after the leader was killed, before the restart's end."""
    UPGRADED = "upgraded"
    """All replicas of the operator run with the new value."""
    MACHINE_CLEAN = "machine-clean"
    """Nothing of the cluster is left on the machine: links, mounts, cgroups, processes, files."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Injection(_Part):
    """One fault, as it was done."""

    name: Fault
    began_s: float
    """Unix time."""
    attempt: int
    generation: int
    """Both as the job had them at that time."""
    step: int
    """Last step that was done by then."""
    detail: str
    """What was done to whom, in a sentence."""
    recovered_s: float | None = None
    """Unix time at which the driver saw the job train again after it; None: it never did."""


class Pod(_Part):
    """A pod of the job, as the API server shows it."""

    uid: str
    node: str
    """Empty: it has none yet."""
    phase: str
    attempt: int
    """By its annotation."""
    index: int | None
    """Node of the plan; None: a spare."""
    is_leaving: bool
    """Whether it is being deleted."""


class Seen(_Part):
    """The job at one time. Recorded when something has changed."""

    at_s: float
    """Unix time."""
    status: dict[str, Any]
    """Of the job; empty: none yet."""
    pods: dict[str, Pod]
    """By name."""


class Steps(_Part):
    """What was trained as one pair of attempt and generation, read from the run folders of its
    pods. A step done by several pairs counts as the highest pair did it."""

    attempt: int
    generation: int
    losses: dict[int, float]
    """By step."""
    times_s: dict[int, float]
    """Unix time of each step's end."""
    samples: dict[int, list[str]]
    """By step: what all ranks consumed, in order of rank and then as the rank did, each as
    SOURCE/EPOCH/INDEX/FIRST_TOKEN, followed by `!` where it was corrupt and so masked. A step that
    was broken off may be missing ranks, or have no loss."""


class CheckResult(_Part):
    """One check."""

    name: Check
    holds: bool
    detail: str
    """What was seen, in a sentence or as it was printed."""


class Record(_Part):
    """All of it."""

    version: Literal[1] = 1
    job: str
    began_s: float
    """Unix time at which the job was applied."""
    ended_s: float
    """Unix time at which it was over, or given up."""
    error: str | None = None
    """Why the run was broken off; None: it was not."""
    num_steps: int
    """That the job has."""
    injections: list[Injection]
    seen: list[Seen]
    """In order of time."""
    events: list[dict[str, Any]]
    """Events of the job, as the API server has them."""
    steps: list[Steps]
    """In order of their pairs."""
    undisturbed: list[Steps]
    """The same of the same job that nothing happened to; one pair, if that is true."""
    leftover_pods: list[str]
    """Names of pods that still run, or hold a node, after the job's end."""
    checks: list[CheckResult]
    facts: dict[str, float] = {}
    """Seconds and counts to look at, such as how long images took; nothing is judged by them."""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(self.model_dump_json(indent=1))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read it back."""
        return cls.model_validate_json(path.read_bytes())
