"""The jobs of the benchmark."""

from typing import Any, Final

from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_planner.compile import compile_plan
from tests.cluster.api import Object
from tests.cluster.jobs import job_document

RANKS_PER_NODE: Final = 8
"""A pod takes a whole node."""
STAGES: Final = 8
NODE_LOST_AFTER_S: Final = 5
"""A small machine that runs a thousand nodes is late with some heartbeats."""


def big_job(name: str, *, num_nodes: int, on_unsatisfied: str = "Wait") -> Object:
    """A job of so many nodes in reorder groups of eight nodes, each group in one rack."""
    body = _job(name, num_nodes, STAGES, on_unsatisfied=on_unsatisfied)
    body["spec"]["topology"]["reorderGroupWithin"] = "rack"
    return body


def small_job(name: str, *, num_nodes: int) -> Object:
    """One of the many beside it."""
    return _job(name, num_nodes, 1, on_unsatisfied="Wait")


def plan_of(body: Object) -> JobPlan:
    """The plan of a job."""
    document = {**body, "metadata": {"namespace": "bench", **body["metadata"]}}
    return compile_plan(Job.read(document))


def _job(name: str, num_nodes: int, stages: int, **topology: Any) -> Object:
    restart = {"nodeLostAfterSeconds": NODE_LOST_AFTER_S, "noProgressLimit": 100, "limit": 100}
    body = job_document(
        name,
        nodes=num_nodes,
        resources={"ranksPerNode": RANKS_PER_NODE},
        parallelism={"llm": {"pipeline": stages}, "encoders": {"schedule": "onDemand"}},
        topology={"onUnsatisfied": topology["on_unsatisfied"]},
        restart=restart,
        podTemplate={"terminationGraceSeconds": 30},
    )
    spec = body["spec"]
    spec["model"]["llm"]["layers"] = 32
    spec["batch"]["globalSequences"] = RANKS_PER_NODE * num_nodes
    replicas = RANKS_PER_NODE * num_nodes // stages
    spec["data"].setdefault("reorder", {})["groupReplicas"] = min(replicas, RANKS_PER_NODE)
    spec["checkpoint"]["uri"] = f"s3://omni/runs/{name}"
    return body
