"""A rank's environment, parsed once."""

import pytest

from omni_contract.errors import SpecError
from omni_trainer.environment import Pair, RankEnvironment

ENV = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "OMNI_NODE": "1", "OMNI_ATTEMPT": "2",
    "OMNI_GENERATION": "0", "OMNI_PLAN": "plan.json", "OMNI_SIDECAR": "s.sock",
    "OMNI_RUN_DIR": "run", "OMNI_TRACE_STEPS": "60, 70",
}  # fmt: skip


def test_a_rank_knows_who_it_is() -> None:
    env = RankEnvironment.read(ENV)
    assert (env.rank, env.local_rank, env.world_size, env.node) == (3, 1, 4, 1)
    assert env.pair == Pair(attempt=2, generation=0)
    assert env.trace_steps == {60, 70}
    assert RankEnvironment.read(ENV | {"OMNI_TRACE_STEPS": ""}).trace_steps == frozenset()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"OMNI_PLAN": ""}, "OMNI_PLAN: this variable is not set"),
        ({"RANK": "one"}, "RANK: 'one' is no whole number"),
        ({"OMNI_TRACE_STEPS": "60;70"}, "OMNI_TRACE_STEPS: '60;70' is no whole number"),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        RankEnvironment.read(ENV | change)


def test_pairs_order_by_attempt_then_generation() -> None:
    pairs = [Pair(attempt=a, generation=g) for a, g in ((1, 9), (2, 0), (2, 1))]
    assert sorted(reversed(pairs)) == pairs


def test_only_a_pod_of_a_cluster_has_a_job_uid() -> None:
    assert RankEnvironment.read(ENV).job_uid is None
    assert RankEnvironment.read(ENV | {"OMNI_JOB_UID": "a1-b2"}).job_uid == "a1-b2"
