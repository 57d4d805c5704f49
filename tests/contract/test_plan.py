"""A plan is the same bytes wherever it is compiled, and ranks stand where it says."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_contract.errors import SpecError
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.topology import Layout
from omni_planner.compile import compile_plan
from tests.contract.jobs import DEMO, EXAMPLES, changed


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = compile_plan(Job.read(DEMO))
    plan.save(tmp_path / "plan.json")
    again = JobPlan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.hash == plan.hash


def test_a_plan_of_an_older_version_stays_the_same_plan(tmp_path: Path) -> None:
    """After an upgrade its job runs on by it, and pods of both versions agree on it."""
    document = json.loads(compile_plan(Job.read(DEMO)).to_json())
    del document["spec"]["podTemplate"]["dataImage"]
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    (tmp_path / "plan.json").write_text(text)
    read = JobPlan.load(tmp_path / "plan.json")
    assert read.to_json() == text
    assert read.hash == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert read.spec == compile_plan(Job.read(DEMO)).spec


def test_another_process_compiles_the_same_bytes() -> None:
    """Set order and hash seeds must not reach the plan."""
    code = (
        "import sys; from pathlib import Path; from omni_contract.jobfile import read_job;"
        "from omni_planner.compile import compile_plan;"
        "print(compile_plan(read_job(Path(sys.argv[1]))).hash)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "demo.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"PYTHONHASHSEED": "1"},
    )
    assert done.stdout.strip() == compile_plan(Job.read(DEMO)).hash


def test_another_seed_is_another_plan() -> None:
    assert compile_plan(Job.read(changed("spec.train.seed", 8))).hash != (
        compile_plan(Job.read(DEMO)).hash
    )


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}'], ids=["empty", "bare", "newer"])
def test_what_is_no_plan_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"plan\.json: no job plan of version 1"):
        JobPlan.load(path)


@pytest.mark.parametrize(("nodes", "per_node", "pp"), [(2, 2, 2), (4, 8, 8), (3, 4, 1), (1, 6, 3)])
def test_ranks_and_coordinates_are_one_to_one(nodes: int, per_node: int, pp: int) -> None:
    world = nodes * per_node
    layout = Layout(num_nodes=nodes, ranks_per_node=per_node, pp_size=pp, dp_size=world // pp)
    places = {layout.coords(rank) for rank in range(world)}
    assert len(places) == world
    for rank in range(world):
        place = layout.coords(rank)
        assert layout.rank_of(pp_rank=place.pp_rank, dp_rank=place.dp_rank) == rank
        assert rank in layout.ranks_of_node(layout.node_of(rank))
    # A stage is a run of consecutive ranks; replicas stride through the world.
    assert [layout.coords(rank).pp_rank for rank in range(world)] == sorted(
        layout.coords(rank).pp_rank for rank in range(world)
    )
