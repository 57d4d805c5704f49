"""Wherever a run is hit, it ends with the same losses, bit for bit, from the same samples."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract.names import Exit
from omni_contract.records import RunEvent
from omni_contract.spec_run import FaultClass
from tests.e2e.jobs import OmniRun, small_job
from tests.fakes.sources import make_sources

pytestmark = pytest.mark.timeout(400)

Start = Callable[..., OmniRun]


@pytest.fixture(scope="module")
def bucket(s3_server: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A bucket that holds four small sources and their tokenizer."""
    store = s3_server.open()
    store.create_bucket("kill-points")
    make_sources(tmp_path_factory.mktemp("sources") / "all").upload(store, "s3://kill-points")
    return "s3://kill-points"


@pytest.fixture(scope="module")
def start(
    bucket: str, s3_server: LocalS3, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Start]:
    """Start `omni run` on the small job; whatever is left of it is killed at the end."""
    runs: list[OmniRun] = []

    def start_one(name: str, *faults: str, **job: Any) -> OmniRun:
        folder = tmp_path_factory.mktemp(name) / "run"
        runs.append(OmniRun(folder, small_job(bucket, name, **job), s3_server.env, faults))
        return runs[-1]

    yield start_one
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(start: Start) -> OmniRun:
    """The run that nothing happens to."""
    run = start("undisturbed")
    assert run.wait() == Exit.OK, run.output
    assert not run.leftovers()
    assert not run.events("fault")
    assert [line.step for line in run.steps()] == list(range(1, 15))
    return run


def assert_same_training(run: OmniRun, undisturbed: OmniRun) -> None:
    assert run.losses() == undisturbed.losses()  # replays, too, equal their originals
    assert run.consumed() == undisturbed.consumed()
    last = {line.step: line for line in run.steps()}
    assert sorted(last) == list(range(1, 15))
    for line in undisturbed.steps():
        again = last[line.step]
        assert (again.grad_norm, again.weights, again.tokens_by_source) == (
            line.grad_norm, line.weights, line.tokens_by_source,
        )  # fmt: skip


def causes(run: OmniRun) -> list[tuple[FaultClass | None, int | None, int | None]]:
    def cause(event: RunEvent) -> tuple[FaultClass | None, int | None, int | None]:
        return event.fault, event.node, event.rank

    return [cause(event) for event in run.events("fault")]


def test_c15_killed_ranks_before_a_save_in_a_save_in_the_ramp_and_after_a_restore(
    start: Start, undisturbed: OmniRun
) -> None:
    # Saves that are waited for: the phase lasts long enough to strike in the first of them, and
    # what a later kill finds is committed.
    run = start("ranks", "kill-rank:2@2", "kill-rank:0@saving", "kill-rank:3@9",
                "kill-rank:1@training", saves_async=False)  # fmt: skip
    assert run.wait() == Exit.OK, run.output
    assert causes(run) == [
        (FaultClass.UNKNOWN, 1, 2),
        (FaultClass.UNKNOWN, 0, 0),
        (FaultClass.UNKNOWN, 1, 3),
        (FaultClass.UNKNOWN, 0, 1),
    ]
    assert "never came" not in run.output
    resumed = [event.step for event in run.events("resumed")]
    assert resumed[-1] == resumed[-2]  # one checkpoint is restored twice
    assert resumed[-1] in (8, 12)  # 12 where the launcher was late to strike at step 9
    assert run.events("fault")[1].step in (4, 8, 12)  # where saves are
    assert_same_training(run, undisturbed)
    assert not run.leftovers()


def test_a_sidecar_a_supervisor_and_a_hung_rank(start: Start, undisturbed: OmniRun) -> None:
    run = start("others", "kill-sidecar:1@3", "kill-supervisor:0@6", "stop-rank:1@10")
    assert run.wait() == Exit.OK, run.output
    assert causes(run) == [(FaultClass.UNKNOWN, 0, None), (FaultClass.HANG, 0, 1)]
    [restarted] = run.events("sidecar_restarted")
    assert (restarted.node, restarted.attempt, restarted.generation) == (1, 1, 0)
    assert [event.attempt for event in run.events("started")] == [1, 2]
    assert "no heartbeat" in run.events("fault")[1].message
    assert_same_training(run, undisturbed)
    assert not run.leftovers()


def test_ctrl_c_ends_everything_within_10_s_and_the_job_goes_on_when_started_again(
    start: Start, undisturbed: OmniRun
) -> None:
    run = start("interrupted")
    run.wait_for_step(6)
    assert len(run.processes()) >= 11  # launcher, 2 sidecars, 2 supervisors, 2 nurseries, 4 ranks
    assert run.interrupt() < 10
    assert run.process.returncode == Exit.INTERRUPTED, run.output
    assert not run.leftovers()
    [event] = run.events("interrupted")
    assert event.attempt == 1
    again = start("interrupted")
    assert again.wait() == Exit.OK, again.output
    done = run.losses() | again.losses()
    assert done == undisturbed.losses()
    assert {line.attempt for line in again.steps()} == {2}
    assert not again.leftovers()


def test_it_gives_up_with_the_first_failure_as_the_cause(start: Start) -> None:
    run = start("given-up", "kill-rank:2@2", infrastructureLimit=0)
    assert run.wait() == Exit.GAVE_UP, run.output
    assert causes(run) == [(FaultClass.UNKNOWN, 1, 2)]
    for part in ("gave up", "infrastructureLimit 0", "rank 2 on node 1", "killed by SIGKILL",
                 "logs/rank-2.1.0.log"):  # fmt: skip
        assert part in run.output
    assert "Traceback" not in run.output
    assert not run.leftovers()
