"""Whole ranks: real processes, real sidecar, real S3; killed, stopped and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from omni_cli.local_s3 import LocalS3
from omni_contract import names
from omni_contract.names import Exit
from omni_contract.plan import JobPlan
from omni_contract.records import ConsumedRecord, Progress, RankTrace, RunEvent, StepRecord
from omni_contract.spec import Job
from omni_contract.spec_data import StorageSpec
from omni_dataloader.store import Store
from omni_planner.compile import compile_plan
from omni_trainer.supervisor.nursery import Nursery
from tests.contract.jobs import changed
from tests.fakes.sources import VOCAB_SIZE, make_sources

NUM_STEPS = 6
WORLD_SIZE = 2


def job_plan(
    data_uri: str,
    checkpoint_uri: str,
    *,
    only: str | None = None,
    saves_async: bool = True,
    resume_from: str | None = None,
    num_steps: int = NUM_STEPS,
    num_ranks: int = WORLD_SIZE,
    **model: Any,
) -> JobPlan:
    """Two stages, four sequences of 128 tokens a step, all three modalities.

    `only`: the one source to read, once.
    """
    job = changed("metadata.name", "tiny")
    spec = job["spec"]
    spec["model"]["llm"] |= {
        "layers": 2, "hiddenSize": 32, "heads": 2, "kvHeads": 1, "vocabSize": VOCAB_SIZE,
        "tokenizer": f"{data_uri}/tokenizer.json", **model,
    }  # fmt: skip
    spec["model"]["encoders"]["image"] |= {"layers": 1, "hiddenSize": 16, "heads": 1}
    spec["model"]["encoders"]["audio"] |= {"layers": 1, "hiddenSize": 16, "heads": 1}
    spec["batch"] = {"globalSequences": 4, "sequenceTokens": 128}
    spec["train"]["tokens"] = num_steps * 4 * 128
    spec["train"]["optimizer"] = {"learningRate": 0.01, "decay": "constant"}
    spec["data"]["mixture"] = []
    if only is not None:
        spec["data"]["mixture"] = [{"weights": {only: 1}}]
        spec["data"]["sources"][only]["whenExhausted"] = "stop"
    for name, source in spec["data"]["sources"].items():
        source["uri"] = f"{data_uri}/{name}"
    spec["checkpoint"] = {
        "uri": checkpoint_uri, "every": 2, "keep": 2, "async": saves_async,
        "resumeFrom": resume_from,
    }  # fmt: skip
    spec["resources"] = {"nodes": 1, "ranksPerNode": num_ranks, "device": "cpu"}
    return compile_plan(Job.read(job))


@dataclass(kw_only=True)
class Run:
    """A run folder, its plan and the processes started for it."""

    folder: Path
    plan: JobPlan
    env: dict[str, str]
    nursery: Nursery
    _sidecars: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.plan.save(self.folder / "plan.json")

    def start_sidecar(self) -> subprocess.Popen[bytes]:
        address = f"127.0.0.1:{free_port()}"
        with (self.folder / "sidecar.log").open("ab") as log:
            sidecar = subprocess.Popen(
                [
                    sys.executable, "-m", "omni_dataloader.main", "--node", "0",
                    "--plan", str(self.folder / "plan.json"), "--socket", str(self.socket),
                    "--listen", address, "--peers", address, "--run-dir", str(self.folder),
                    "--die-with",
                    str(os.getpid()),
                ],
                env={**os.environ, **self.env}, stdout=log, stderr=log,
            )  # fmt: skip
        self._sidecars.append(sidecar)
        return sidecar

    @property
    def socket(self) -> Path:
        return self.folder / "sidecar.sock"

    def start_ranks(
        self, *, attempt: int = 1, generation: int = 0, job_uid: str = ""
    ) -> list["RankProcess"]:
        env = {
            **os.environ,
            **self.env,
            "WORLD_SIZE": str(self.plan.layout.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            names.ENV_PLAN: str(self.folder / "plan.json"),
            names.ENV_NODE: "0",
            names.ENV_ATTEMPT: str(attempt),
            names.ENV_GENERATION: str(generation),
            names.ENV_JOB_UID: job_uid,
            names.ENV_SIDECAR: str(self.socket),
            names.ENV_RUN_DIR: str(self.folder),
            names.ENV_TRACE_STEPS: "2",
        }
        return [
            RankProcess(
                self.nursery,
                env
                | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                | {"TORCHELASTIC_ERROR_FILE": str(self.folder / f"error-{rank}.json")},
                self.folder / f"rank-{rank}.log",
            )
            for rank in range(self.plan.layout.world_size)
        ]

    def steps(self) -> dict[int, StepRecord]:
        """Of each step the record of the highest pair."""
        records = StepRecord.read_all(self.folder / names.METRICS_FILE)
        return {r.step: r for r in sorted(records, key=lambda r: (r.attempt, r.generation))}

    def wait_for_step(self, step: int) -> None:
        until(lambda: max(self.steps(), default=0) >= step, f"step {step}", self.logs)

    def events(self, kind: str) -> list[RunEvent]:
        events = RunEvent.read_all(self.folder / names.EVENTS_FILE)
        return [event for event in events if event.kind == kind]

    def consumed(self) -> dict[int, ConsumedRecord]:
        path = self.folder / names.CONSUMED_FILE.format(rank=WORLD_SIZE - 1)
        records = ConsumedRecord.read_all(path)
        return {r.step: r for r in sorted(records, key=lambda r: (r.attempt, r.generation))}

    def samples(self, step: int) -> list[str]:
        """All that a step consumed, whichever replica did in whichever microbatch."""
        ranks = filter(self.plan.layout.is_last_stage, range(self.plan.layout.world_size))
        paths = [self.folder / names.CONSUMED_FILE.format(rank=rank) for rank in ranks]
        records = [r for path in paths for r in ConsumedRecord.read_all(path) if r.step == step]
        return sorted(
            sample.model_dump_json(exclude={"microbatch"}) for r in records for sample in r.samples
        )

    def logs(self) -> str:
        return "\n".join(
            f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(self.folder.glob("*.log"))
        )

    def close(self) -> None:
        for sidecar in self._sidecars:
            sidecar.kill()
            sidecar.wait()


class RankProcess:
    """A rank as the supervisor starts it, forked from a process that has imported everything."""

    def __init__(self, nursery: Nursery, env: dict[str, str], log: Path) -> None:
        self._nursery = nursery
        self._pid = nursery.start(module="omni_trainer.main", env=env, log=str(log))

    def exit_code(self) -> int | None:
        return self._nursery.exit_code(self._pid)

    def send(self, number: signal.Signals) -> None:
        os.kill(self._pid, number)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(reached: Any, what: str, logs: Any, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{logs()}"
        time.sleep(0.02)


def exits(run: Run, ranks: list[RankProcess], timeout_s: float = 60) -> list[int | None]:
    def where() -> str:
        for rank in ranks:
            if rank.exit_code() is None:
                rank.send(signal.SIGUSR1)  # it writes its stack into its log
        time.sleep(0.5)
        return run.logs()

    until(
        lambda: all(r.exit_code() is not None for r in ranks), "end of the ranks", where, timeout_s
    )
    return [rank.exit_code() for rank in ranks]


@pytest.fixture(scope="module")
def data_uri(s3_server: LocalS3, tmp_path_factory: pytest.TempPathFactory) -> str:
    store = s3_server.open()
    store.create_bucket("main-data")
    make_sources(tmp_path_factory.mktemp("sources")).upload(store, "s3://main-data")
    return "s3://main-data"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(
        preload=["omni_trainer.preload:on_cpu"],
        log=tmp_path_factory.mktemp("nursery") / "log",
        env={"OMP_NUM_THREADS": "1"},
    )
    try:
        yield made
    finally:
        made.close()  # and with it every rank


@pytest.fixture(scope="module")
def new_run(
    s3_server: LocalS3, data_uri: str, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    runs: list[Run] = []

    def make(name: str, plan: JobPlan | None = None, folder: str | None = None) -> Run:
        made = Run(
            folder=tmp_path_factory.mktemp("runs") / name,
            plan=plan or job_plan(data_uri, f"{data_uri}/runs/{folder or name}"),
            env=dict(s3_server.env),
            nursery=nursery,
        )
        runs.append(made)
        return made

    try:
        yield make
    finally:
        for made in runs:
            made.close()


@pytest.fixture(scope="module")
def undisturbed(new_run: Any) -> Run:
    run: Run = new_run("undisturbed")
    run.start_sidecar()
    assert exits(run, run.start_ranks()) == [Exit.OK] * WORLD_SIZE, run.logs()
    return run


def assert_same_training(run: Run, undisturbed: Run) -> None:
    ours, theirs = run.steps(), undisturbed.steps()
    assert sorted(ours) == sorted(theirs) == list(range(1, NUM_STEPS + 1))
    for step, record in theirs.items():
        assert ours[step].loss == record.loss, f"loss of step {step}"  # every bit
        assert ours[step].grad_norm == record.grad_norm
        assert ours[step].loss_by == record.loss_by
        assert ours[step].tokens_by_source == record.tokens_by_source
        assert run.consumed()[step].samples == undisturbed.consumed()[step].samples


def test_a_run_leaves_its_records(undisturbed: Run) -> None:
    steps = undisturbed.steps()
    assert list(steps) == list(range(1, NUM_STEPS + 1))
    assert steps[NUM_STEPS].loss < steps[1].loss
    assert {name for step in steps.values() for name, n in step.tokens_by_source.items() if n} == {
        "pictures", "drawings", "speech", "books"
    }  # fmt: skip
    consumed = undisturbed.consumed()
    for step, record in steps.items():
        assert sum(s.num_tokens for s in consumed[step].samples) == record.tokens
    assert [event.step for event in undisturbed.events("checkpoint")] == [2, 4, 6]
    for rank in range(WORLD_SIZE):
        path = undisturbed.folder / names.PROGRESS_FILE.format(rank=rank)
        progress = Progress.model_validate_json(path.read_bytes())
        assert (progress.phase, progress.step) == ("done", NUM_STEPS)
        trace = RankTrace.model_validate_json(
            (undisturbed.folder / names.TRACE_FILE.format(step=2, rank=rank)).read_bytes()
        )
        assert trace.pp_rank == rank and {"LF", "LB"} <= {span.op for span in trace.spans}
    assert list((undisturbed.folder / "tensorboard").iterdir())


def test_a_killed_run_goes_on_bit_for_bit(data_uri: str, undisturbed: Run, new_run: Any) -> None:
    """SIGKILL of a rank and later of the sidecar; the peer says that it only lost a peer."""
    plan = job_plan(data_uri, f"{data_uri}/runs/killed", saves_async=False)
    run: Run = new_run("killed", plan)  # after step 3, step 2 is surely saved
    sidecar = run.start_sidecar()
    ranks = run.start_ranks()
    run.wait_for_step(3)
    ranks[1].send(signal.SIGKILL)
    assert exits(run, ranks, 20) == [Exit.PEER_LOST, -signal.SIGKILL], run.logs()
    assert "Traceback" not in (run.folder / "rank-0.log").read_text()

    ranks = run.start_ranks(generation=1)
    run.wait_for_step(4)
    sidecar.kill()
    sidecar.wait()
    run.start_sidecar()
    assert exits(run, ranks) == [Exit.OK] * WORLD_SIZE, run.logs()
    (resumed,) = run.events("resumed")
    assert resumed.step in (2, 4)  # 4 where this test was slow to kill
    assert_same_training(run, undisturbed)


def test_a_run_told_to_end_saves_first(undisturbed: Run, new_run: Any) -> None:
    run: Run = new_run("told")
    sidecar = run.start_sidecar()
    ranks = run.start_ranks()
    run.wait_for_step(1)
    sidecar.send_signal(signal.SIGSTOP)  # or a slow test finds the run at its end
    ranks[1].send(signal.SIGTERM)  # one is told: all agree on the step
    sidecar.send_signal(signal.SIGCONT)
    assert exits(run, ranks) == [Exit.INTERRUPTED] * WORLD_SIZE, run.logs()
    done = max(run.steps())
    assert run.events("checkpoint")[-1].step == done < NUM_STEPS
    ranks = run.start_ranks(attempt=2)
    assert exits(run, ranks) == [Exit.OK] * WORLD_SIZE, run.logs()
    assert [event.step for event in run.events("resumed")] == [done]
    assert_same_training(run, undisturbed)


def test_a_user_error_is_one_sentence(undisturbed: Run, new_run: Any) -> None:
    """Another model in the same folder; what is saved there stays."""
    data_uri = "s3://main-data"
    plan = job_plan(data_uri, f"{data_uri}/runs/undisturbed", hiddenSize=64)
    run: Run = new_run("other-model", plan)
    keys = (run.env["AWS_ACCESS_KEY_ID"], run.env["AWS_SECRET_ACCESS_KEY"])
    store = Store.open(StorageSpec(endpoint=run.env["AWS_ENDPOINT_URL"]), keys=keys)
    before = store.read(f"{plan.spec.checkpoint.uri}/latest")
    run.start_sidecar()
    codes = exits(run, run.start_ranks(attempt=2))
    assert codes == [Exit.USER, Exit.PEER_LOST], run.logs()
    said = (run.folder / "rank-0.log").read_text()
    assert "model.llm.hiddenSize: the checkpoint" in said and "this job has 64" in said
    assert "Traceback" not in said
    assert "hiddenSize" in (run.folder / "error-0.json").read_text()
    assert "another rank is gone" in (run.folder / "rank-1.log").read_text()
    assert store.read(f"{plan.spec.checkpoint.uri}/latest") == before, "it claimed the run"


def test_a_stale_generation_ends_without_a_trace(undisturbed: Run, new_run: Any) -> None:
    run: Run = new_run("stale", folder="undisturbed")
    run.start_sidecar()
    codes = exits(run, run.start_ranks(attempt=0, generation=7))
    assert codes == [Exit.STALE, Exit.PEER_LOST], run.logs()
    assert "0.7 is stale" in (run.folder / "rank-0.log").read_text()
    assert not run.steps()


def test_a_job_of_another_uid_is_told_how_to_go_on_and_then_does(
    data_uri: str, undisturbed: Run, new_run: Any
) -> None:
    run: Run = new_run("anew", folder="undisturbed")
    run.start_sidecar()
    codes = exits(run, run.start_ranks(job_uid="a1-b2"))
    assert codes == [Exit.USER, Exit.PEER_LOST], run.logs()
    saved = undisturbed.plan.spec.checkpoint.uri
    said = (run.folder / "rank-0.log").read_text()
    assert f"checkpoint.uri: {saved} is held by job 'tiny' of omni run" in said
    assert f"checkpoint.resumeFrom: {saved} " in said and "Traceback" not in said

    plan = job_plan(data_uri, f"{data_uri}/runs/branch", resume_from=saved)
    branch: Run = new_run("branch", plan)
    branch.start_sidecar()
    codes = exits(branch, branch.start_ranks(job_uid="a1-b2"))
    assert codes == [Exit.OK] * WORLD_SIZE, branch.logs()
    (resumed,) = branch.events("resumed")
    assert resumed.step == NUM_STEPS and f"from {saved}/step-" in resumed.message


def test_a_job_goes_on_with_more_replicas_and_with_fewer(
    data_uri: str, undisturbed: Run, new_run: Any
) -> None:
    """As `topology.onUnsatisfied: Shrink` does: the same samples a step, the same training."""
    uri = f"{data_uri}/runs/resized"
    for attempt, num_ranks in enumerate((WORLD_SIZE, 2 * WORLD_SIZE, WORLD_SIZE), 1):
        plan = job_plan(data_uri, uri, num_steps=2 * attempt, num_ranks=num_ranks)
        run: Run = new_run(f"resized-{attempt}", plan)
        run.start_sidecar()
        codes = exits(run, run.start_ranks(attempt=attempt), 120)
        assert codes == [Exit.OK] * num_ranks, run.logs()
        assert sorted(run.steps()) == [2 * attempt - 1, 2 * attempt]
        if attempt > 1:
            (resumed,) = run.events("resumed")
            assert resumed.message.endswith(f"saved by {3 * WORLD_SIZE - num_ranks} ranks")
        for step, record in run.steps().items():
            theirs = undisturbed.steps()[step]
            assert run.samples(step) == undisturbed.samples(step)
            assert record.tokens_by_source == theirs.tokens_by_source
            assert record.loss == pytest.approx(theirs.loss, rel=1e-4)
            assert record.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)


def test_c18_the_end_of_the_data_is_an_orderly_end(data_uri: str, new_run: Any) -> None:
    """A source that must not repeat ends the training early, with a save, on all ranks."""
    plan = job_plan(data_uri, f"{data_uri}/runs/short", only="speech")
    run: Run = new_run("short", plan)
    run.start_sidecar()
    assert exits(run, run.start_ranks()) == [Exit.OK] * WORLD_SIZE, run.logs()
    done = max(run.steps())
    assert 1 <= done < NUM_STEPS
    assert run.events("checkpoint")[-1].step == done
    assert f"the data ends after step {done}: " in (run.folder / "rank-0.log").read_text()
