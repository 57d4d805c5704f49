"""The timeline of one step, as executed, in the trace format of Perfetto and Chrome. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

from omni_contract.records import OpSpan, RankTrace
from omni_contract.topology import Layout

NAMES = {
    "LF": "LLM forward",
    "LB": "LLM backward",
    "EF": "encoder forward",
    "EB": "encoder backward",
    "send": "send",
    "recv": "receive",
    "reduce": "reduce gradients",
    "optimizer": "optimizer",
}
"""What each operation of a trace does."""

WORK = ("LF", "LB", "EF", "EB", "optimizer")
"""Operations that compute; the others move data or wait for it."""


def begin_of(traces: Sequence[RankTrace]) -> float:
    """Unix time at which the first rank began the step."""
    return min(trace.begin_s for trace in traces)


def chrome_trace(traces: Sequence[RankTrace], layout: Layout) -> dict[str, Any]:
    """A trace document: a process per node, a thread per rank, a counter of live encoders."""
    begin = begin_of(traces)
    events: list[dict[str, Any]] = []
    for node in sorted({layout.node_of(trace.rank) for trace in traces}):
        events.append(_name("process_name", f"node {node}", pid=node))
    for trace in sorted(traces, key=lambda t: t.rank):
        place = {"pid": layout.node_of(trace.rank), "tid": trace.rank}
        label = f"rank {trace.rank} (stage {trace.pp_rank}, replica {trace.dp_rank})"
        events.append(_name("thread_name", label, **place))
        offset = trace.begin_s - begin
        for span in trace.spans:
            events.append(_complete(span, offset, place))
            if span.op in ("EF", "EB"):
                events.append(
                    {
                        "ph": "C",
                        "name": f"live encoder microbatches, rank {trace.rank}",
                        "ts": _microseconds(offset + span.end_s),
                        "args": {"live": span.live},
                        **place,
                    }
                )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"step": traces[0].step, "label": "as executed"},
    }


def _complete(span: OpSpan, offset: float, place: dict[str, int]) -> dict[str, Any]:
    numbered = f" {span.microbatch}" if span.microbatch else ""
    return {
        "ph": "X",
        "name": f"{NAMES[span.op]}{numbered}",
        "cat": "encoder" if span.op in ("EF", "EB") else "llm" if span.op in WORK else "transfer",
        "ts": _microseconds(offset + span.start_s),
        "dur": _microseconds(span.end_s - span.start_s),
        "args": {"op": span.op, "microbatch": span.microbatch, "live": span.live},
        **place,
    }


def _name(kind: str, name: str, **place: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "args": {"name": name}, **place}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def most_live(traces: Iterable[RankTrace]) -> int:
    """Most encoder microbatches alive at once on any rank, as executed."""
    return max((span.live for trace in traces for span in trace.spans), default=0)


def idle_share(trace: RankTrace) -> float:
    """Part of the step in which the rank computed nothing."""
    end = max((span.end_s for span in trace.spans), default=0.0)
    busy, covered = 0.0, 0.0
    # Encoder work may be recorded inside the LLM operation whose slot it fills.
    for span in sorted((s for s in trace.spans if s.op in WORK), key=lambda s: s.start_s):
        busy += max(0.0, span.end_s - max(span.start_s, covered))
        covered = max(covered, span.end_s)
    return 1 - busy / end if end else 0.0
