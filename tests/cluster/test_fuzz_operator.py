"""Every generated job that a user can create gets an answer from the operator, and none ends it."""

import copy
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from omni_contract.errors import SpecError
from omni_contract.spec import Job
from tests.cluster.api import ApiError, Object, concurrently, wait_for
from tests.cluster.chart import install_chart, uninstall_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.job_kind import jobs_path
from tests.cluster.job_specs import Case, cases, shown
from tests.cluster.nodes import Grid, Nodes
from tests.cluster.processes import free_port

SEED: Final = 5
NUM_CASES: Final = 600
ANSWER_S: Final = 90.0


@pytest.fixture
def operator(control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """The operator as a process with the chart's rights; its name among the processes."""
    installed = install_chart(control_plane, namespace)
    name = f"operator-{namespace}"
    control_plane.processes.start(
        name,
        [
            sys.executable,
            "-m",
            "omni_operator.main",
            *installed.arguments,
            f"--port={free_port()}",
        ],
        env={"KUBECONFIG": str(installed.kubeconfig)},
    )
    yield name
    control_plane.processes.stop(name)
    uninstall_chart(control_plane, installed)


def created(control_plane: ControlPlane, namespace: str, case: Case) -> Case | None:
    """Create a job of the case, every second one suspended; None where it is refused."""
    body = copy.deepcopy(case.document)
    body["metadata"]["name"] = f"fuzz-{case.number}"
    if case.number % 2:
        body["spec"]["suspend"] = True
    try:
        control_plane.api.create(jobs_path(namespace), body)
    except ApiError as exc:
        assert exc.status in (400, 422), f"{shown(case)}: {exc}"
        return None
    return case


def is_answered(job: Object) -> bool:
    """Whether the status is about this spec and says what the job waits for."""
    status = job.get("status") or {}
    if status.get("observedGeneration") != job["metadata"]["generation"]:
        return False
    told = {one["type"]: one for one in status.get("conditions", [])}
    if "Accepted" not in told:
        return False
    if told["Accepted"]["status"] == "False":
        return True
    return any(kind in told for kind in ("Placed", "Suspended", "Failed"))


def test_every_job_is_answered_in_time(
    control_plane: ControlPlane, operator: str, nodes: Nodes, namespace: str
) -> None:
    nodes.add(Grid(racks=2, nodes=4, gpus=8, name="fuzz"))
    tried = concurrently(
        lambda case: created(control_plane, namespace, case), cases(SEED, NUM_CASES)
    )
    by_name = {f"fuzz-{case.number}": case for case in tried if case is not None}
    assert len(by_name) > NUM_CASES / 5
    path = jobs_path(namespace)

    def silent() -> list[str]:
        assert not control_plane.processes.has_ended(operator), "the operator ended"
        jobs = control_plane.api.list(path)
        return [shown(by_name[job["metadata"]["name"]]) for job in jobs if not is_answered(job)]

    wait_for(lambda: not silent(), "every job answered", ANSWER_S, every_s=1)
    wrong = []
    for job in control_plane.api.list(path):
        case = by_name[job["metadata"]["name"]]
        told = {one["type"]: one for one in job["status"]["conditions"]}
        try:
            Job.read({key: value for key, value in job.items() if key != "status"})
            is_valid = True
        except SpecError:
            is_valid = False
        accepted = told["Accepted"]
        if (accepted["status"] == "True") != is_valid:
            wrong.append(f"{shown(case)}: {accepted}")
        if not is_valid and not any(field in accepted["message"] for field in case.fields):
            wrong.append(f"{shown(case)}: {accepted['message']}")
        wrong += [f"{shown(case)}: {one}" for one in told.values() if not one["message"]]
    assert wrong == []
    assert "Traceback" not in control_plane.processes.log(operator).read_text()
