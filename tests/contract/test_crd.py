"""The CRD is structural, cheap to check, up to date, and refuses what Python refuses."""

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from omni_contract.crd import crd, generated, main
from omni_contract.crd_docs import job_schema
from omni_contract.crd_schema import RULES, Schema, structural
from omni_contract.errors import SpecError
from omni_contract.spec import Job
from omni_contract.spec_model import LlmSpec
from omni_contract.status import JobStatus
from tests.contract.jobs import DEMO, EXAMPLES, changed
from tests.contract.kubernetes import refusals, root_schema

ROOT = EXAMPLES.parents[1]
INT_OR_STRING = [{"type": "integer"}, {"type": "string"}]


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}.{key}")


def test_every_level_is_typed_and_nothing_is_a_reference_or_a_union() -> None:
    """Kubernetes: structural schemas. `x-kubernetes-int-or-string` stands in for the type."""
    for path, node in nodes(root_schema()):
        if node.get("x-kubernetes-int-or-string"):
            assert node["anyOf"] == INT_OR_STRING and "type" not in node, path
        else:
            assert isinstance(node.get("type"), str), path
            assert "anyOf" not in node, path
        forbidden = {"$ref", "$defs", "oneOf", "allOf", "not", "const", "patternProperties"}
        assert forbidden.isdisjoint(node), path
        assert not ("properties" in node and "additionalProperties" in node), path
        if node.get("type") == "object":
            assert (
                {"properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields"}
                & set(node)
            ) or path == ".metadata", path
        if node.get("type") == "array":
            assert "items" in node, path


def test_only_forms_of_another_project_are_free() -> None:
    free = [p for p, n in nodes(root_schema()) if n.get("x-kubernetes-preserve-unknown-fields")]
    pod = ".spec.podTemplate"
    lists = ("tolerations", "volumes", "volumeMounts", "containers")
    assert free == [*(f"{pod}.{name}.items" for name in lists), f"{pod}.securityContext"]


def test_every_list_map_and_text_of_the_spec_is_bounded() -> None:
    """Rules over an unbounded one cost too much, and the API server refuses the CRD."""
    bound = {"array": "maxItems", "string": "maxLength"}
    for path, node in nodes(root_schema()["properties"]["spec"]):
        if "additionalProperties" in node:
            assert "maxProperties" in node, path
        elif node.get("type") in bound and "enum" not in node:
            assert bound[node["type"]] in node, path


