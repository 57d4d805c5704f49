"""Draws the pictures of the report as SVG text. Every function is records in, text out."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from omni_cli.summary import Incident
from omni_cli.trace import NAMES, begin_of
from omni_contract.records import RankTrace, StepRecord

INK = "#1f2933"
FAINT = "#9aa5b1"
KIND_COLORS = {"all": INK, "text": "#3b6fb6", "image": "#2a9d6f", "audio": "#e07b39"}
KIND_NAMES = {
    "all": "all samples",
    "text": "text alone",
    "image": "with pictures",
    "audio": "with speech",
}
SOURCE_COLORS = ("#3b6fb6", "#7fb7be", "#2a9d6f", "#e07b39", "#8e6bbf", "#d1495b", "#b0a160")
OP_COLORS = {
    "LF": "#3b6fb6",
    "LB": "#8fb3e0",
    "EF": "#1b8a5a",
    "EB": "#86d0ac",
    "send": "#d9cfc1",
    "recv": "#e9e3d8",
    "reduce": "#c39bd3",
    "optimizer": "#7b6d8d",
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#cbd2d9",
    "axes.labelcolor": "#52606d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eef1f4",
    "legend.frameon": False,
}


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(text, format="svg", bbox_inches="tight", pad_inches=0.05)
    # Inside a page, neither the XML head nor a fixed size.
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def loss_by_kind(
    steps: Sequence[StepRecord], discarded: Sequence[StepRecord], faults: Sequence[Incident]
) -> str:
    """Loss per loss token of each kind of sample over the steps, as points and a running mean."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 3.8))
        axes = figure.subplots()
        for kind, color in KIND_COLORS.items():
            found = [(s.step, loss) for s in steps if (loss := _loss(s, kind)) is not None]
            if not found or kind == "all":
                continue
            x, y = np.array(found).T
            axes.plot(x, y, ".", color=color, alpha=0.25, markersize=4)
            axes.plot(x, _running_mean(y), color=color, linewidth=2, label=KIND_NAMES[kind])
        if discarded:
            x, y = np.array([(s.step, s.loss) for s in discarded]).T
            axes.plot(x, y, "x", color=FAINT, markersize=4, label="done again after the fault")
        _mark_faults(axes, [fault.step for fault in faults])
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("loss per loss token")
        axes.set_xlim(left=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4)
        return _svg(figure)


def _loss(step: StepRecord, kind: str) -> float | None:
    if kind == "all":
        return step.loss
    one = step.loss_by.get(kind)
    return one.loss / one.tokens if one is not None and one.tokens else None


def _running_mean(values: NDArray[np.float64], width: int = 9) -> NDArray[np.float64]:
    """The mean of the values around each one, fewer at the ends."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _mark_faults(axes: Axes, positions: Sequence[float]) -> None:
    for x in positions:
        axes.axvline(x, color="#d1495b", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            "fault", (x, 1), xycoords=("data", "axes fraction"), xytext=(4, -4),
            textcoords="offset points", va="top", color="#d1495b",
        )  # fmt: skip


def mix_over_tokens(steps: Sequence[StepRecord]) -> str:
    """Weights in force and tokens consumed: sources on the left, modalities on the right."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 3.4))
        left, right = figure.subplots(1, 2, sharey=True)
        ends = np.cumsum([s.tokens for s in steps]) / 1000
        sources = sorted({name for s in steps for name in s.tokens_by_source})
        colors = dict(zip(sources, SOURCE_COLORS * len(sources), strict=False))
        shares = [_shares([s.tokens_by_source.get(n, 0) for s in steps], steps) for n in sources]
        left.stackplot(ends, shares, colors=[colors[n] for n in sources], labels=sources, alpha=0.8)
        asked = np.cumsum([[s.weights.get(n, 0.0) for s in steps] for n in sources], axis=0)
        for line in asked[:-1]:
            left.plot(ends, 100 * line, color="white", linewidth=2.4)
            left.plot(ends, 100 * line, color=INK, linewidth=1, linestyle=(0, (3, 2)))
        kinds = [kind for kind in ("text", "image", "audio") if kind in KIND_COLORS]
        by_kind = [
            _shares(
                [{str(k): v for k, v in s.tokens_by_modality.items()}.get(kind, 0) for s in steps],
                steps,
            )
            for kind in kinds
        ]
        right.stackplot(
            ends, by_kind, colors=[KIND_COLORS[k] for k in kinds], labels=kinds, alpha=0.8
        )
        left.set_title("by source, dashed: weights in force", loc="left", fontsize=10)
        right.set_title("by modality", loc="left", fontsize=10)
        left.set_ylabel("% of the tokens of a step")
        for axes in (left, right):
            axes.set_xlabel("thousand tokens consumed")
            axes.set_ylim(0, 100)
            axes.margins(x=0)
            handles, names = axes.get_legend_handles_labels()
            axes.legend(
                handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(names)
            )
        return _svg(figure)


