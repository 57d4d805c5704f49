"""The laws of histories see what they are there to see."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from omni_contract.status import Condition, JobStatus
from tests.cluster.history import JobFact, NodeFact, PodFact
from tests.cluster.laws import BACK_WITHIN_S, FREED_WITHIN_S, breaches, unfinished

JOB: Final = "job-uid"


class Story:
    """Facts in the order in which they are told, a second apart."""

    def __init__(self) -> None:
        self.facts: list[JobFact | PodFact | NodeFact] = []
        self._time_s = 0.0

    def wait(self, seconds: float) -> "Story":
        self._time_s += seconds
        return self

    def job(self, *conditions: str, is_after_gap: bool = False, **status: Any) -> "Story":
        told = [
            Condition(
                type=kind,
                status="True",
                reason="Told",
                message="told",
                last_transition_time="2026-01-01T00:00:00Z",
            )
            for kind in conditions
        ]
        fields: Mapping[str, Any] = {"attempt": 1, "conditions": told} | status
        fact = JobFact(
            **self._base("a", JOB, {}),
            is_after_gap=is_after_gap,
            status=JobStatus.model_validate(fields),
            num_nodes=2,
            is_suspended=False,
        )
        self.facts.append(fact)
        return self

    def node(self, name: str, **fields: Any) -> "Story":
        base = self._base(name, name, fields)
        said = {"is_ready": True, "is_off": False, "gpus": 8} | fields
        self.facts.append(NodeFact(**base | said))
        return self

    def pod(self, name: str, **fields: Any) -> "Story":
        """Named by its attempt and index: 1-0."""
        attempt, index = map(int, name.split("-"))
        base = self._base(name, name, fields)
        said = {
            "job_uid": JOB,
            "index": index,
            "attempt": attempt,
            "is_gated": False,
            "phase": "Running",
            "reason": "",
            "node": f"n{index}",
            "gpus": 8,
        } | fields
        self.facts.append(PodFact(**base | said))
        return self

    def _base(self, name: str, uid: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        self._time_s += 1
        return {
            "version": len(self.facts) + 1,
            "time_s": self._time_s,
            "name": name,
            "uid": uid,
            "is_there": True,
            "is_deleting": False,
        }


def running() -> Story:
    """A job whose two pods were made, let go and bound."""
    story = Story().node("n0").node("n1").node("n2").job()
    for name in ("1-0", "1-1"):
        story.pod(name, is_gated=True, phase="Pending", node=None)
    return story.pod("1-0").pod("1-1")


def test_a_good_history_breaks_no_law() -> None:
    story = running()
    story.pod("1-0", phase="Failed").job(
        attempt=2, restarts=1, budget={"infrastructure": 1, "without_progress": 1}
    )
    story.pod("2-0", is_gated=True, phase="Pending", node=None)
    story.pod("2-0").pod("1-0", is_there=False)
    story.job(
        "Completed", attempt=2, restarts=1, budget={"infrastructure": 1, "without_progress": 1}
    )
    story.pod("2-0", phase="Succeeded").pod("1-1", phase="Succeeded")
    story.wait(2 * FREED_WITHIN_S).node("n0")
    assert breaches(story.facts) == []
    assert unfinished(story.facts) == []


def test_a_pod_on_a_lost_node_may_be_replaced_but_goes_when_the_node_is_back() -> None:
    story = running().node("n0", is_ready=False).job(attempt=2)
    story.pod("2-0", is_gated=True, phase="Pending", node=None).pod("2-0", node="n2")
    assert breaches(story.facts) == []
    story.node("n0").wait(BACK_WITHIN_S + 1).node("n1")
    assert [breach.law for breach in breaches(story.facts)] == ["one pod for each job and index"]


def test_what_nobody_was_told_breaks_no_law_unless_what_is_found_afterwards_does() -> None:
    """The API server was away, and its watch of pods was back before that of jobs."""
    for found, laws in ((2, []), (1, ["attempts are written before their pods"])):
        story = running().pod("1-0", phase="Failed")
        story.pod("2-0", is_gated=True, node=None).job(attempt=found, is_after_gap=True)
        assert [breach.law for breach in breaches(story.facts)] == laws


BROKEN: Final[Mapping[str, Callable[[Story], object]]] = {
    "one pod for each job and index": lambda story: (
        story.job(attempt=2)
        .pod("2-0", is_gated=True, phase="Pending", node=None)
        .pod("2-0", node="n2")
    ),
    "nodes are never overcommitted": lambda story: story.pod("9-9", job_uid=None, node="n1"),
    "finished jobs hold nothing": lambda story: (
        story.pod("1-0", phase="Succeeded").job("Completed").wait(FREED_WITHIN_S + 2).node("n1")
    ),
    "an end is for ever": lambda story: story.job("Completed").job(),
    "counters never fall": lambda story: story.job(progress={"highest_step": 9}).job(),
    "attempts come one by one": lambda story: story.job(attempt=3),
    "attempts are written before their pods": lambda story: story.pod("1-0", phase="Failed").pod(
        "2-0", is_gated=True, node=None
    ),
    "a restart opens an attempt": lambda story: story.job(restarts=1, budget={"user": 1}),
    "restarts are what was spent": lambda story: story.job(attempt=2, restarts=1),
}


@pytest.mark.parametrize("law", BROKEN)
def test_a_broken_law_is_told(law: str) -> None:
    story = running()
    BROKEN[law](story)
    assert [breach.law for breach in breaches(story.facts)] == [law]


def test_gates_that_open_before_all_pods_are_made_break_a_law() -> None:
    story = Story().node("n0").node("n1").job().pod("1-0", is_gated=True, node=None).pod("1-0")
    assert [breach.law for breach in breaches(story.facts)] == ["gates open for all at once"]


def test_a_job_that_neither_ends_nor_is_deleted_is_told() -> None:
    assert [breach.law for breach in unfinished(running().facts)] == ["every job completes"]