def test_every_field_of_spec_and_status_is_described() -> None:
    for path, node in nodes(root_schema()):
        for name, child in node.get("properties", {}).items():
            if path or name == "spec":
                assert child.get("description") or path == ".metadata", f"{path}.{name}"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.suspend", False),
        ("spec.parallelism.encoders.longerThanTokens", "4k"),
        ("spec.parallelism.encoders.longerThanTokens", 4096),
        ("spec.train.tokens", 1_000_000),
        ("spec.checkpoint.every", 7),
        ("spec.queueName", None),
        ("spec.model.llm.weights", None),
        ("spec.storage", {"endpoint": "http://127.0.0.1:8333", "credentialsSecret": "omni-s3"}),
        ("spec.podTemplate", {"tolerations": [{"operator": "Exists"}], "env": {"A": "b"}}),
        ("spec.topology", {"reorderGroupWithin": "rack", "onUnsatisfied": "Relax"}),
        ("spec.restart.rules", [{"when": {"class": ["NodeLost"]}, "do": "ReplacePod"}]),
        ("spec.data.mixture", []),
        ("spec.data.reorder.groupReplicas", 2),
        ("spec.batch.globalSequences", 8192),
        ("spec.parallelism.llm.pipeline", 4),
        ("spec.data.sources.speech.template", "{text}<audio>"),
    ],
)
def test_python_and_kubernetes_accept(path: str, value: Any) -> None:
    job = changed(path, value)
    Job.read(job)
    assert refusals(job) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.model.llm.layrs", 4),
        ("spec.checkpoint", ...),
        ("spec.data.reorder.algorithm", "kk"),
        ("spec.parallelism.encoders.zero", 3),
        ("spec.parallelism.llm.tensor", 2),
        ("spec.parallelism.encoders.longerThanTokens", "long"),
        ("spec.train.precision", None),
        ("spec.train.precision", "bf16"),
        ("spec.train.precision", ...),
        ("spec.train.tokens", "1Q"),
        ("spec.train.tokens", 0),
        ("spec.train.tokens", True),
        ("spec.train.optimizer.learningRate", 0),
        ("spec.checkpoint.every", "0 steps"),
        ("spec.resources.nodes", "2"),
        ("spec.resources.nodes", 3),
        ("spec.suspend", "yes"),
        ("spec.topology", "rack"),
        ("metadata.name", "Stamps_1"),
        ("spec.data.sources", {}),
        ("spec.data.sources.My Books", {"uri": "s3://omni/books", "parts": {"text": "txt"}}),
        ("spec.data.sources.books.parts.video", "mp4"),
        ("spec.data.sources.speech.parts", {"audio": "ogg"}),
        ("spec.data.sources.books.uri", "s3://omni/books/"),
        ("spec.data.sources.books.uri", "/data/books"),
        ("spec.data.sources.books.template", "{txt}"),
        ("spec.data.sources.books.template", "<image>{text}"),
        ("spec.data.sources.speech.template", "{text}{text}"),
        ("spec.data.sources.speech.template", "<audio> {text}"),
        ("spec.data.mixture.0.weights", {"books": 0}),
        ("spec.data.mixture.0.weights", {}),
        ("spec.data.mixture.0.weights.bokks", 1),
        ("spec.data.mixture.0.weights.books", -1),
        ("spec.data.mixture.0.until", None),
        ("spec.data.mixture.0.until", ...),
        ("spec.data.mixture.0.ramp", "linear"),
        ("spec.model.encoders", ...),
        ("spec.model.encoders.audio", ...),
        ("spec.model.encoders.image", None),
        ("spec.model.llm.kvHeads", 3),
        ("spec.model.llm.heads", 64),
        ("spec.model.encoders.image.heads", 5),
        ("spec.parallelism.llm.pipeline", 3),
        ("spec.parallelism.llm.pipeline", 8),
        ("spec.batch.globalSequences", 15),
        ("spec.batch.globalSequences", 10_000),
        ("spec.batch.microbatchSequences", 3),
        ("spec.batch.microbatchSequences", 16),
        ("spec.data.reorder.groupReplicas", 3),
        ("spec.restart.rules", [{"when": {"class": ["OMM"]}, "do": "FailJob"}]),
        ("spec.restart.rules", [{"when": {"class": []}, "do": "FailJob"}]),
        ("spec.podTemplate", {"env": {"A": 1}}),
    ],
)
def test_python_and_kubernetes_refuse(path: str, value: Any) -> None:
    job = changed(path, value)
    with pytest.raises(SpecError):
        Job.read(job)
    assert refusals(job) != []


@pytest.mark.parametrize("path", ["spec.podTemplate", "spec.train.seed", "spec.batch"])
def test_an_empty_value_is_refused_here_and_left_out_there(path: str) -> None:
    """tests/cluster/test_fuzz.py asks a real API server."""
    job = changed(path, None)
    with pytest.raises(SpecError, match="null"):
        Job.read(job)
    assert refusals(job) == refusals(changed(path, ...) if path != "spec.podTemplate" else DEMO)


@pytest.mark.parametrize("value", [None, "All"])
def test_an_enum_may_be_left_empty(value: str | None) -> None:
    job = changed("spec.keepPods", value)
    Job.read(job)
    assert refusals(job) == []


