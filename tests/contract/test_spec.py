"""A job file means one thing, and an error in it says where, what, which rule and what instead."""

from pathlib import Path
from typing import Any

import pytest

from omni_contract.errors import SpecError
from omni_contract.jobfile import read_job
from omni_contract.spec import Job
from tests.contract.jobs import DEMO, EXAMPLES, changed
from tests.contract.kubernetes import refusals


def errors_of(job: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        Job.read(job)
    return str(caught.value).splitlines()


def test_the_demo_job_is_read_with_defaults() -> None:
    job = read_job(EXAMPLES / "demo.yaml")
    assert job.metadata.name == "stamps"
    assert job.spec.train.tokens == 1_000_000
    assert job.spec.checkpoint.every == 20
    assert job.spec.checkpoint.async_
    assert job.spec.model.llm.num_ffn == 192
    assert [str(m) for m in job.spec.data.sources["speech"].order] == ["audio", "text"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "spec.model.llm.layrs",
            4,
            "spec.model.llm.layrs: unknown field; did you mean 'layers'?",
        ),
        (
            "spec.model.llm.weights",
            "s3://omni/llama",
            "spec.model.llm.weights: 's3://omni/llama' is refused: this version starts from "
            "random weights only; leave it out",
        ),
        (
            "spec.resources.nodeCount",
            2,
            "spec.resources.nodeCount: unknown field; did you mean 'nodes'?",
        ),
        (
            "spec.storage.xyz",
            2,
            "spec.storage.xyz: unknown field; the fields here are endpoint, region, "
            "credentialsSecret",
        ),
        (
            "spec.data.sources.books.lossOm",
            "text",
            "spec.data.sources.books.lossOm: unknown field; did you mean 'lossOn'?",
        ),
        (
            "spec.data.mixture.1.rampp",
            "linear",
            "spec.data.mixture[1].rampp: unknown field; did you mean 'ramp'?",
        ),
        (
            "spec.checkpoint",
            ...,
            "spec.checkpoint: this field is required (Where it is saved)",
        ),
        (
            "spec.data.reorder.algorithm",
            "kk",
            "spec.data.reorder.algorithm: 'kk' is not available in this version; use 'identity'",
        ),
        (
            "spec.parallelism.encoders.zero",
            3,
            "spec.parallelism.encoders.zero: 3 is not available in this version; use one of 0, 1",
        ),
        (
            "spec.parallelism.encoders.schedule",
            "ondemand",
            "spec.parallelism.encoders.schedule: 'ondemand' is not available in this version; "
            "did you mean 'onDemand'? use one of 'onDemand', 'upfront'",
        ),
        (
            "spec.parallelism.llm.tensor",
            2,
            "spec.parallelism.llm.tensor: 2 is not available in this version; use 1",
        ),
        (
            "spec.train.precision",
            None,
            "spec.train.precision: an empty value (null) is refused; use one of 'fp32', 'bf16' or "
            "leave the field out",
        ),
        (
            "spec.train.tokens",
            "1Q",
            "spec.train.tokens: '1Q' is refused: write a whole number, or one with k, M, B or T "
            "behind it, such as 50k",
        ),
        (
            "spec.train.tokens",
            0,
            "spec.train.tokens: 0 is below 1; use 1 or more",
        ),
        (
            "spec.checkpoint.every",
            "soon",
            "spec.checkpoint.every: 'soon' is refused: write a whole number of steps from 1 on, "
            "such as 20 steps",
        ),
        (
            "spec.train.optimizer.learningRate",
            "fast",
            "spec.train.optimizer.learningRate: 'fast' is refused: write a number such as 0.003 "
            "or 3e-3, without quotes",
        ),
        (
            "spec.train.optimizer.learningRate",
            float("nan"),
            "spec.train.optimizer.learningRate: nan is refused: write a finite number",
        ),
        (
            "spec.resources.nodes",
            "2",
            "spec.resources.nodes: '2' is text; write the number without quotes",
        ),
        (
            "spec.suspend",
            "yes",
            "spec.suspend: 'yes' is refused: write true or false, without quotes",
        ),
        (
            "spec.topology",
            "rack",
            "spec.topology: 'rack' is refused: this is a block with the fields "
            "reorderGroupWithin, jobWithin, levels, onUnsatisfied",
        ),
        (
            "spec.data.mixture",
            {"books": 1},
            "spec.data.mixture: {'books': 1} is refused: write a list: [a, b], or lines that "
            "begin with a dash",
        ),
        (
            "metadata.name",
            "Stamps_1",
            "metadata.name: 'Stamps_1' does not match ^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$ "
            "(DNS label of at most 40 characters; pods get it as a prefix)",
        ),
        (
            "spec.data.sources.My Books",
            {"uri": "s3://omni/books", "parts": {"text": "txt"}},
            "spec.data.sources.My Books: 'My Books' does not match "
            "^[a-z0-9]([-a-z0-9]{0,30}[a-z0-9])?$: lower-case letters, digits and dashes in "
            "between",
        ),
        (
            "spec.data.sources.books.parts.video",
            "mp4",
            "spec.data.sources.books.parts.video: 'video' is not available in this version; "
            "use one of 'text', 'image', 'audio'",
        ),
        (
            "spec.data.sources.books.uri",
            "s3://omni/books/",
            "spec.data.sources.books.uri: 's3://omni/books/' is refused: write it as "
            "s3://BUCKET/KEY, without a slash at the end",
        ),
        (
            "spec.data.sources.books.template",
            "{txt}",
            "spec.data.sources.books.template: '{txt}' must name each part once and nothing else; "
            "use '{text}' or another order of it",
        ),
        (
            "spec.data.mixture.0.weights.bokks",
            1,
            "spec.data.mixture[0].weights.bokks: no source has this name; the sources are books, "
            "drawings, pictures, speech",
        ),
        (
            "spec.data.mixture.1.until",
            "200k",
            "spec.data.mixture[1].until: 200000 is not above the 200000 where the stage before "
            "ends",
        ),
        (
            "spec.podTemplate",
            {"containers": [{"name": "trainer", "command": ["sleep"]}]},
            "spec.podTemplate.containers[0].command: the operator sets it for container "
            "'trainer'; take it out, or add a container of another name",
        ),
        (
            "spec.podTemplate",
            {"labels": {"megascale-omni.dev/job": "mine"}},
            "spec.podTemplate.labels.megascale-omni.dev/job: the operator keeps labels with the "
            "prefix megascale-omni.dev/ for itself; take it out, or give it a prefix of your own",
        ),
        (
            "spec.podTemplate",
            {"annotations": {"megascale-omni.dev/note": "mine"}},
            "spec.podTemplate.annotations.megascale-omni.dev/note: the operator keeps annotations "
            "with the prefix megascale-omni.dev/ for itself; take it out, or give it a prefix of "
            "your own",
        ),
        (
            "spec.data.mixture.0.ramp",
            "linear",
            "spec.data.mixture[0].ramp: the first stage has no weights to ramp from",
        ),
        (
            "spec.model.encoders.audio",
            ...,
            "spec.data.sources.speech.parts.audio: 'ogg' needs an encoder; add "
            "model.encoders.audio or take the source out",
        ),
        (
            "spec.model.llm.kvHeads",
            3,
            "spec.model.llm.kvHeads: 3 does not divide the 4 heads; use one of 1, 2, 4",
        ),
        (
            "spec.model.encoders.image.heads",
            5,
            "spec.model.encoders.image.hiddenSize: 64 is no multiple of twice the 5 heads; "
            "use a multiple of 10",
        ),
        (
            "spec.batch.globalSequences",
            15,
            "spec.batch.globalSequences: 15 does not divide among 2 replicas (resources.nodes x "
            "resources.ranksPerNode / parallelism.llm.pipeline) of 1 sequences a microbatch; "
            "use a multiple of 2",
        ),
        (
            "spec.batch.globalSequences",
            1_000_000,
            "spec.batch.globalSequences: 1000000 makes 500000 microbatches a replica, but 2 "
            "pipeline stages can schedule 4096; use 8192 or less, or raise "
            "batch.microbatchSequences, resources.nodes or resources.ranksPerNode",
        ),
        (
            "spec.data.reorder.groupReplicas",
            3,
            "spec.data.reorder.groupReplicas: 3 does not divide the 2 replicas (resources.nodes x "
            "resources.ranksPerNode / parallelism.llm.pipeline); use one of 1, 2",
        ),
        (
            "spec.train.precision",
            "bf16",
            "spec.train.precision: bf16 needs a GPU, but resources.device is cpu; write fp32",
        ),
        (
            "spec.restart.rules",
            [{"when": {"class": ["OMM"]}, "do": "FailJob"}],
            "spec.restart.rules[0].when.class[0]: 'OMM' is not available in this version; did you "
            "mean 'OOM'? use one of 'AppError', 'OOM', 'Hang', 'NodeLost', 'NodeTainted', "
            "'GpuHardware', 'DataService', 'Rendezvous', 'Preempted', 'Evicted', 'PodDeleted', "
            "'StartError', 'PendingTimeout', 'Unknown'",
        ),
    ],
)
def test_one_change_to_the_demo_job_is_answered_in_one_line(
    path: str, value: Any, message: str
) -> None:
    assert errors_of(changed(path, value)) == [message]


