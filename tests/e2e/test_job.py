"""The job of `make e2e` is one that the compiler takes, and saves where its faults need it."""

from omni_contract.spec import Job
from omni_planner.compile import compile_plan
from tests.e2e.cluster.job import NUM_STEPS, SAVE_EVERY, demo_job


def test_the_job_has_two_nodes_a_spare_and_all_its_steps() -> None:
    job = demo_job(
        "stamps",
        bucket="s3://omni",
        endpoint="http://s3:8333",
        secret="keys",
        nodes={"pool": "training"},
        spares=1,
    )
    plan = compile_plan(Job.read(job))
    assert plan.num_steps == NUM_STEPS
    assert (plan.layout.num_nodes, plan.layout.world_size) == (2, 4)
    spec = plan.spec
    assert (spec.resources.spares, spec.checkpoint.every) == (1, SAVE_EVERY)
    assert spec.checkpoint.uri == "s3://omni/runs/stamps"
    assert spec.storage.credentials_secret == "keys"
    assert spec.pod_template.node_selector == {"pool": "training"}