def test_weights_are_refused_by_both() -> None:
    job = changed("spec.model.encoders.image.weights", "s3://omni/vit")
    with pytest.raises(SpecError):
        Job.read(job)
    assert any("random weights only" in said for said in refusals(job))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.train.seed", 8),
        ("spec.model.llm.layers", 8),
        ("spec.data.mixture.0.weights.books", 2),
        ("spec.checkpoint.uri", "s3://omni/runs/other"),
        ("spec.parallelism", ...),
        ("spec.resources.nodes", ...),
        ("spec.resources.ranksPerNode", 4),
        ("spec.resources", {"ranksPerNode": 2, "device": "cpu"}),
    ],
)
def test_what_decides_the_training_cannot_change(path: str, value: Any) -> None:
    said = refusals(changed(path, value), old=DEMO)
    assert said and all("cannot change in a job that exists; create a new job" in s for s in said)


def test_the_resources_cannot_go_as_a_whole() -> None:
    """1 node by default instead of 2: the pipeline would still divide."""
    job = changed("spec.parallelism.llm.pipeline", 1)
    without = copy.deepcopy(job)
    del without["spec"]["resources"]
    said = refusals(without, old=job)
    assert any("resources cannot come or go" in line for line in said)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.suspend", True),
        ("spec.restart.limit", 9),
        ("spec.podTemplate", {"image": "trainer:2", "dataImage": "dataloader:2"}),
        ("spec.ttlSecondsAfterFinished", 60),
        ("spec.resources.spares", 1),
        ("spec.storage.credentialsSecret", "rotated"),
    ],
)
def test_what_runs_the_training_may_change(path: str, value: Any) -> None:
    assert refusals(changed(path, value), old=DEMO) == []


def test_the_status_that_the_model_writes_fits_the_schema() -> None:
    status = JobStatus.model_validate(
        {
            "phase": "Restarting",
            "conditions": [
                {
                    "type": "Restarting",
                    "status": "True",
                    "reason": "RankLost",
                    "message": "rank 2 was killed by signal 9",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
            "attempt": 1,
            "progress": {"step": 60, "numSteps": 123, "loss": 4.5},
            "incidents": [
                {
                    "time": "2026-01-01T00:00:00Z",
                    "fault": "AppError",
                    "action": "RestartInPlace",
                    "attempt": 1,
                    "generation": 0,
                    "message": "rank 2 was killed by signal 9",
                    "seconds": {"detect": 0.2},
                }
            ],
        }
    )
    job = copy.deepcopy(DEMO) | {"status": status.model_dump(mode="json", by_alias=True)}
    assert refusals(job) == []


def test_printer_columns_point_at_fields() -> None:
    (version,) = crd()["spec"]["versions"]
    assert version["subresources"] == {"status": {}}
    for column in version["additionalPrinterColumns"]:
        node = root_schema()
        for step in column["jsonPath"].strip(".").split("."):
            if step == "metadata":
                break
            node = node["properties"][step]
        else:
            assert node["type"] == column["type"], column["name"]


def test_the_editor_schema_accepts_the_example_and_refuses_a_misspelling() -> None:
    validator = jsonschema.Draft202012Validator(job_schema())
    validator.check_schema(job_schema())
    assert validator.is_valid(DEMO)
    assert not validator.is_valid(changed("spec.model.llm.layrs", 4))


def test_generated_files_are_up_to_date() -> None:
    assert main(["--check", "--root", str(ROOT)]) == 0


def test_a_drift_is_found_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "run make manifests" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    path = tmp_path / "manifests" / "crd.yaml"
    path.write_text(path.read_text().replace("maximum: 1024", "maximum: 2048"))
    assert main(["--check", "--root", str(tmp_path)]) == 1


def test_the_manifest_is_the_crd_and_the_chart_holds_the_same() -> None:
    files = generated()
    assert yaml.safe_load(files["manifests/crd.yaml"]) == crd()
    assert files["charts/megascale-omni/crds/crd.yaml"] == files["manifests/crd.yaml"]


def test_the_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((ROOT / "charts" / "megascale-omni" / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "contract" / "pyproject.toml").read_text())["project"]
    assert chart["apiVersion"] == "v2"
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_rules_stand_at_the_block_they_are_about() -> None:
    rules = [rule["rule"] for rule in structural(LlmSpec)[RULES]]
    assert rules == [rule for rule, _ in LlmSpec.cel_rules]
