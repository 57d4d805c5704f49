"""Which source comes next, so that tokens follow the mixture's weights. Integers decide.

Weights change at step boundaries only, as a function of the tokens planned so far; every planned
step is consumed exactly once, so these are the tokens consumed.
"""

from collections.abc import Mapping, Sequence

from omni_contract.spec_data import MixtureStage

MIX_VERSION = 1

SCALE = 1 << 24
"""Parts of the whole that a share is counted in; a credit is tokens times SCALE."""


def weights_at(
    stages: Sequence[MixtureStage], sources: Sequence[str], *, planned: int, total: int
) -> dict[str, float]:
    """Weights in force after `planned` tokens, normalised to 1; the last stage ends at `total`."""
    if not stages:
        return {name: 1 / len(sources) for name in sources}
    begin = 0
    before: dict[str, float] | None = None
    for number, stage in enumerate(stages):
        weights = _normalised(stage.weights, sources)
        end = max(begin + 1, total if stage.until is None else stage.until)
        if planned < end or number == len(stages) - 1:
            if stage.ramp == "none" or before is None:
                return weights
            done = min(1.0, (planned - begin) / (end - begin))
            return {s: before[s] + (weights[s] - before[s]) * done for s in sources}
        begin, before = end, weights
    raise AssertionError("the last stage returns")


def _normalised(weights: Mapping[str, float], sources: Sequence[str]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weights.get(name, 0.0) / total for name in sources}


def shares_of(weights: Mapping[str, float]) -> list[int]:
    """Weights as integers in 1/SCALE, in the order given; a weight above 0 never becomes 0."""
    return [max(1, round(weight * SCALE)) if weight > 0 else 0 for weight in weights.values()]


def charge(credits: list[int], shares: Sequence[int], *, source: int, tokens: int) -> None:
    """Book `tokens` of one source: all earn their share of them, the source pays for them.

    Credits sum to what they summed to before, so a source's credit is the tokens it is behind
    its share.
    """
    for number, share in enumerate(shares):
        credits[number] += share * tokens
    credits[source] -= sum(shares) * tokens


def by_need(credits: Sequence[int], shares: Sequence[int]) -> list[int]:
    """Sources with a share, the one most behind it first; ties in source order."""
    wanted = [number for number, share in enumerate(shares) if share]
    return sorted(wanted, key=lambda number: -credits[number])
