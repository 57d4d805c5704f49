"""The table of faults on the real control plane: each carrier of a fault, as it is written there in
life, befalls a job that runs, starts or restarts, and the job ends as the table says."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from omni_contract.names import LABEL_JOB, TRAINER_CONTAINER
from omni_contract.spec_run import FaultClass, RestartAction
from omni_contract.status import JobStatus
from tests.cluster.api import Object
from tests.cluster.control_plane import ControlPlane, Options
from tests.cluster.fault_matrix import ROWS, Row, Stage
from tests.cluster.jobs import (
    RANKS_PER_NODE,
    JobHandle,
    index_of,
    is_gated,
    is_living,
    job_document,
    name_of,
    planned_node,
    uid_of,
)
from tests.cluster.kwok import ANNOTATION_STARTS_AFTER
from tests.cluster.nodes import Grid, Nodes, NodeSpec
from tests.cluster.operators import running_operator
from tests.cluster.pods import NEVER
from tests.cluster.stories import Seen, Story, Wait, play, returned

LABEL_CELL: Final = "test.megascale-omni.dev/cell"
NUM_PODS: Final = 2
NUM_AT_ONCE: Final = 40
LONG_S: Final = 120.0
"""All cells are played at once on few cores."""
HANG_S: Final = 180.0
"""The operator leaves the supervisors a minute to see a hang themselves."""
_OF_ALL: Final = ("stop_heartbeat", "part")
"""What befalls supervisors that run."""
_PATIENT: Final = {"nodeLostAfterSeconds": 60, "readyAfterSeconds": 900, "hangAfterSeconds": 600}
_LIMITS: Final[Mapping[str, Mapping[str, float]]] = {
    "pods.wait_in_container": {"readyAfterSeconds": 25},
    "stop_heartbeat": {"hangAfterSeconds": 1, "startAfterSeconds": 1},
    "nodes.kill": {"nodeLostAfterSeconds": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One field of the matrix."""

    number: int
    """Of its row."""
    row: Row
    stage: Stage

    @property
    def id(self) -> str:
        """For people."""
        return f"{self.row.case}-{self.stage}"

    @property
    def name(self) -> str:
        """Of its job and nodes."""
        return f"m{self.number}-{self.stage}"

    @property
    def first(self) -> FaultClass | None:
        """The fault that a job restarts from when this one strikes: of another class, as one that
        comes back is answered in another way."""
        if self.stage != "restarting":
            return None
        if self.row.act == "fill_node":
            return FaultClass.POD_DELETED
        is_other = self.row.fault is not FaultClass.APP_ERROR
        return FaultClass.APP_ERROR if is_other else FaultClass.EVICTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a cell came to."""

    status: JobStatus
    """When the job ran again, or failed."""
    end: JobStatus
    """At its very end."""
    victim: Object
    """The pod that was struck."""
    before: Mapping[int, Object]
    """Living pods by index, when it was struck."""
    after: Mapping[int, Object]
    """And when the job ran again."""
    units: tuple[tuple[int, ...], ...]
    """Of the attempt that was struck."""
    left: tuple[Object, ...]
    """Pods left at the end."""


CELLS: Final = tuple(
    Cell(number=number, row=row, stage=stage)
    for number, row in enumerate(ROWS)
    for stage in row.stages
)


class Actor:
    """Plays one cell."""

    def __init__(self, cell: Cell, job: JobHandle, nodes: Nodes, names: list[str]) -> None:
        self.cell = cell
        self.row = cell.row
        self.job = job
        self.nodes = nodes
        self.names = names
        self.fillers: list[str] = []

    def play(self) -> Story[Outcome]:
        """From the job's creation to its end."""
        try:
            return (yield from self._play())
        except AssertionError as exc:
            raise AssertionError(f"{exc}\n{self.job.describe()}") from exc

    def _play(self) -> Story[Outcome]:
        job, row = self.job, self.row
        if self.cell.stage == "starting" and row.act == "fill_node":
            self._fill(self.names[0])
        job.create(self._document())
        yield from {
            "running": self._run,
            "starting": self._start,
            "restarting": self._restart,
        }[self.cell.stage]()
        attempt = job.status.attempt
        victim = self._victim()
        before, units = self._by_index(), job.placement.units
        yield from self._strike(victim)
        long_s = HANG_S if row.act == "stop_heartbeat" else LONG_S
        yield self._wait("the fault answered", lambda: self._is_answered(attempt), long_s)
        self._mend()
        if row.phase == "Failed":
            yield self._wait("no pod holds a GPU", lambda: not job.living)
            return Outcome(
                status=job.status,
                end=job.status,
                victim=victim,
                before=before,
                after={},
                units=units,
                left=tuple(job.pods),
            )
        yield self._run_in(attempt + 1)
        status, after = job.status, self._by_index()
        job.beat(step=6)
        job.complete()
        yield self._wait("the job Completed", lambda: job.is_phase("Completed"))
        yield self._wait("no pod left", lambda: not job.pods)
        return Outcome(
            status=status,
            end=job.status,
            victim=victim,
            before=before,
            after=after,
            units=units,
            left=tuple(job.pods),
        )

    def _document(self) -> Object:
        cpu = {"requests": {"cpu": "1"}}
        return job_document(
            self.job.name,
            nodes=NUM_PODS,
            restart={**_PATIENT, **_LIMITS.get(self.row.act, {}), **self._fill_limits()},
            podTemplate={
                "nodeSelector": {LABEL_CELL: self.cell.name},
                "annotations": {ANNOTATION_STARTS_AFTER: NEVER},  # until the story wants it
                "containers": [{"name": TRAINER_CONTAINER, "resources": cpu}],
            },
        )

    def _fill_limits(self) -> Mapping[str, float]:
        is_due = self.row.act == "fill_node" and self.cell.stage == "starting"
        return {"readyAfterSeconds": 10} if is_due else {}

    # The stage at which it strikes.

    def _run(self) -> Story[None]:
        yield self._run_in(1)
        self.job.beat(step=5)

    def _start(self) -> Story[None]:
        """Released, and the pods pend on their nodes."""
        if self.row.act == "fill_node":
            yield self._wait("the gang released", lambda: self.job.status.holds("GangReady"))
            return
        yield self._wait("all pods bound", lambda: self._is_bound_in(1))
        if self.row.act == "pods.end_container":
            name = name_of(self.job.pod(self._index))
            self.job.act.start(name)
            yield self._wait("a pod running", lambda: self._is_running(self.job.pod(self._index)))
        elif self.row.act in _OF_ALL:
            yield self._run_in(1)

    def _restart(self) -> Story[None]:
        """One fault is answered, and a new pod pends, or waits behind its gate."""
        yield from self._run()
        other = name_of(self.job.pod(self._index))
        if self.row.act == "fill_node":
            self.job.act.stick(other)
            self.job.act.delete(other)
            yield self._wait(
                "the gang held", lambda: self.job.reason("GangReady") == "WaitingForOldPods"
            )
            return
        if self.cell.first is FaultClass.EVICTED:
            self.job.act.fail(other, reason="Evicted", disruption=True)
        else:
            self.job.act.end_container(other, exit_code=1, container=TRAINER_CONTAINER)
        yield self._wait("a new pod bound", lambda: self._is_bound_in(2))
        if self.row.act in _OF_ALL:
            yield self._run_in(2)

    @property
    def _index(self) -> int:
        return self.cell.number % NUM_PODS

    def _victim(self) -> Object:
        """The pod that is struck: one that runs where a container ends, else one that is new."""
        if self.row.act == "fill_node":
            (victim, *_) = (pod for pod in self.job.living if self._is_filled(pod))
            return victim
        is_other = self.cell.stage == "restarting" and self.row.act == "pods.end_container"
        return self.job.pod((self._index + is_other) % NUM_PODS)

    def _is_filled(self, pod: Object) -> bool:
        is_starting = self.cell.stage == "starting"
        return is_gated(pod) if not is_starting else planned_node(pod) == self.names[0]

    def _run_in(self, attempt: int) -> Wait:
        """Let pods start as they come, until the job runs."""

        def runs() -> bool:
            for pod in self.job.living:
                held = ANNOTATION_STARTS_AFTER in pod["metadata"]["annotations"]
                if held and "nodeName" in pod["spec"]:
                    self.job.act.start(name_of(pod))
            status = self.job.status
            return status.attempt >= attempt and status.holds("Running")

        return self._wait("the job running", runs)

    # The fault.

    def _strike(self, victim: Object) -> Story[None]:
        row, pod, node = self.row, name_of(victim), planned_node(victim)
        owner, _, method = row.act.partition(".")
        arguments = dict(row.arguments)
        if row.act == "pods.end_container":
            arguments["message"] = row.message(attempt=self.job.status.attempt)
        if row.act == "fill_node":
            if self.cell.stage == "restarting":
                self._fill(planned_node(victim))
        elif row.act == "part":
            self.job.beat(step=5, last_fault=row.fault, last_message="node 1 left")
        elif owner == "pods":
            if method in ("evict", "disrupt", "delete"):
                self.job.act.terminate_slowly(pod, 2)  # as a kubelet takes its time
            getattr(self.job.act, method)(pod, **arguments)
        elif owner == "nodes":
            getattr(self.nodes, method)(node, **arguments)
        yield from ()

    def _fill(self, node: str) -> None:
        """A pod of somebody else, put there past the scheduler, as a DaemonSet's may be."""
        filler = f"foreign-{self.cell.name}"
        requests = {self.row.arguments["resource"]: str(self.row.arguments["amount"])}
        resources = {"requests": requests, "limits": requests}
        container = {"name": "main", "image": "other:1", "resources": resources}
        self.job.act.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": filler},
                "spec": {"nodeName": node, "containers": [container]},
            }
        )
        self.fillers.append(filler)

    def _mend(self) -> None:
        """Let go of all that held the stage."""
        for filler in self.fillers:
            self.job.act.delete(filler, grace_s=0)
        if self.row.act == "fill_node":
            for pod in self.job.act.list(f"{LABEL_JOB}={self.job.name}"):
                self.job.act.unstick(name_of(pod))

    # What is seen.

    def _wait(self, what: str, is_so: Any, within_s: float = LONG_S) -> Wait:
        return Wait(what=what, is_so=is_so, within_s=within_s)

    def _is_answered(self, attempt: int) -> bool:
        status = self.job.status
        return status.attempt > attempt or status.phase in ("Failed", "Completed")

    def _is_running(self, pod: Object) -> bool:
        return bool(pod["status"].get("phase") == "Running")

    def _is_bound_in(self, attempt: int) -> bool:
        status, living = self.job.status, self.job.living
        return (
            status.attempt == attempt
            and status.holds("GangReady")
            and len(living) == NUM_PODS
            and all("nodeName" in pod["spec"] and not is_gated(pod) for pod in living)
        )

    def _by_index(self) -> Mapping[int, Object]:
        found = {index_of(pod): pod for pod in self.job.pods if is_living(pod)}
        return {index: pod for index, pod in found.items() if index is not None}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Outcome | Exception]]:
    """All cells that are asked for, played at once."""
    asked = {item.name for item in request.session.items}
    cells = [cell for cell in CELLS if any(f"[{cell.id}]" in name for name in asked)]
    cells.sort(key=lambda cell: cell.row.act != "stop_heartbeat")  # it takes longest
    namespace = "fault-matrix"
    # Three hundred nodes that are not to be lost by chance.
    options = Options(heartbeat_s=5, node_monitor_grace_s=20)
    with (
        ControlPlane(options) as control_plane,
        Nodes(control_plane) as nodes,
    ):
        control_plane.create_namespace(namespace)
        api, seen = control_plane.api, Seen(control_plane.api, namespace)
        nodes.add(spec for cell in cells for spec in _nodes_of(cell))
        actors = {
            cell.id: Actor(
                cell,
                JobHandle(api, namespace, cell.name, seen=seen),
                nodes,
                [spec.name for spec in _nodes_of(cell)],
            )
            for cell in cells
        }
        stories = {name: actor.play() for name, actor in actors.items()}
        with running_operator(control_plane, namespace):
            yield play(stories, seen, num_at_once=NUM_AT_ONCE)


