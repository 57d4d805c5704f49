"""Jobs in the queues of a real Kueue: quota, preemption, flavors, suspension, deletion."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.api import Object, wait_for
from tests.cluster.chart import install_chart, render_chart, uninstall_chart
from tests.cluster.control_plane import ControlPlane
from tests.cluster.jobs import JobHandle, is_gated, job_document, name_of
from tests.cluster.kueue import (
    create_flavor,
    create_queue,
    holds,
    running_kueue,
    start_kueue_again,
    stop_kueue,
    workloads_path,
)
from tests.cluster.nodes import Nodes, NodeSpec
from tests.cluster.operators import OperatorProcess, running_operator
from tests.cluster.processes import free_port
from tests.cluster.rights import Right, refusals, rights_granted, rights_used

ONLY_IN_DOUBT = Right(group="kueue.x-k8s.io", resource="workloads", verb="get")
"""Used where two writers met."""
POOL = "pool"
QUEUE = "team"


def test_an_operator_that_is_to_use_kueue_waits_until_it_is_installed_and_says_so(
    control_plane: ControlPlane, namespace: str
) -> None:
    values = {"kueue": {"enabled": True}, "watchNamespace": namespace}
    installed, processes = install_chart(control_plane, namespace, values), control_plane.processes
    module = [sys.executable, "-m", "omni_operator.main"]
    processes.start(
        "lonely-operator",
        [*module, *installed.arguments, f"--port={free_port()}"],
        env={"KUBECONFIG": str(installed.kubeconfig)},
    )
    try:
        log = processes.log("lonely-operator")
        wait_for(lambda: "install Kueue" in log.read_text(), "words about Kueue")
        assert not processes.has_ended("lonely-operator")
    finally:
        processes.stop("lonely-operator")
        uninstall_chart(control_plane, installed)


@pytest.fixture(scope="module")
def kueue(control_plane: ControlPlane) -> Iterator[None]:
    with running_kueue(control_plane):
        yield


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, kueue: None) -> Iterator[OperatorProcess]:
    """One for all jobs, with the rights that the chart gives it for Kueue."""
    control_plane.create_namespace("operator-with-kueue")
    values = {"kueue": {"enabled": True}, "watchNamespace": ""}
    with running_operator(control_plane, "operator-with-kueue", values=values) as started:
        yield started
        assert refusals(control_plane.audit_log, started.user) == []
        roles = render_chart(namespace=started.installed.namespace, values=values)
        granted = rights_granted(role for role in roles if role["kind"] == "ClusterRole")
        idle = granted - rights_used(control_plane.audit_log, started.user)
        groups = ("kueue.x-k8s.io", "scheduling.k8s.io")
        assert {right for right in idle if right.group in groups} <= {ONLY_IN_DOUBT}
    control_plane.api.delete("/api/v1/namespaces/operator-with-kueue")


class Team:
    """A namespace with a queue, two nodes of 2 GPUs in each of two pools, and a flavor of each."""

    def __init__(self, control_plane: ControlPlane, namespace: str, nodes: Nodes) -> None:
        self.control_plane = control_plane
        self.namespace = namespace
        self.nodes = nodes
        self.id = "-".join(namespace.split("-")[-2:])
        """Of the test: objects of the whole cluster have it in their names."""
        for pool in ("a", "b"):
            nodes.add(
                NodeSpec(name=f"{pool}{i}-{self.id}", labels=self.labels(pool), gpus=2)
                for i in range(2)
            )

    def labels(self, pool: str) -> dict[str, str]:
        """Of the nodes of a pool; those of another test have others."""
        return {POOL: self.flavor(pool)}

    def flavor(self, pool: str) -> str:
        return f"{pool}-{self.id}"

    def create_queue(self, name: str = QUEUE, *, tolerations: Any = (), **gpus: int) -> None:
        """A queue with a quota of GPUs for each pool, tried in this order."""
        for pool in gpus:
            create_flavor(
                self.control_plane,
                self.flavor(pool),
                labels=self.labels(pool),
                tolerations=tolerations,
            )
        quotas = {self.flavor(pool): most for pool, most in gpus.items()}
        create_queue(self.control_plane, self.namespace, name, flavors=quotas)

    def submit(self, name: str, *, queue: str = QUEUE, **spec: Any) -> JobHandle:
        """A job that needs 4 GPUs."""
        job = JobHandle(self.control_plane.api, self.namespace, name)
        job.create(job_document(name, queueName=queue, **spec))
        return job

    def workload(self, job: JobHandle) -> Object:
        return self.control_plane.api.get(f"{workloads_path(self.namespace)}/{job.name}-{job.uid5}")

    def pool_of(self, job: JobHandle) -> set[str]:
        """Pools on whose nodes a job runs."""
        return {node[0] for node in job.node_of.values()}


@pytest.fixture
def team(
    control_plane: ControlPlane, operator: OperatorProcess, namespace: str, nodes: Nodes
) -> Team:
    return Team(control_plane, namespace, nodes)


def wait_in_queue(job: JobHandle) -> None:
    job.wait(lambda: job.reason("Placed") == "QueueWaiting", f"{job.name} waiting in its queue")


def test_a_quota_for_one_job_runs_two_one_after_the_other(team: Team) -> None:
    team.create_queue(a=4)
    first = team.submit("first")
    first.wait_for_phase("Running")
    assert team.pool_of(first) == {"a"}
    second = team.submit("second")
    second.wait(lambda: "insufficient" in second.message("Placed"), "Kueue's words")
    assert second.reason("Placed") == "QueueWaiting"
    assert f"queue '{QUEUE}'" in second.message("Placed")
    assert second.pods == []
    assert second.status.attempt == 0
    wait_for(lambda: holds(team.workload(first), "PodsReady"), "the first job's pods told ready")
    first.complete()
    first.wait_for_phase("Completed")
    wait_for(lambda: holds(team.workload(first), "Finished"), "the first job's quota given back")
    second.wait_for_phase("Running")
    assert not any(is_gated(pod) for pod in second.pods)


def test_a_job_that_waits_for_quota_or_its_queue_starts_when_there_is_some(team: Team) -> None:
    job = team.submit("early")
    job.wait(lambda: "doesn't exist" in job.message("Placed"), "no such queue")
    team.create_queue(a=2)
    job.wait(lambda: "insufficient" in job.message("Placed"), "too little quota")
    team.create_queue("other", b=4)
    job.patch({"spec": {"queueName": "other"}})
    job.wait_for_phase("Running")
    assert team.pool_of(job) == {"b"}
    assert job.status.restarts == 0


def test_a_job_of_higher_priority_takes_the_quota_and_the_other_comes_back(team: Team) -> None:
    team.create_queue(a=4)
    urgent = f"urgent-{team.id}"
    team.control_plane.api.create(
        "/apis/scheduling.k8s.io/v1/priorityclasses",
        {"metadata": {"name": urgent}, "value": 1000, "preemptionPolicy": "Never"},
    )
    low = team.submit("low")
    low.wait_for_phase("Running")
    old = {name_of(pod) for pod in low.pods}
    high = team.submit("high", podTemplate={"priorityClassName": urgent})
    high.wait_for_phase("Running")
    assert low.living == []
    assert low.reason("Placed") in ("QueueEvicted", "QueueWaiting")
    assert (low.status.phase, low.status.restarts, low.status.incidents) == ("Pending", 0, [])
    assert not low.status.holds("Suspended")
    assert not holds(team.workload(low), "QuotaReserved")
    high.complete()
    low.wait_for_phase("Running", attempt=2)
    assert not old & {name_of(pod) for pod in low.living}
    assert low.status.restarts == 0
    low.complete()
    low.wait_for_phase("Completed")
    wait_for(lambda: holds(team.workload(low), "Finished"), "the last quota given back")


def test_a_flavor_says_on_which_nodes_a_job_runs_and_what_it_tolerates(team: Team) -> None:
    for name in team.nodes.names:
        if name.startswith("b"):
            team.nodes.taint(name, "reserved", value="team")
    tolerations = ({"key": "reserved", "operator": "Equal", "value": "team"},)
    team.create_queue(a=2, b=4, tolerations=tolerations)
    job = team.submit("bound")
    job.wait_for_phase("Running")
    assert team.pool_of(job) == {"b"}
    assert job.placement.node_selector == team.labels("b")
    for pod in job.pods:
        assert team.labels("b").items() <= pod["spec"]["nodeSelector"].items()


def test_a_suspended_job_leaves_its_quota_and_asks_again_when_it_resumes(team: Team) -> None:
    team.create_queue(a=4)
    job = team.submit("mine")
    job.wait_for_phase("Running")
    other = team.submit("other")
    wait_in_queue(other)
    job.patch({"spec": {"suspend": True}})
    job.wait_for_phase("Suspended")
    other.wait_for_phase("Running")
    job.patch({"spec": {"suspend": False}})
    wait_in_queue(job)
    assert not job.status.holds("Suspended")
    assert job.living == []
    other.complete()
    job.wait_for_phase("Running", attempt=2)
    assert job.status.restarts == 0


def test_a_job_that_leaves_its_queue_runs_without_one(team: Team) -> None:
    team.create_queue(a=2)
    job = team.submit("free")
    wait_in_queue(job)
    job.patch({"spec": {"queueName": None}})
    job.wait_for_phase("Running")
    workloads = workloads_path(team.namespace)
    wait_for(lambda: not team.control_plane.api.list(workloads), "the Workload gone")


def test_jobs_are_deleted_whole_while_kueue_is_down(team: Team) -> None:
    team.create_queue(a=4)
    job = team.submit("gone")
    job.wait_for_phase("Running")
    stop_kueue(team.control_plane)
    try:
        job.delete()
        api, workloads = team.control_plane.api, workloads_path(team.namespace)
        wait_for(lambda: not api.list(workloads), "the Workload gone")
        wait_for(lambda: not job.act.list(), "the pods gone")
    finally:
        start_kueue_again(team.control_plane)