def _shares(counts: Sequence[int], steps: Sequence[StepRecord]) -> NDArray[np.float64]:
    totals = np.array([max(s.tokens, 1) for s in steps], float)
    return 100 * _running_mean(np.array(counts, float) / totals, width=5)


def incident_timeline(incident: Incident) -> str:
    """The stages of an incident as one bar in seconds."""
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(10, 1.35))
        axes = figure.subplots()
        colors = ("#d1495b", "#e9a23b", "#7fb7be", "#2a9d6f", "#a7c7a1")
        for stage, color in zip(incident.stages, colors, strict=False):
            width = stage.end_s - stage.begin_s
            axes.barh(0, width, left=stage.begin_s, height=0.6, color=color, edgecolor="white")
            if width > 0.06 * incident.stages[-1].end_s:
                axes.text(
                    stage.begin_s + width / 2, 0, f"{width:.1f} s", ha="center", va="center",
                    color="white", fontweight="bold",
                )  # fmt: skip
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("seconds since the fault")
        axes.margins(x=0.005)
        axes.legend(
            handles=[
                Patch(color=color, label=f"{stage.name} (+{stage.end_s - stage.begin_s:.2f} s)")
                for stage, color in zip(incident.stages, colors, strict=False)
            ],
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=5,
            fontsize=8.5,
            handlelength=1,
            columnspacing=1.2,
        )
        return _svg(figure)


def step_timeline(traces: Sequence[RankTrace]) -> str:
    """The operations of one step on every rank, as executed."""
    begin = begin_of(traces)
    ordered = sorted(traces, key=lambda t: (t.dp_rank, t.pp_rank))
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(10, 0.75 * len(ordered) + 0.9))
        axes = figure.subplots()
        last = max((span.end_s for trace in traces for span in trace.spans), default=1.0)
        for row, trace in enumerate(ordered):
            offset = trace.begin_s - begin
            # Short operations are drawn last, so that long waits do not cover them.
            for span in sorted(trace.spans, key=lambda s: s.start_s - s.end_s):
                is_transfer = span.op in ("send", "recv")
                height = 0.34 if is_transfer else 0.72
                axes.broken_barh(
                    [(1000 * (offset + span.start_s), 1000 * (span.end_s - span.start_s))],
                    (row - height / 2, height),
                    facecolors=OP_COLORS[span.op],
                    edgecolors="white",
                    linewidth=0.4,
                    zorder=1 if is_transfer else 2,
                )
                if span.end_s - span.start_s > 0.011 * last and span.op in ("LF", "LB", "EF", "EB"):
                    axes.text(
                        1000 * (offset + (span.start_s + span.end_s) / 2), row,
                        str(span.microbatch), ha="center", va="center", zorder=3, fontsize=7.5,
                        color="white" if span.op in ("LF", "EF") else INK,
                    )  # fmt: skip
        axes.set_yticks(range(len(ordered)))
        axes.set_yticklabels(
            [f"rank {t.rank}: stage {t.pp_rank}, replica {t.dp_rank}" for t in ordered]
        )
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds since the step began (cpu)")
        axes.margins(x=0.005)
        used = {span.op for trace in traces for span in trace.spans}
        axes.legend(
            handles=[
                Patch(color=color, label=NAMES[op]) for op, color in OP_COLORS.items() if op in used
            ],
            loc="lower left",
            bbox_to_anchor=(-0.1, 1),
            ncols=8,
            fontsize=8.5,
            handlelength=1,
            columnspacing=1.2,
        )
        return _svg(figure)


def spectrogram(features: NDArray[np.float32]) -> str:
    """Log-mel frames [F, B] as the encoder gets them."""
    with mpl.rc_context(_STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(4.2, 1.6), dpi=110)
        axes = figure.subplots()
        axes.imshow(
            features.T,
            origin="lower",
            aspect="auto",
            cmap="magma",
            interpolation="nearest",
            extent=(0, len(features) / 100, 0, features.shape[1]),
        )
        axes.set_xlabel("seconds")
        axes.set_ylabel("mel bin")
        return _svg(figure)


def share_text(counts: Mapping[str, int]) -> str:
    """`text 40 %, image 35 %, audio 25 %`."""
    total = max(1, sum(counts.values()))
    return ", ".join(f"{name} {100 * count / total:.0f} %" for name, count in counts.items())
