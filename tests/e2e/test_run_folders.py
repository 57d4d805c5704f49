"""What pods write in their run folders is read to the end, wherever they end."""

import shutil
from pathlib import Path

from omni_contract import names
from omni_contract.records import ConsumedRecord, ConsumedSample, StepRecord
from tests.e2e.cluster.run_folders import RunFolders
from tests.e2e.cluster.stage import S3Server

NOTES = """
It brings an S3 server to try things out. A job uses it by

  storage:
    endpoint: http://omni-s3.omni-system.svc.cluster.local:8333
    credentialsSecret: omni-s3

The secret is in team; objectStore.namespaces names more.
"""


def step_line(step: int, loss: float, attempt: int = 1, generation: int = 0) -> str:
    record = StepRecord(
        step=step,
        attempt=attempt,
        generation=generation,
        time_s=100.0 + step,
        step_s=1.0,
        loss=loss,
        loss_by={},
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=1,
        tokens_by_modality={},
        tokens_by_source={},
        weights={},
        corrupt_samples=0,
        max_live_encoder_microbatches=0,
    )
    return record.model_dump_json() + "\n"


def consumed_line(step: int, rank: int, *indices: int, corrupt: bool = False) -> str:
    samples = [
        ConsumedSample(
            microbatch=0,
            source="books",
            epoch=0,
            index=i,
            first_token=0,
            num_tokens=8,
            corrupt=corrupt,
        )
        for i in indices
    ]
    record = ConsumedRecord(step=step, attempt=1, generation=0, rank=rank, samples=samples)
    return record.model_dump_json() + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_losses_are_kept_by_pair_and_samples_in_order_of_ranks(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    append(first / names.METRICS_FILE, step_line(1, 0.5) + step_line(1, 0.25, generation=1))
    append(first / "consumed-2.jsonl", consumed_line(1, 2, 7, 5))
    append(second / "consumed-1.jsonl", consumed_line(1, 1, 3, corrupt=True))
    with RunFolders() as folders:
        folders.read([first, second])
        before, after = folders.steps()
        assert folders.newest() == ((1, 1), 1)
    assert (before.attempt, before.generation, before.losses) == (1, 0, {1: 0.5})
    assert before.samples == {1: ["books/0/3/0!", "books/0/7/0", "books/0/5/0"]}
    assert (after.losses, after.samples) == ({1: 0.25}, {})
    assert before.times_s == {1: 101.0}


def test_what_is_written_while_a_folder_goes_is_read_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with RunFolders() as folders:
        folders.read([folder])
        assert folders.newest() == ((0, 0), 0)
        append(folder / names.METRICS_FILE, step_line(1, 0.5))
        folders.read([folder])
        append(folder / names.METRICS_FILE, step_line(2, 0.25))
        shutil.rmtree(folder)
        folders.read([folder])
        assert folders.newest() == ((1, 0), 2)


def test_a_line_cut_short_by_a_kill_is_left_out_and_a_line_in_the_making_waits(
    tmp_path: Path,
) -> None:
    whole = step_line(2, 0.25)
    with RunFolders() as folders:
        path = tmp_path / names.METRICS_FILE
        append(path, step_line(1, 0.5)[:40] + "\n" + whole[:30])
        folders.read([tmp_path])
        assert folders.steps() == []
        append(path, whole[30:])
        folders.read([tmp_path])
        (trained,) = folders.steps()
    assert trained.losses == {2: 0.25}


def test_the_s3_server_is_found_in_what_helm_prints() -> None:
    found = S3Server.read(NOTES)
    assert found.endpoint == "http://omni-s3.omni-system.svc.cluster.local:8333"
    assert found.secret == "omni-s3"
