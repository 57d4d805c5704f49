import dataclasses

import numpy as np
import pytest

from omni_contract.errors import DataError
from omni_dataloader.sample_plan import SamplePlan
from omni_dataloader.state import CORRUPT, Identity, SavedState
from tests.dataloader.tables import DEMO_MIXTURE, demo_tables, sample_plan

CORRUPT_SAMPLES = np.array([(3, 1, 0, 17), (5, 0, 2, 4)], CORRUPT)


def saved_after(plan: SamplePlan, num_steps: int) -> SavedState:
    state = plan.begin()
    for _ in range(num_steps):
        _, state = plan.step(state)
    return SavedState(plan=state, corrupt=CORRUPT_SAMPLES)


def identity(plan: SamplePlan, *, seed: int = 7) -> Identity:
    return Identity.of(plan, seed=seed)


@pytest.mark.parametrize("num_steps", [0, 1, 17, 60, 150])  # 60 in the ramp, 150 in later epochs
def test_c11_a_restored_state_gives_the_same_next_steps(num_steps: int) -> None:
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    saved = saved_after(plan, num_steps)
    raw = saved.to_bytes(identity(plan))
    fresh = sample_plan(demo_tables(), DEMO_MIXTURE)
    restored = SavedState.from_bytes(raw, identity(fresh))
    assert (restored.corrupt == CORRUPT_SAMPLES).all()
    here, there = saved.plan, restored.plan
    for _ in range(5):
        expected, here = plan.step(here)
        got, there = fresh.step(there)
        assert got.step == expected.step and (got.pieces == expected.pieces).all()
        assert got.weights == expected.weights
    assert restored.to_bytes(identity(fresh)) == raw  # saving right after restoring


def test_c15_prefetch_does_not_move_the_state() -> None:
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    before = saved_after(plan, 10).to_bytes(identity(plan))
    state = saved_after(plan, 10).plan
    for _ in range(5):
        _, state = plan.step(state)  # planned ahead, then thrown away
    assert saved_after(plan, 10).to_bytes(identity(plan)) == before


def test_the_state_is_a_few_references() -> None:
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    assert len(saved_after(plan, 50).to_bytes(identity(plan))) < 2000


def test_c11_a_state_of_another_seed_is_refused() -> None:
    plan = sample_plan(demo_tables())
    raw = saved_after(plan, 3).to_bytes(identity(plan))
    with pytest.raises(DataError, match=r"train\.seed: 8 is not the 7"):
        SavedState.from_bytes(raw, identity(plan, seed=8))


def test_c11_a_state_of_other_sources_is_refused() -> None:
    plan = sample_plan(demo_tables())
    raw = saved_after(plan, 3).to_bytes(identity(plan))
    with pytest.raises(DataError, match=r"data\.sources: books, drawings, pictures are not"):
        SavedState.from_bytes(raw, identity(sample_plan(demo_tables()[:2] + demo_tables()[3:])))
    changed = demo_tables()
    changed[2] = dataclasses.replace(changed[2], fingerprint="other")
    with pytest.raises(DataError, match=r"data\.sources\.speech: its samples or their lengths"):
        SavedState.from_bytes(raw, identity(sample_plan(changed)))


@pytest.mark.parametrize("damage", [b"", b"OMNILOAD", b"garbage of some length, over 16 bytes"])
def test_c11_a_damaged_state_is_refused(damage: bytes) -> None:
    plan = sample_plan(demo_tables())
    with pytest.raises(DataError, match="truncated or no data state"):
        SavedState.from_bytes(damage, identity(plan))
    raw = bytearray(saved_after(plan, 3).to_bytes(identity(plan)))
    raw[len(raw) // 2] ^= 1
    with pytest.raises(DataError, match="truncated or no data state"):
        SavedState.from_bytes(bytes(raw), identity(plan))


def test_c16_changed_weights_go_on_from_the_same_samples() -> None:
    """A mixture edit neither repeats nor loses samples: cursors do not depend on it."""
    plan = sample_plan(demo_tables(), DEMO_MIXTURE)
    saved = saved_after(plan, 20)
    edited = sample_plan(demo_tables())
    restored = SavedState.from_bytes(saved.to_bytes(identity(plan)), identity(edited))
    step, _ = edited.step(restored.plan)
    for number, cursor in enumerate(saved.plan.cursors):
        drawn = step.pieces[step.pieces[:, 1] == number]
        indexes = [
            edited.index_at(number, int(cursor["epoch"]), int(cursor["position"]) + n)
            for n in range(3)
        ]
        assert set(indexes[:1]) <= set(drawn[:, 3].tolist())