def _nodes_of(cell: Cell) -> list[NodeSpec]:
    """Nodes for one job: those it needs and one more."""
    grid = Grid(nodes=NUM_PODS + 1, gpus=RANKS_PER_NODE, name=cell.name)
    return [replace(spec, labels={**spec.labels, LABEL_CELL: cell.name}) for spec in grid]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cell", CELLS, ids=[cell.id for cell in CELLS])
def test_a_fault_ends_as_the_table_says(
    cell: Cell, outcomes: Mapping[str, Outcome | Exception]
) -> None:
    outcome: Outcome = returned(outcomes[cell.id])
    row, status = cell.row, outcome.status
    befell = ([cell.first] if cell.first else []) + [row.fault]
    assert [incident.fault for incident in status.incidents] == befell
    incident = status.incidents[-1]
    assert incident.action is row.action
    assert incident.attempt == len(befell)
    assert status.attempt == len(befell) + (row.phase != "Failed")
    spent = {"user": 0, "infrastructure": 0, "none": 0}
    spent[row.counter] += 1
    if cell.first is not None:
        spent["user" if cell.first is FaultClass.APP_ERROR else "infrastructure"] += 1
    assert status.budget.user == spent["user"]
    assert status.budget.infrastructure == spent["infrastructure"]
    assert status.restarts == spent["user"] + spent["infrastructure"]
    excluded = [node.name for node in status.excluded_nodes]
    assert excluded == ([planned_node(outcome.victim)] if row.excludes_node else [])
    if row.phase == "Failed":
        assert status.phase == "Failed"
        assert not any(map(is_living, outcome.left))
        return
    assert outcome.end.phase == "Completed"
    assert outcome.left == ()
    assert outcome.end.budget.user == spent["user"]
    assert outcome.end.budget.infrastructure == spent["infrastructure"]
    _check_pods(row, outcome)


def _check_pods(row: Row, outcome: Outcome) -> None:
    """The action was done, not only told: which pods are new, and where they are."""
    victim = index_of(outcome.victim)
    kept = {
        index
        for index, pod in outcome.before.items()
        if index in outcome.after and uid_of(outcome.after[index]) == uid_of(pod)
    }
    everyone = set(range(NUM_PODS))
    assert set(outcome.after) == everyone
    if row.action is RestartAction.RESTART_IN_PLACE:
        assert kept == everyone
    elif row.action is RestartAction.REPLACE_POD:
        assert kept == everyone - {victim}
    elif row.action is RestartAction.RESTART_GROUP:
        unit = next((unit for unit in outcome.units if victim in unit), (victim,))
        assert kept == everyone - set(unit)
    else:
        assert kept == set()
    leaves = row.act.startswith("nodes.") or row.excludes_node
    if leaves and victim is not None:
        here = planned_node(outcome.victim)
        assert outcome.after[victim]["spec"]["nodeName"] != here
