"""`omni plan`: what a job file means, as tables for people or as the plan document itself."""

from collections.abc import Iterator
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omni_contract.jobfile import read_job
from omni_contract.plan import JobPlan
from omni_contract.spec_data import MixtureStage
from omni_planner.compile import compile_plan
from omni_planner.schedule import Op, OpKind, op_table, peak_live_encoders
from omni_planner.size import stage_sizes

_STYLES = {
    OpKind.LLM_FORWARD: "blue",
    OpKind.LLM_BACKWARD: "cyan",
    OpKind.ENCODER_FORWARD: "green",
    OpKind.ENCODER_BACKWARD: "yellow",
}
_MOST_OPS = 48
_MOST_RANKS = 64


@click.command()
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the plan document and nothing else.")
def plan(job: Path, as_json: bool) -> None:
    """Check the file JOB and show what it means.

    Nothing is started and no data is read. A wrong file is answered with every field that is wrong,
    what would be right, and exit code 2.
    """
    compiled = compile_plan(read_job(job))
    if as_json:
        click.echo(compiled.to_json())
        return
    console = Console()
    for table in tables(compiled):
        console.print(table)
        console.print()


def tables(compiled: JobPlan) -> Iterator[Table]:
    """The plan for people, one table an idea."""
    yield _summary(compiled)
    yield _ranks(compiled)
    yield _schedule(compiled)
    yield _mixture(compiled)
    yield _sizes(compiled)


def _table(title: str, *columns: str, **options: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if options.get(column) == "right" else "left")
    return table


def _summary(compiled: JobPlan) -> Table:
    spec, layout = compiled.spec, compiled.layout
    batch = spec.batch
    table = _table(f"Job {compiled.name}", "", "")
    table.show_header = False
    table.add_row("plan", f"version {compiled.version}, hash {compiled.hash}")
    table.add_row(
        "layout",
        f"{layout.num_nodes} nodes x {layout.ranks_per_node} ranks = {layout.world_size} ranks = "
        f"{layout.pp_size} pipeline stages x {layout.dp_size} replicas",
    )
    table.add_row(
        "step",
        f"{batch.global_sequences} sequences x {batch.sequence_tokens:,} tokens = "
        f"{batch.step_tokens:,} tokens; {compiled.num_microbatches} microbatches a replica",
    )
    table.add_row(
        "training",
        f"{compiled.num_steps:,} steps = {compiled.num_steps * batch.step_tokens:,} tokens, "
        f"{spec.train.precision}, {spec.resources.device}",
    )
    encoders = ", ".join(f"{m} {e.kind} ({e.train})" for m, e in spec.model.encoders.items())
    table.add_row(
        "encoders", f"{encoders or 'none'}; schedule {spec.parallelism.encoders.schedule}"
    )
    saves = compiled.num_steps // spec.checkpoint.every
    last = " and the last" if compiled.num_steps % spec.checkpoint.every else ""
    table.add_row(
        "checkpoint",
        f"every {spec.checkpoint.every} steps{last} ({saves + bool(last)} saves) to "
        f"{spec.checkpoint.uri}, {spec.checkpoint.keep} kept",
    )
    return table


def _ranks(compiled: JobPlan) -> Table:
    layout = compiled.layout
    table = _table("Who runs where", "node", "rank", "stage", "replica", "encodes", rank="right")
    for rank in range(min(layout.world_size, _MOST_RANKS)):
        place = layout.coords(rank)
        encoded = [e for e, (s, _) in compiled.dataflow.items() if s == place.pp_rank]
        forwards = sorted(int(e) for e in encoded if int(e) > 0)
        table.add_row(
            str(layout.node_of(rank)),
            str(rank),
            str(place.pp_rank),
            str(place.dp_rank),
            f"microbatches {_shortened(forwards)}" if forwards else "-",
            end_section=rank % layout.ranks_per_node == layout.ranks_per_node - 1,
        )
    if layout.world_size > _MOST_RANKS:
        table.caption = f"and {layout.world_size - _MOST_RANKS} more in the same order"
    return table


def _shortened(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ... ({len(numbers)})" if len(numbers) > 8 else shown


def _schedule(compiled: JobPlan) -> Table:
    rows = op_table(
        num_stages=compiled.layout.pp_size,
        num_microbatches=compiled.num_microbatches,
        dataflow=compiled.dataflow,
    )
    has_encoders = any(True for _ in compiled.spec.model.encoders.items())
    table = _table("Joint pipeline of a step", "stage", "operations in order", "live")
    for stage, ops in enumerate(rows):
        table.add_row(str(stage), _ops(ops), str(peak_live_encoders(ops)) if has_encoders else "0")
    table.caption = (
        "LF, LB: forward and backward of an LLM microbatch. EF, EB: of an encoder microbatch.\n"
        "live: most encoder microbatches alive at once on a rank of the stage (bound)."
    )
    table.caption_justify = "left"
    return table


def _ops(ops: tuple[Op, ...]) -> Text:
    text = Text(" ").join(
        Text(f"{op.kind}{op.microbatch}", style=_STYLES[op.kind]) for op in ops[:_MOST_OPS]
    )
    return text.append(f" ... ({len(ops)} in all)") if len(ops) > _MOST_OPS else text


def _mixture(compiled: JobPlan) -> Table:
    sources = sorted(compiled.spec.data.sources)
    stages = compiled.spec.data.mixture or [MixtureStage(weights=dict.fromkeys(sources, 1.0))]
    table = _table("Mixture by tokens", "from", "until", "ramp", *sources)
    begin = 0
    for stage in stages:
        total = sum(stage.weights.values())
        end = compiled.num_steps * compiled.spec.batch.step_tokens
        until = f"{stage.until:,}" if stage.until is not None else f"{end:,} (end)"
        shares = [f"{100 * stage.weights.get(name, 0) / total:.1f} %" for name in sources]
        table.add_row(f"{begin:,}", until, stage.ramp, *shares)
        begin = stage.until or end
    return table


def _sizes(compiled: JobPlan) -> Table:
    table = _table(
        "What a rank holds", "stage", "LLM parameters", "encoder parameters", "memory (bound)"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for stage, size in enumerate(stage_sizes(compiled)):
        table.add_row(
            str(stage),
            f"{size.llm_parameters:,}",
            f"{size.encoder_parameters:,}",
            _bytes(size.state_bytes),
        )
    table.caption = (
        "bound: weights, gradients and optimizer state; activations and buffers come on top."
    )
    table.caption_justify = "left"
    return table


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
