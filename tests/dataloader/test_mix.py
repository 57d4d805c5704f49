import pytest

from omni_contract.spec_data import MixtureStage
from omni_dataloader.mix import SCALE, by_need, charge, shares_of, weights_at

NAMES = ["a", "b", "c"]
STAGES = [
    MixtureStage.parse({"until": 100, "weights": {"a": 1, "b": 1}}),
    MixtureStage.parse({"until": 300, "ramp": "linear", "weights": {"b": 1, "c": 3}}),
    MixtureStage.parse({"ramp": "linear", "weights": {"c": 2}}),
]


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        (0, [0.5, 0.5, 0]),
        (99, [0.5, 0.5, 0]),
        (100, [0.5, 0.5, 0]),
        (200, [0.25, 0.375, 0.375]),
        (300, [0, 0.25, 0.75]),
        (400, [0, 0.125, 0.875]),
        (500, [0, 0, 1]),
        (900, [0, 0, 1]),
    ],
)
def test_weights_follow_stages_and_ramps(planned: int, expected: list[float]) -> None:
    weights = weights_at(STAGES, NAMES, planned=planned, total=500)
    assert list(weights.values()) == pytest.approx(expected)


def test_no_mixture_means_equal_weights() -> None:
    assert weights_at([], NAMES, planned=0, total=1) == dict.fromkeys(NAMES, 1 / 3)


def test_the_smallest_weight_still_counts() -> None:
    assert shares_of({"a": 1.0, "b": 1e-12, "c": 0.0}) == [SCALE, 1, 0]


def test_tokens_follow_shares_whatever_the_sample_lengths() -> None:
    shares = shares_of({"a": 0.13, "b": 0.61, "c": 0.26})
    lengths = [17, 190, 3000]
    credits = [0, 0, 0]
    tokens = [0, 0, 0]
    for _ in range(5000):
        source = by_need(credits, shares)[0]
        tokens[source] += lengths[source]
        charge(credits, shares, source=source, tokens=lengths[source])
        assert sum(credits) == 0
        for number, share in enumerate(shares):
            assert abs(sum(tokens) * share / SCALE - tokens[number]) <= 2 * max(lengths)


def test_ties_go_in_source_order_and_weight_0_is_never_asked() -> None:
    assert by_need([5, 5, 9], [1, 1, 0]) == [0, 1]
