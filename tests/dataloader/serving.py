"""What tests of the data service share: one small job of two nodes, pp 2 x dp 2."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_contract import wire
from omni_contract.plan import JobPlan
from tests.fakes.sidecar_client import SidecarClient, Step, fake_plan
from tests.fakes.sources import SOURCES

RANKS = range(4)
NUM_STEPS = 6
NAMES = sorted(SOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """A run in which nothing happened."""

    steps: list[list[Step]]
    """By step, then by rank."""
    states: list[wire.LoaderState]
    """After each step."""


def plan_of(uri: str, **data: Any) -> JobPlan:
    """The job; `data` replaces fields of its data block."""
    plan = fake_plan(uri, batch={"globalSequences": 8, "sequenceTokens": 256})
    raw = plan.model_dump(mode="json", by_alias=True)
    raw["spec"]["data"] |= data
    return JobPlan.model_validate(raw)


def join_all(paths: Sequence[Path], plan: JobPlan, **hello: Any) -> list[SidecarClient]:
    """Every rank joins its node's service."""
    return [
        SidecarClient.join(paths[plan.layout.node_of(rank)], plan, rank=rank, **hello)
        for rank in RANKS
    ]


def take(clients: Sequence[SidecarClient], step: int) -> list[Step]:
    """One step for all ranks, released at once."""
    for client in clients:
        client.ask(step)
    steps = []
    for client in clients:
        answer = client.take()
        assert isinstance(answer, Step)
        steps.append(answer)
        client.release(step)
    return steps


def walk(clients: Sequence[SidecarClient], first: int, last: int) -> list[list[Step]]:
    """Steps `first` to `last` for all ranks."""
    return [take(clients, step) for step in range(first, last + 1)]


def assert_same(got: list[list[Step]], expected: list[list[Step]]) -> None:
    """Every array of every rank is equal."""
    assert len(got) == len(expected)
    for got_ranks, expected_ranks in zip(got, expected, strict=True):
        for one, other in zip(got_ranks, expected_ranks, strict=True):
            assert one.batch.step == other.batch.step
            assert one.batch.corrupt_samples == other.batch.corrupt_samples
            assert one.batch.tokens_by_source == other.batch.tokens_by_source
            for mine, theirs in zip(one.microbatches, other.microbatches, strict=True):
                assert mine.keys() == theirs.keys()
                for name in mine:
                    assert (mine[name] == theirs[name]).all(), name
