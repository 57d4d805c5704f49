"""What each fault of `make e2e` must come to: written before a run, compared with it afterwards.

The one table that the run, the judge, the page and docs/testing.md read.
"""

from dataclasses import dataclass
from typing import Final, Literal

from omni_contract.faults import Budget
from omni_contract.spec_run import FaultClass, RestartAction

Pods = Literal["stay", "replaced"]
"""Whether all pods of the job live on, or some make room for new ones."""

_F, _A = FaultClass, RestartAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One fault and what must follow."""

    name: str
    """Of the injection."""
    title: str
    """In a few words, for people."""
    done: str
    """What is done to the cluster while the job trains."""
    fault: FaultClass | None
    """Class of the one incident; None: there must be none, as the job trains on by itself."""
    action: RestartAction | None
    """Action of the incident."""
    counter: Budget
    """The only counter of `status.budget` that goes up, by one."""
    pods: Pods
    partitions: bool = False
    """Whether it cuts off a node, which must come back without a pod of the old attempt."""

    @property
    def restarts(self) -> int:
        """By how much `status.restarts` grows."""
        return 0 if self.action is None else 1

    @property
    def incident(self) -> str:
        """Class and action in words."""
        return "none" if self.fault is None else f"{self.fault}, {self.action}"


EXPECTED: Final = (
    Expectation(
        name="rank-killed",
        title="a rank is killed",
        done="SIGKILL to the process of one rank",
        fault=_F.UNKNOWN,
        action=_A.RESTART_IN_PLACE,
        counter="infrastructure",
        pods="stay",
    ),
    Expectation(
        name="pod-deleted",
        title="a pod is deleted",
        done="`kubectl delete pod` of a pod with ranks",
        fault=_F.POD_DELETED,
        action=_A.RESTART_GROUP,
        counter="infrastructure",
        pods="replaced",
    ),
    Expectation(
        name="sidecar-killed",
        title="a data service is killed",
        done="SIGKILL to the first process of a pod's container `data`",
        # The kubelet starts the container again, the ranks wait for it and join it again. Only the
        # third death in a row is a fault, DataService.
        fault=None,
        action=None,
        counter="none",
        pods="stay",
    ),
    Expectation(
        name="node-partitioned",
        title="the rendezvous host's node is cut off",
        done="the cable of the node with plan node 0 is pulled, and put back later",
        fault=_F.NODE_LOST,
        action=_A.REPLACE_POD,
        counter="infrastructure",
        pods="replaced",
        partitions=True,
    ),
    Expectation(
        name="node-cut-from-api",
        title="that node is cut off from the API alone",
        done="the node with plan node 0 loses the API server and keeps peers and S3; later healed",
        # Its ranks train on, but neither kubelet nor progress Lease can say so.
        fault=_F.NODE_LOST,
        action=_A.REPLACE_POD,
        counter="infrastructure",
        pods="replaced",
        partitions=True,
    ),
    Expectation(
        name="leader-killed-in-restart",
        title="the operator is killed in a restart",
        done="a pod with ranks is deleted; once the next attempt is written, so is the operator's "
        "leader, without grace",
        fault=_F.POD_DELETED,
        action=_A.RESTART_GROUP,
        counter="infrastructure",
        pods="replaced",
    ),
    Expectation(
        name="store-restarted",
        title="the S3 server restarts",
        done="SIGKILL to the S3 server; its container starts again with its data",
        # Reads are asked for again for 60 s, a save waits for ten minutes.
        fault=None,
        action=None,
        counter="none",
        pods="stay",
    ),
    Expectation(
        name="chart-upgraded",
        title="the chart is upgraded",
        done="`helm upgrade` with other values; both replicas of the operator are replaced",
        fault=None,
        action=None,
        counter="none",
        pods="stay",
    ),
)
"""In the order in which they are injected."""


def expectation_of(name: str) -> Expectation:
    """The row of an injection."""
    return next(row for row in EXPECTED if row.name == name)


def expectation_table() -> str:
    """The table as docs/testing.md shows it."""
    lines = [
        "| fault | what is done | incident | counts against | pods |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in EXPECTED:
        against = {"none": "nothing", "user": "`limit`", "infrastructure": "`infrastructureLimit`"}
        cells = (row.title, row.done, row.incident, against[row.counter], row.pods)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
