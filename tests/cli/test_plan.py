"""`omni plan` says what a job file means: for people, and byte for byte for programs."""

import io

import pytest
import torch
from rich.console import Console

from omni_cli.main import main
from omni_cli.plan import tables
from omni_contract.plan import JobPlan
from omni_contract.spec import Job
from omni_contract.spec_model import UsmSpec, VitSpec
from omni_planner.compile import compile_plan
from omni_planner.size import encoder_parameters, stage_sizes
from omni_trainer.encoders.build import build_encoders
from tests.contract.jobs import DEMO, EXAMPLES, changed

DEMO_FILE = str(EXAMPLES / "demo.yaml")


def text_of(plan: JobPlan) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    for table in tables(plan):
        console.print(table)
    return console.export_text()


def test_the_tables_say_who_does_what() -> None:
    plan = compile_plan(Job.read(DEMO))
    said = text_of(plan)
    assert f"version 1, hash {plan.hash}" in said
    assert "2 nodes x 2 ranks = 4 ranks = 2 pipeline stages x 2 replicas" in said
    assert "16 sequences x 512 tokens = 8,192 tokens; 8 microbatches a replica" in said
    assert "123 steps = 1,007,616 tokens, fp32, cpu" in said
    assert "every 20 steps and the last (7 saves) to s3://omni/runs/stamps, 3 kept" in said
    assert "EF1 LF1" in said and "microbatches 2, 4, 6, 8" in said
    assert "61.0 %" in said and "700,000" in said
    assert "memory (bound)" in said


def test_the_json_is_the_plan_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", DEMO_FILE, "--json"]) == 0
    plan = compile_plan(Job.read(DEMO))
    assert capsys.readouterr().out == f"{plan.to_json()}\n"


def test_a_large_job_is_shown_in_short() -> None:
    job = changed("spec.resources", {"nodes": 128, "ranksPerNode": 8, "device": "cpu"})
    job["spec"]["parallelism"] = {"llm": {"pipeline": 4}}
    job["spec"]["batch"]["globalSequences"] = 256 * 128
    said = text_of(compile_plan(Job.read(job)))
    assert "and 960 more in the same order" in said
    assert len(said.splitlines()) < 140


def test_a_job_of_text_alone_encodes_nothing() -> None:
    job = changed("spec.model.encoders", ...)
    job["spec"]["data"] = {"sources": {"books": DEMO["spec"]["data"]["sources"]["books"]}}
    plan = compile_plan(Job.read(job))
    assert "none; schedule onDemand" in text_of(plan)
    assert stage_sizes(plan)[0].encoder_parameters == 0


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"layers": 3, "hiddenSize": 96, "heads": 6},
        {"patchSize": 8, "mergePatches": 1},
    ],
    ids=["demo", "other-sizes", "no-merge"],
)
def test_vit_parameters_are_counted_exactly(change: dict[str, int]) -> None:
    image = DEMO["spec"]["model"]["encoders"]["image"] | change
    _compare(changed("spec.model.encoders.image", image), "image")


@pytest.mark.parametrize(
    "change",
    [{}, {"layers": 3, "hiddenSize": 96, "heads": 6}, {"melBins": 64, "framesPerToken": 16}],
    ids=["demo", "other-sizes", "16-frames"],
)
def test_usm_parameters_are_counted_exactly(change: dict[str, int]) -> None:
    audio = DEMO["spec"]["model"]["encoders"]["audio"] | change
    _compare(changed("spec.model.encoders.audio", audio), "audio")


def _compare(raw: dict[str, object], modality: str) -> None:
    model = Job.read(raw).spec.model
    built = build_encoders(model, seed=1, device=torch.device("cpu"), dtype=torch.float32)
    specs = dict(model.encoders.items())
    for encoder in built:
        if encoder.modality != modality:
            continue
        spec = specs[encoder.modality]
        assert isinstance(spec, VitSpec | UsmSpec)
        counted = encoder_parameters(spec, out_size=model.llm.hidden_size)
        assert sum(p.numel() for p in encoder.parameters()) == counted
