"""The same number means the same, typed as text or not, from PyYAML or from kubectl."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from omni_contract.jobfile import plain_value
from omni_contract.quantity import AutoTokens, Steps, Tokens
from omni_contract.spec import Job
from omni_planner.compile import compile_plan
from tests.contract.jobs import changed

TOKENS: TypeAdapter[int] = TypeAdapter(Tokens)
STEPS: TypeAdapter[int] = TypeAdapter(Steps)
AUTO: TypeAdapter[Any] = TypeAdapter(AutoTokens)


@pytest.mark.parametrize(
    ("typed", "tokens"),
    [
        ("50k", 50_000),
        ("50K", 50_000),
        ("1M", 10**6),
        ("1.1M", 1_100_000),
        ("2.5B", 2_500_000_000),
        ("2G", 2 * 10**9),
        ("0.000001M", 1),
        ("1T", 10**12),
        ("0", 0),
        (7, 7),
    ],
)
def test_a_number_of_tokens_is_read(typed: Any, tokens: int) -> None:
    assert TOKENS.validate_python(typed) == tokens


@pytest.mark.parametrize(
    "typed", ["", "k", "-1", -1, "1.5", "1e6", 1.5, 1e6, True, "1 M", "1kk", "0x10", "10001T", "١k"]
)
def test_what_is_no_number_of_tokens_is_refused(typed: Any) -> None:
    with pytest.raises(ValidationError):
        TOKENS.validate_python(typed)


@pytest.mark.parametrize("typed", [20, "20", "20 steps", "20 step"])
def test_a_number_of_steps_is_read(typed: Any) -> None:
    assert STEPS.validate_python(typed) == 20


@pytest.mark.parametrize("typed", [0, "0", "0 steps", "20steps", "20 tokens", True, 20.0])
def test_what_is_no_number_of_steps_is_refused(typed: Any) -> None:
    with pytest.raises(ValidationError):
        STEPS.validate_python(typed)


def test_auto_stands_beside_a_number() -> None:
    assert AUTO.validate_python("auto") == "auto"
    assert AUTO.validate_python("4k") == 4000


@pytest.mark.parametrize(
    ("path", "as_text", "as_number"),
    [
        ("spec.train.tokens", "1M", 1_000_000),
        ("spec.train.optimizer.learningRate", "3e-3", 0.003),
        ("spec.train.optimizer.clipGradNorm", "1", 1.0),
        ("spec.checkpoint.every", "20 steps", 20),
        ("spec.data.mixture.0.until", "200k", 200_000),
    ],
)
def test_text_and_number_give_the_same_plan(path: str, as_text: str, as_number: Any) -> None:
    """PyYAML would read 3e-3 as text, kubectl reads a number: one plan, one hash."""
    read = plain_value(as_text)
    plans = [compile_plan(Job.read(changed(path, value))) for value in (read, as_number)]
    assert plans[0].to_json() == plans[1].to_json()
