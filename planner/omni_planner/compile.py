"""Job file to plan: the one place where sizes of the run are derived. Pure."""

from omni_contract.dataflow import Window
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.topology import Layout
from omni_planner.check import check_dataflow
from omni_planner.schedule import on_demand_dataflow, upfront_dataflow


def compile_plan(job: Job) -> JobPlan:
    """Compile a validated job. The same file gives the same plan, wherever it is compiled.

    Raises SpecError when the joint schedule cannot run.
    """
    spec = job.spec
    world_size = spec.resources.nodes * spec.resources.ranks_per_node
    pp_size = spec.parallelism.llm.pipeline
    dp_size = world_size // pp_size
    num_microbatches = spec.batch.global_sequences // (dp_size * spec.batch.microbatch_sequences)
    dataflow = _dataflow(
        spec.parallelism.encoders.schedule, num_stages=pp_size, num_microbatches=num_microbatches
    )
    check_dataflow(num_stages=pp_size, num_microbatches=num_microbatches, dataflow=dataflow)
    return JobPlan(
        name=job.metadata.name,
        spec=spec,
        layout=Layout(
            num_nodes=spec.resources.nodes,
            ranks_per_node=spec.resources.ranks_per_node,
            pp_size=pp_size,
            dp_size=dp_size,
        ),
        num_steps=max(1, -(-spec.train.tokens // spec.batch.step_tokens)),
        num_microbatches=num_microbatches,
        dataflow=dataflow,
    )


def _dataflow(schedule: str, *, num_stages: int, num_microbatches: int) -> dict[str, Window]:
    make = on_demand_dataflow if schedule == "onDemand" else upfront_dataflow
    return make(num_stages=num_stages, num_microbatches=num_microbatches)
