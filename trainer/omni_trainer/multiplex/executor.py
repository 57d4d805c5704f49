"""Walks one stage's op table through one step: encoder operations run in the slots between LLM's.

megatron's schedule runs the LLM operations and tells of them; everything the table has before the
next of them runs when a slot opens. Nothing is polled: the order of execution is the table's.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from omni_contract.records import OpSpan
from omni_planner.schedule import Op, OpKind

SpanName = Literal["LF", "LB", "EF", "EB", "send", "recv", "reduce", "optimizer"]


class EncoderWork(Protocol):
    """What the executor can run in a slot."""

    @property
    def num_live(self) -> int:
        """Encoder microbatches whose activations this rank holds."""

    def flush(self) -> None:
        """Send what finished LLM backwards have left to send; never blocks."""

    def forward(self, microbatch: int) -> None:
        """Encode; may send, never blocks on a message."""

    def backward(self, microbatch: int) -> None:
        """Propagate the gradient into the encoders; blocks until it is there."""


class Timeline:
    """Spans of one step on the host clock; with a device to wait for, on the device's."""

    def __init__(self, *, is_traced: bool, synchronize: Callable[[], None]) -> None:
        self._is_traced = is_traced
        self._synchronize = synchronize
        self._begin_s = time.perf_counter()
        self._mark_s = 0.0
        self._spans: list[OpSpan] = []

    def mark(self) -> None:
        """Begin a span here."""
        self._mark_s = self._now_s()

    def end(self, op: SpanName, microbatch: int, live: int) -> None:
        """End the span that began at the last mark or end; the next one begins here."""
        if not self._is_traced:
            return
        begin_s, end_s = self._mark_s, self._now_s()
        self._spans.append(
            OpSpan(op=op, microbatch=microbatch, start_s=begin_s, end_s=end_s, live=live)
        )
        self._mark_s = end_s

    @property
    def spans(self) -> tuple[OpSpan, ...] | None:
        """The spans so far, or None when not traced."""
        return tuple(self._spans) if self._is_traced else None

    def _now_s(self) -> float:
        if self._is_traced:
            self._synchronize()
        return time.perf_counter() - self._begin_s


class Executor:
    """One stage's walk through its table in one step."""

    def __init__(self, ops: Sequence[Op], work: EncoderWork, timeline: Timeline) -> None:
        self._ops = ops
        self._work = work
        self._timeline = timeline
        self._next = 0
        self._max_live = 0

    @property
    def max_live(self) -> int:
        """Most encoder microbatches alive at once so far."""
        return self._max_live

    def open_slot(self) -> None:
        """Run every encoder operation that stands before the next LLM operation."""
        self._work.flush()
        self._timeline.mark()
        while (op := self._head()) is not None and not op.kind.is_llm:
            if op.kind is OpKind.ENCODER_FORWARD:
                self._work.forward(op.microbatch)
            else:
                self._work.backward(op.microbatch)
            self._max_live = max(self._max_live, self._work.num_live)
            self._next += 1
            self._timeline.end(op.kind.value, op.microbatch, self._work.num_live)

    def end_wait(self) -> None:
        """A pipeline message has arrived that was posted before the slot."""
        head = self._head()
        self._timeline.end("recv", head.microbatch if head else 0, self._work.num_live)

    def begin_forward(self) -> int:
        """megatron is about to run an LLM forward: open its slot, return its microbatch."""
        self.open_slot()
        head = self._head()
        if head is None or head.kind is not OpKind.LLM_FORWARD:
            raise AssertionError(f"megatron runs a forward where the table has {head}")
        return head.microbatch

    def end_llm(self, kind: OpKind) -> int:
        """megatron has run an LLM operation; returns its microbatch."""
        head = self._head()
        if head is None or head.kind is not kind:
            raise AssertionError(f"megatron ran an {kind} where the table has {head}")
        self._next += 1
        self._timeline.end(kind.value, head.microbatch, self._work.num_live)
        return head.microbatch

    def finish(self) -> None:
        """Run what stands behind the last LLM operation."""
        self.open_slot()
        if self._head() is not None:
            raise AssertionError(f"the step ended before {self._head()}")

    def _head(self) -> Op | None:
        return self._ops[self._next] if self._next < len(self._ops) else None
