"""What each fault of `make e2e` must come to: written before a run, compared with it afterwards.

The one table that the run, the judge, the page and docs/testing.md read.
"""

from dataclasses import dataclass
from typing import Final, Literal

from omni_contract.faults import Budget
from omni_contract.spec_run import FaultClass, RestartAction
from tests.e2e.cluster.record import Fault

Pods = Literal["stay", "one is new", "new"]
"""Whether all pods of the job live on, or exactly one with ranks is another one afterwards, or at
least one is (pods that share a reorder group go together)."""

_F, _A = FaultClass, RestartAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One fault and what must follow."""

    name: Fault
    """What is injected."""
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
        name=Fault.RANK_KILLED,
        title="a rank is killed",
        done="SIGKILL to the process of one rank",
        fault=_F.UNKNOWN,
        action=_A.RESTART_IN_PLACE,
        counter="infrastructure",
        pods="stay",
    ),
    Expectation(
        name=Fault.POD_DELETED,
        title="a pod is deleted",
        done="`kubectl delete pod` of a pod with ranks",
        fault=_F.POD_DELETED,
        action=_A.RESTART_GROUP,
        counter="infrastructure",
        pods="new",
    ),
    Expectation(
        name=Fault.SIDECAR_KILLED,
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
        name=Fault.NODE_CUT_OFF,
        title="the rendezvous host's node is cut off",
        done="the cable of the node with plan node 0 is pulled, and put back later",
        fault=_F.NODE_LOST,
        action=_A.REPLACE_POD,
        counter="infrastructure",
        pods="one is new",
        partitions=True,
    ),
    Expectation(
        name=Fault.API_CUT_OFF,
        title="that node is cut off from the API alone",
        done="the node with plan node 0 loses the API server alone; its ranks are stopped in a "
        "save, and go on once the next attempt has claimed the run; healed later",
        fault=_F.NODE_LOST,
        action=_A.REPLACE_POD,
        counter="infrastructure",
        pods="one is new",
        partitions=True,
    ),
    Expectation(
        name=Fault.LEADER_KILLED,
        title="the operator is killed in a restart",
        done="a pod with ranks is deleted; once the next attempt is written, SIGKILL to the "
        "operator that leads",
        fault=_F.POD_DELETED,
        action=_A.RESTART_GROUP,
        counter="infrastructure",
        pods="new",
    ),
    Expectation(
        name=Fault.STORE_RESTARTED,
        title="the S3 server restarts",
        done="SIGKILL to the S3 server; its container starts again with its data",
        # Reads are asked for again for 60 s, a save waits for ten minutes.
        fault=None,
        action=None,
        counter="none",
        pods="stay",
    ),
    Expectation(
        name=Fault.CHART_UPGRADED,
        title="the chart is upgraded",
        done="`helm upgrade` with another log level; both replicas of the operator are replaced",
        fault=None,
        action=None,
        counter="none",
        pods="stay",
    ),
)
"""In the order in which they are injected."""


def expectation_of(name: Fault) -> Expectation:
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
