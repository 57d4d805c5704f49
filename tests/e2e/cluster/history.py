"""What a record says, put together by fault and by step. Pure; judges nothing.

Each fault has a window, from its injection to the next one; what happens in it is its doing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omni_contract.status import Incident, JobStatus, read_time
from tests.e2e.cluster.expected import Expectation, expectation_of
from tests.e2e.cluster.record import Injection, Record, Seen, Steps

Pair = tuple[int, int]
"""(attempt, generation)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time of one fault, and what was seen in it."""

    injection: Injection
    expectation: Expectation
    end_s: float
    """When the next fault was injected, or the run ended."""
    before: Seen
    """The last look before it."""
    looks: Sequence[Seen]
    """In it."""
    incidents: Sequence[Incident]

    @property
    def last(self) -> Seen:
        """The last look of it."""
        return self.looks[-1] if self.looks else self.before

    @property
    def incident(self) -> Incident | None:
        """Its incident; of several the first."""
        return self.incidents[0] if self.incidents else None

    @property
    def pair(self) -> Pair:
        """The pair that was struck."""
        return self.injection.attempt, self.injection.generation

    @property
    def restarts(self) -> int:
        """Restarts counted in it."""
        return status_of(self.last).restarts - status_of(self.before).restarts


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneStep:
    """One step, as one pair did it."""

    step: int
    pair: Pair
    loss: float
    at_s: float
    samples: Sequence[str]


def status_of(seen: Seen) -> JobStatus:
    """The status in a look."""
    return JobStatus.model_validate(seen.status)


def done_steps(steps: Sequence[Steps]) -> list[DoneStep]:
    """All steps that were done, replays too, by pair and then by step. One that was broken off has
    no loss."""
    return [
        DoneStep(
            step=step,
            pair=(of_pair.attempt, of_pair.generation),
            loss=loss,
            at_s=of_pair.times_s.get(step, math.nan),
            samples=of_pair.samples.get(step, ()),
        )
        for of_pair in sorted(steps, key=lambda s: (s.attempt, s.generation))
        for step, loss in sorted(of_pair.losses.items())
    ]


def accepted(done: Sequence[DoneStep]) -> dict[int, DoneStep]:
    """The history of the model that came out: each step as the highest pair did it."""
    return {one.step: one for one in sorted(done, key=lambda d: (d.step, d.pair))}


def incidents_of(record: Record) -> list[Incident]:
    """Every incident that a status ever told, in order of time, each as it was told last."""
    found: dict[tuple[str, str, int, int], Incident] = {}
    for seen in record.seen:
        for incident in status_of(seen).incidents:
            key = (incident.time, incident.fault, incident.attempt, incident.generation)
            found[key] = incident
    return sorted(found.values(), key=lambda incident: read_time(incident.time))


def windows_of(record: Record) -> list[Window]:
    """The faults in order."""
    incidents = incidents_of(record)
    nothing = Seen(at_s=record.began_s, status={}, pods={})
    ends_s = [*(injection.began_s for injection in record.injections), math.inf][1:]
    windows = []
    for injection, end_s in zip(record.injections, ends_s, strict=True):
        began_s = injection.began_s
        windows.append(
            Window(
                injection=injection,
                expectation=expectation_of(injection.name),
                end_s=end_s,
                before=next((s for s in reversed(record.seen) if s.at_s <= began_s), nothing),
                looks=[seen for seen in record.seen if began_s < seen.at_s <= end_s],
                incidents=[i for i in incidents if began_s <= read_time(i.time) < end_s],
            )
        )
    return windows