def test_several_problems_are_said_at_once() -> None:
    job = changed("spec.model.llm.layrs", 4)
    job["spec"]["batch"]["sequenceTokens"] = 1
    del job["spec"]["checkpoint"]
    assert [line.split(": ")[0] for line in errors_of(job)] == [
        "spec.model.llm.layrs",
        "spec.batch.sequenceTokens",
        "spec.checkpoint",
    ]


def test_several_clashes_between_fields_are_said_at_once() -> None:
    job = changed("spec.parallelism.llm.pipeline", 3)
    del job["spec"]["model"]["encoders"]["audio"]
    assert errors_of(job) == [
        "spec.data.sources.speech.parts.audio: 'ogg' needs an encoder; add model.encoders.audio "
        "or take the source out",
        "spec.parallelism.llm.pipeline: 3 does not divide the 4 layers of model.llm; use one of "
        "1, 2, 4, or 3 does not divide the 4 ranks (resources.nodes x resources.ranksPerNode); "
        "use one of 1, 2, 4",
    ]


def test_microbatch_sequences_that_do_not_divide_name_a_batch_that_works() -> None:
    job = changed("spec.batch", {"globalSequences": 9, "microbatchSequences": 4})
    job["spec"]["batch"]["sequenceTokens"] = 512
    assert errors_of(job) == [
        "spec.batch.globalSequences: 9 is no multiple of microbatchSequences 4; use 8"
    ]


