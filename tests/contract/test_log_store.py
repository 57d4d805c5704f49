"""Names of stored logs: what a pod writes is what a reader finds."""

import pytest

from omni_contract.log_store import (
    LogBlock,
    LogFile,
    LogPlace,
    begun,
    generation_of,
    job_folder,
    job_of_pod,
    read_attempt,
)
from omni_contract.names import base_name
from omni_trainer.supervisor.rank_processes import rank_log

FILES = {
    "trainer-3.2.log": LogFile(kind="trainer", number=3, attempt=2),
    "data-spare.12.log": LogFile(kind="data", number=None, attempt=12),
    "nursery-0.1.log": LogFile(kind="nursery", number=0, attempt=1),
    "rank-24.2.7.log": LogFile(kind="rank", number=24, attempt=2, generation=7),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_it_was_written(name: str) -> None:
    assert LogFile.parse(name) == FILES[name]
    assert FILES[name].name == name


@pytest.mark.parametrize(
    "name",
    ["rank-24.2.log", "trainer-3.2.1.log", "rank-24.2.7.error.json", "sidecar-0.1.log", "x.log"],
)
def test_other_files_are_no_logs_to_store(name: str) -> None:
    assert LogFile.parse(name) is None


def test_the_log_of_a_rank_is_one_of_them() -> None:
    file = LogFile.parse(rank_log(rank=24, attempt=2, generation=7).name)
    assert file == FILES["rank-24.2.7.log"]
    assert file.stream == "rank-24.7"
    assert generation_of(file.stream) == 7
    assert generation_of("trainer") is None


@pytest.mark.parametrize("node", [0, 12_345, None])
@pytest.mark.parametrize("at", [begun(1_796_050_000), None])
def test_a_block_is_found_by_its_key(node: int | None, at: str | None) -> None:
    place = LogPlace(job="stamps-5d1ce", attempt=2, node=node, pod="stamps-5d1ce-1-0", begun=at)
    block = LogBlock(place=place, stream="rank-24.7", offset=262_144)
    begin = f"{job_folder('stamps-5d1ce')}/"
    assert block.key.startswith(begin)
    assert LogBlock.parse(block.key.removeprefix(begin), "stamps-5d1ce") == block
    later = LogBlock(place=place, stream="rank-24.7", offset=10_000_000)
    assert block.key < later.key


def test_pods_that_had_one_name_are_in_order() -> None:
    pods = [
        LogPlace(job="stamps-5d1ce", attempt=2, node=0, pod="stamps-5d1ce-1-0", begun=begun(at))
        for at in (999_999_999, 1_796_050_000, 1_796_050_001)
    ]
    folders = [pod.folder for pod in pods]
    assert folders == sorted(set(folders))


def test_foreign_objects_are_left_alone() -> None:
    assert LogBlock.parse("attempt-0002/README", "stamps-5d1ce") is None
    assert read_attempt("attempt-0012") == 12
    assert read_attempt("notes") is None


def test_a_pod_tells_its_job_as_the_operator_names_it() -> None:
    job = base_name("my-job", "5d1ce0a2-0000-4000-8000-000000000001")
    assert job == "my-job-5d1ce"
    assert job_of_pod(f"{job}-12-3") == job
    assert job_of_pod("laptop") == "laptop"
