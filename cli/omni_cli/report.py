"""`omni report`: a page, a trace and a summary from the records of a run."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from jinja2 import Environment, PackageLoader, StrictUndefined

from omni_cli import figures
from omni_cli.local_s3 import LocalS3
from omni_cli.samples import choose, planned_pieces, shown
from omni_cli.summary import NUM_ENDS, final_samples, final_steps, incidents, pair_of, summarize
from omni_cli.trace import chrome_trace, idle_share, most_live
from omni_contract import names
from omni_contract.errors import DataError, OmniError
from omni_contract.plan import JobPlan
from omni_contract.records import ConsumedRecord, RankTrace, RunEvent, StepRecord
from omni_dataloader.sources import OpenedData, open_data
from omni_dataloader.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """All that a run left in its folder."""

    plan: JobPlan
    steps: list[StepRecord]
    events: list[RunEvent]
    consumed: list[ConsumedRecord]
    traces: list[RankTrace]
    """Of one step: the first one traced."""

    @classmethod
    def read(cls, run_dir: Path) -> "RunRecords":
        """Read a run folder. Raises DataError where it holds no finished step."""
        steps = StepRecord.read_all(run_dir / names.METRICS_FILE)
        if not steps:
            raise DataError(
                f"{run_dir}: no step is recorded in {names.METRICS_FILE}; give the folder of a "
                "run that finished at least one step (--run-dir of omni run)"
            )
        consumed_files = sorted(run_dir.glob(names.CONSUMED_FILE.format(rank="*")))
        return cls(
            plan=JobPlan.load(run_dir / names.PLAN_FILE),
            steps=steps,
            events=RunEvent.read_all(run_dir / names.EVENTS_FILE),
            consumed=[r for path in consumed_files for r in ConsumedRecord.read_all(path)],
            traces=_traces(run_dir),
        )


def _traces(run_dir: Path) -> list[RankTrace]:
    files = run_dir.glob(names.TRACE_FILE.format(step="*", rank="*"))
    traces = [RankTrace.model_validate_json(path.read_bytes()) for path in files]
    first = min((trace.step for trace in traces), default=0)
    return sorted((t for t in traces if t.step == first), key=lambda t: t.rank)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for report.html, trace.json and summary.json.  [default: RUN_DIR/report]",
)
@click.option(
    "--local-s3",
    type=click.Path(path_type=Path, file_okay=False),
    help="Serve S3 from this folder while samples are read, as `omni run --local-s3` does.",
)
@click.option("--no-samples", is_flag=True, help="Read no data: no sample is shown or counted.")
def report(run_dir: Path, out: Path | None, local_s3: Path | None, no_samples: bool) -> None:
    """Draw the report page of the run in RUN_DIR.

    The page shows losses, mixture, incidents, the timeline of a traced step and a few samples; the
    trace opens in ui.perfetto.dev; the summary is for programs.
    """
    records = RunRecords.read(run_dir)
    out = out or run_dir / "report"
    with _store(records.plan, local_s3, no_samples) as store:
        write_report(records, out, store)
    click.echo(f"report:  {out / 'report.html'}")
    click.echo(f"trace:   {out / 'trace.json'} (ui.perfetto.dev)")
    click.echo(f"summary: {out / 'summary.json'}")


@contextlib.contextmanager
def _store(plan: JobPlan, local_s3: Path | None, no_samples: bool) -> Iterator[Store | None]:
    if no_samples:
        yield None
    elif local_s3 is not None:
        with LocalS3(local_s3) as server:
            yield server.open()
    else:
        yield Store.open(plan.spec.storage)


def write_report(records: RunRecords, out: Path, store: Store | None) -> dict[str, Any]:
    """Write page, trace and summary to `out` and return the summary.

    Without a store no sample is shown, and samples repeated and lost stay unknown.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = open_data(records.plan.spec, store) if store is not None else None
    summary = summarize(
        records=records.steps,
        events=records.events,
        consumed=records.consumed,
        planned=planned_pieces(data, records.plan) if data is not None else None,
    )
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if records.traces:
        trace = chrome_trace(records.traces, records.plan.layout)
        (out / "trace.json").write_text(json.dumps(trace))
    (out / "report.html").write_text(_page(records, summary, data, store))
    return summary


def _page(
    records: RunRecords, summary: Mapping[str, Any], data: OpenedData | None, store: Store | None
) -> str:
    environment = Environment(
        loader=PackageLoader("omni_cli"), autoescape=True, undefined=StrictUndefined
    )
    steps = final_steps(records.steps)
    final = {(s.step, pair_of(s)) for s in steps}
    discarded = [s for s in records.steps if (s.step, pair_of(s)) not in final]
    faults = incidents(records.events, records.steps)
    return environment.get_template("report.html.j2").render(
        plan=records.plan,
        summary=summary,
        num_ends=NUM_ENDS,
        kinds=[(k, figures.KIND_NAMES[k], figures.KIND_COLORS[k]) for k in figures.KIND_NAMES],
        steps=steps,
        tokens=sum(step.tokens for step in steps),
        train_s=sum(step.step_s for step in steps),
        corrupt=steps[-1].corrupt_samples,
        loss_figure=figures.loss_by_kind(steps, discarded, faults),
        mix_figure=figures.mix_over_tokens(steps),
        incidents=[(i, figures.incident_timeline(i) if i.stages else "") for i in faults],
        traces=records.traces,
        most_live=most_live(records.traces),
        idle=[(trace, idle_share(trace)) for trace in records.traces],
        step_figure=figures.step_timeline(records.traces) if records.traces else "",
        samples=_samples(records, data, store),
        events=[(_clock(event, records), event) for event in records.events],
        share=figures.share_text(summary["tokens_per_modality"]),
    )


def _clock(event: RunEvent, records: RunRecords) -> str:
    begin = min(e.time_s for e in records.events)
    return f"{event.time_s - begin:.1f}"


def _samples(
    records: RunRecords, data: OpenedData | None, store: Store | None
) -> list[dict[str, Any]]:
    """A few samples of each source; one that cannot be read is said so, not hidden."""
    if data is None or store is None:
        return []
    cards: list[dict[str, Any]] = []
    for step, source, sample in choose(final_samples(records.consumed), data.sources):
        try:
            one = shown(step, source, sample, data, store)
        except OmniError as exc:
            cards.append({"source": source.name, "error": str(exc)})
            continue
        spectrogram = figures.spectrogram(one.frames) if one.frames is not None else ""
        cards.append({"source": source.name, "error": "", "sample": one, "svg": spectrogram})
    return cards