@pytest.mark.parametrize("raw", [None, [], "job"], ids=["nothing", "list", "text"])
def test_what_is_no_mapping_is_no_job(raw: Any) -> None:
    assert errors_of(raw) == [
        "job: expected a mapping with apiVersion, kind MultimodalTrainingJob and spec"
    ]


def test_a_job_file_is_answered_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("spec:\n  model: {llm: [}\n")
    with pytest.raises(SpecError, match=r"job\.yaml: line 2, column 17: .*; mend the YAML there"):
        read_job(path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """YAML would let the last one win without a word."""
    path = tmp_path / "job.yaml"
    path.write_text("spec:\n  suspend: false\n  suspend: true\n")
    with pytest.raises(SpecError, match="line 3, column 3: the key 'suspend' stands here twice"):
        read_job(path)


def test_a_missing_job_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no such file; give the path of a job YAML"):
        read_job(tmp_path / "no.yaml")


def test_kubernetes_metadata_does_not_disturb() -> None:
    job = changed("metadata", {"name": "stamps", "uid": "1", "labels": {"a": "b"}})
    assert Job.read(job).spec == Job.read(DEMO).spec


def test_a_file_nested_without_end_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("spec: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(SpecError, match="nested too deep"):
        read_job(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec.resources.gpuResource", "nvidia.com/ gpu"),
        ("spec.resources.gpuResource", "gpu"),
        ("spec.resources.gpuResource", "NVIDIA.com/gpu"),
        ("spec.podTemplate", {"imagePullSecrets": ["my secret"]}),
        ("spec.podTemplate", {"imagePullSecrets": [""]}),
        ("spec.podTemplate", {"image": "trainer 2"}),
        ("spec.podTemplate", {"image": "registry.example/Trainer:2"}),
        ("spec.podTemplate", {"image": "registry.example/trainer:"}),
        ("spec.podTemplate", {"image": "https://registry.example/trainer"}),
        ("spec.podTemplate", {"dataImage": "dataloader 2"}),
        ("spec.podTemplate", {"labels": {"megascale-omni.dev/team": "a"}}),
    ],
)
def test_a_name_that_no_cluster_knows_is_refused_by_the_api_server_too(
    field: str, value: Any
) -> None:
    job = changed(field, value)
    assert field in errors_of(job)[0]
    assert refusals(job)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("spec.resources.gpuResource", "amd.com/gpu"),
        ("spec.resources.gpuResource", "nvidia.com/mig-1g.5gb.shared"),
        ("spec.podTemplate", {"imagePullSecrets": ["team.pull-1"]}),
        ("spec.podTemplate", {"image": "trainer"}),
        ("spec.podTemplate", {"dataImage": "registry.example/dataloader:2"}),
        ("spec.podTemplate", {"image": "localhost:5000/a/b__c/d-e.f:V1.2_x"}),
        ("spec.podTemplate", {"image": "[fd00::1]:5000/trainer:1"}),
        ("spec.podTemplate", {"image": f"Registry.example/trainer:1@sha256:{'0a' * 32}"}),
        ("spec.podTemplate", {"labels": {"example.com/team": "a"}}),
        (
            "spec.podTemplate",
            {"containers": [{"name": "data", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
        ),
        (
            "spec.podTemplate",
            {"containers": [{"name": "trainer", "resources": {"limits": {"rdma/hca": 1}}}]},
        ),
    ],
)
def test_a_name_that_clusters_know_is_taken(field: str, value: Any) -> None:
    job = changed(field, value)
    Job.read(job)
    assert not refusals(job)


@pytest.mark.parametrize("field", ["limits", "requests"])
def test_gpus_of_the_trainer_are_counted_by_its_ranks_alone(field: str) -> None:
    job = changed("spec.resources.device", "auto")
    gpu = {field: {"example.com/gpu": 1}}
    job["spec"]["podTemplate"] = {"containers": [{"name": "trainer", "resources": gpu}]}
    Job.read(job)
    job["spec"]["resources"]["gpuResource"] = "example.com/gpu"
    ranks = job["spec"]["resources"]["ranksPerNode"]
    assert errors_of(job) == [
        f"spec.podTemplate.containers[0].resources.{field}.example.com/gpu: the operator sets it "
        f"to resources.ranksPerNode ({ranks}), one for each rank; take it out"
    ]
    job["spec"]["resources"]["device"] = "cpu"
    Job.read(job)  # Nothing is laid over it there.
