"""Run folders as the programs write them: a run of 30 steps, and one with a killed rank."""

from pathlib import Path

from omni_contract import names
from omni_contract.plan import JobPlan
from omni_contract.records import (
    ConsumedRecord,
    ConsumedSample,
    LossSum,
    OpSpan,
    RankTrace,
    Record,
    RunEvent,
    StepRecord,
)
from omni_contract.spec import Job
from omni_contract.spec_model import Modality
from omni_planner.compile import compile_plan
from omni_planner.schedule import op_table
from tests.contract.jobs import changed

BEGIN_S = 1_000_000.0
STEP_S = 1.0
KILLED_AFTER = 17
RESUMED_FROM = 10
NOTICE_S = 0.1
DETECT_S = 0.2
RESTORE_S = 7.0


def demo_plan(num_steps: int = 30) -> JobPlan:
    """The demo's plan, shortened."""
    return compile_plan(Job.read(changed("spec.train.tokens", num_steps * 8192)))


def step_record(step: int, *, generation: int = 0, time_s: float | None = None) -> StepRecord:
    """One step: the loss of text falls from 8, pictures come from step 5 on."""
    losses = {"text": LossSum(loss=(8.0 - 0.1 * step) * 100, tokens=100)}
    if step >= 5:
        losses["image"] = LossSum(loss=(6.0 - 0.1 * step) * 50, tokens=50)
    total = sum(one.tokens for one in losses.values())
    return StepRecord(
        step=step,
        attempt=1,
        generation=generation,
        time_s=time_s if time_s is not None else BEGIN_S + step * STEP_S,
        step_s=STEP_S,
        loss=sum(one.loss for one in losses.values()) / total,
        loss_by=losses,
        grad_norm=1.0,
        learning_rate=1e-3,
        tokens=8000,
        tokens_by_modality={Modality.TEXT: 6000, Modality.IMAGE: 2000, Modality.AUDIO: 0},
        tokens_by_source={"books": 5000, "pictures": 3000},
        weights={"books": 0.5 + 0.01 * step, "pictures": 0.5 - 0.01 * step},
        corrupt_samples=0,
        max_live_encoder_microbatches=2,
    )


def consumed_records(step: int, *, generation: int = 0) -> list[ConsumedRecord]:
    """What both last-stage ranks consumed in a step: two pieces each."""
    return [
        ConsumedRecord(
            step=step,
            attempt=1,
            generation=generation,
            rank=rank,
            samples=[
                ConsumedSample(
                    microbatch=1 + i,
                    source="books",
                    epoch=0,
                    index=4 * step + 2 * (rank - 2) + i,
                    first_token=0,
                    num_tokens=500,
                )
                for i in range(2)
            ],
        )
        for rank in (2, 3)
    ]


def planned(num_steps: int) -> dict[int, list[tuple[str, int, int, int, int]]]:
    """The plan that `consumed_records` follows."""
    return {
        step: [("books", 0, 4 * step + i, 0, 500) for i in range(4)]
        for step in range(1, num_steps + 1)
    }


def killed_run(num_steps: int = 30) -> tuple[list[StepRecord], list[RunEvent]]:
    """Killed after KILLED_AFTER, resumed from RESUMED_FROM, then to the end."""
    killed_s = BEGIN_S + KILLED_AFTER * STEP_S + 0.5
    restored_s = killed_s + DETECT_S + RESTORE_S
    steps = [step_record(step) for step in range(1, KILLED_AFTER + 1)]
    steps += [
        step_record(step, generation=1, time_s=restored_s + (step - RESUMED_FROM) * STEP_S)
        for step in range(RESUMED_FROM + 1, num_steps + 1)
    ]

    def event(kind: str, time_s: float, generation: int, message: str, **more: object) -> RunEvent:
        return RunEvent.model_validate(
            {
                "kind": kind,
                "time_s": time_s,
                "attempt": 1,
                "generation": generation,
                "message": message,
                **more,
            }
        )

    events = [
        event("started", BEGIN_S, 0, "attempt 1: 4 ranks on 2 nodes, 2 stages x 2 replicas"),
        event("checkpoint", BEGIN_S + 10, 0, "step 10 is saved", step=10),
        event("rehearsed_fault", killed_s, 0, "kill-rank:2@17", step=KILLED_AFTER),
        event(
            "fault",
            killed_s + NOTICE_S,
            0,
            "rank 2 on node 1 failed after step 17 (Unknown, killed by SIGKILL)",
            step=KILLED_AFTER,
            rank=2,
        ),
        event("restart", killed_s + DETECT_S, 0, "all ranks restart in place after Unknown"),
        event("resumed", restored_s, 1, "goes on after step 10", step=RESUMED_FROM),
        event("completed", steps[-1].time_s, 1, f"all {num_steps} steps are done"),
    ]
    return steps, events


def traces(plan: JobPlan, step: int) -> list[RankTrace]:
    """The timeline of a step whose operations take 40, 80, 25 and 50 ms, one after the other."""
    table = op_table(
        num_stages=plan.layout.pp_size,
        num_microbatches=plan.num_microbatches,
        dataflow=plan.dataflow,
    )
    seconds = {"LF": 0.04, "LB": 0.08, "EF": 0.025, "EB": 0.05}
    found = []
    for rank in range(plan.layout.world_size):
        place = plan.layout.coords(rank)
        spans, at, live = [], 0.03 * place.pp_rank, 0
        for op in table[place.pp_rank]:
            live += {"EF": 1, "EB": -1}.get(op.kind, 0)
            spans.append(
                OpSpan.model_validate(
                    {
                        "op": op.kind,
                        "microbatch": op.microbatch,
                        "start_s": at,
                        "end_s": at + seconds[op.kind],
                        "live": live,
                    }
                )
            )
            at += seconds[op.kind] + 0.004
        found.append(
            RankTrace(
                step=step,
                rank=rank,
                pp_rank=place.pp_rank,
                dp_rank=place.dp_rank,
                begin_s=BEGIN_S + step,
                spans=spans,
            )
        )
    return found


def write_run(folder: Path, num_steps: int = 30) -> JobPlan:
    """A run folder with a killed rank, without data behind it."""
    plan = demo_plan(num_steps)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / names.PLAN_FILE)
    steps, events = killed_run(num_steps)
    _write(folder / names.METRICS_FILE, steps)
    _write(folder / names.EVENTS_FILE, events)
    for rank in (2, 3):
        records = [
            record
            for step in steps
            for record in consumed_records(step.step, generation=step.generation)
            if record.rank == rank
        ]
        _write(folder / names.CONSUMED_FILE.format(rank=rank), records)
    for trace in traces(plan, 12):
        path = folder / names.TRACE_FILE.format(step=12, rank=trace.rank)
        path.write_text(trace.model_dump_json())
    return plan


def _write(path: Path, records: list[StepRecord] | list[RunEvent] | list[ConsumedRecord]) -> None:
    lines: list[Record] = [*records]
    path.write_text("".join(f"{record.model_dump_json()}\n" for record in lines))
