"""Every job in manifests/examples is planned, and what it says of itself holds."""

import re
from pathlib import Path

import pytest

from omni_cli.main import main
from omni_contract.jobfile import read_job
from omni_contract.plan import JobPlan
from omni_planner.compile import compile_plan
from omni_planner.placement.units import placement_units
from omni_planner.size import stage_sizes
from tests.contract.jobs import EXAMPLES

FILES = sorted(EXAMPLES.glob("*.yaml"))
GIB = 2**30


def plan_of(name: str) -> JobPlan:
    return compile_plan(read_job(EXAMPLES / f"{name}.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_is_planned(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(path)]) == 0
    said = capsys.readouterr().out
    plan = compile_plan(read_job(path))
    assert f"Job {plan.name}" in said and plan.hash in said
    assert "Mixture by tokens" in said


def test_examples_share_neither_name_nor_checkpoint() -> None:
    jobs = [read_job(path) for path in FILES]
    assert len({job.metadata.name for job in jobs}) == len(jobs)
    assert len({job.spec.checkpoint.uri for job in jobs}) == len(jobs)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_says_how_many_steps_it_takes(path: Path) -> None:
    said = re.search(r"# (\d+) steps of (\d+) x (\d+) tokens", path.read_text())
    if said is not None:
        spec = read_job(path).spec.batch
        steps = (
            compile_plan(read_job(path)).num_steps,
            spec.global_sequences,
            spec.sequence_tokens,
        )
        assert tuple(map(int, said.groups())) == steps


def test_one_node_fits_on_one_node_with_8_gpus() -> None:
    plan = plan_of("one-node")
    assert (plan.layout.num_nodes, plan.layout.ranks_per_node) == (1, 8)
    assert (plan.layout.dp_size, plan.num_microbatches) == (4, 16)
    assert max(size.state_bytes for size in stage_sizes(plan)) < 40 * GIB


def test_workload_a_has_two_reorder_groups_of_four_nodes() -> None:
    plan = plan_of("workload-a")
    assert plan.layout.world_size == 64
    assert placement_units(plan.layout, plan.spec.data.reorder.group_replicas) == (
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    )
    assert max(size.state_bytes for size in stage_sizes(plan)) < 80 * GIB


def test_the_mixture_of_stages_ends_with_all_alike() -> None:
    stages = plan_of("multi-stage-mixture").spec.data.mixture
    assert len(stages) == 5 and set(stages[-1].weights.values()) == {1.0}
