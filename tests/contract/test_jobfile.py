"""A job file is read as kubectl reads it; tests/cluster/test_same_plan.py asks kubectl itself."""

import math
from pathlib import Path
from typing import Any

import pytest

from omni_contract.errors import SpecError
from omni_contract.jobfile import plain_value, read_document, read_job
from tests.contract.jobs import DEMO, EXAMPLES


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-3", 0.003),
        ("1e3", 1000),
        ("1E+3", 1000),
        ("2.0", 2),
        ("1.", 1),
        (".5", 0.5),
        ("+.5", 0.5),
        ("-1.5e-3", -0.0015),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        (".5_0", ".5_0"),
        ("_1", "_1"),
        ("0x10", 16),
        ("-0X1f", -31),
        ("010", 8),
        ("0o10", 8),
        ("08", 8),
        ("0b101", 5),
        ("0", 0),
        ("-0.0", 0),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1e999", "1e999"),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", float(2**63)),
        ("y", True),
        ("On", True),
        ("no", False),
        ("oN", "oN"),
        ("~", None),
        ("", None),
        ("50k", "50k"),
        ("=", "="),
        ("0x", "0x"),
        ("-", "-"),
        (".", "."),
    ],
)
def test_text_without_quotes_is_what_kubectl_says(text: str, value: Any) -> None:
    read = plain_value(text)
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize("text", [".inf", "-.Inf", ".nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a finite one"):
        plain_value(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: '010'", {"a": "010"}),
        ('a: "yes"', {"a": "yes"}),
        ("a: |-\n  10", {"a": "10"}),
        ("on: 1\n2: b", {"true": 1, "2": "b"}),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}", {"a": {"b": 1}, "c": {"b": 2}}),
        ("a: &x {b: 1}\nc: {<<: *x}", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: [1, y, ~]", {"a": [1, True, None]}),
    ],
)
def test_documents_have_the_values_and_keys_of_json(text: str, value: Any) -> None:
    assert read_document(text, name="job.yaml") == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2", "line 2, column 1: the key 'a' stands here twice"),
        ("yes: 1\ntrue: 2", "line 2, column 1: the key 'true' stands here twice"),
        ("1: a\n'1': b", "the key '1' stands here twice"),
        ("a: !!int '1'", "line 1, column 4: the tag tag:yaml.org,2002:int is not for job files"),
        ("a: !custom 1", "the tag !custom is not for job files"),
        ("!!map {a: 1}", "is not for job files"),
        ("1.5: a", "line 1, column 1: this is no name for a field; put it in quotes"),
        ("~: a", "this is no name for a field"),
        ("? [a]\n: b", "this is no name for a field"),
        ("x: &x {b: 1}\nc: {b: 2, <<: *x}", "<< must come first"),
        ("a: .inf", "line 1, column 4: .inf is no number that a job can hold"),
        ("a: 1\n---\nb: 1", "line 2, column 1: but found another document"),
        ("a: [", "mend the YAML there"),
        ("[" * 2000, "nested too deep"),
    ],
)
def test_what_readers_disagree_about_is_refused_with_its_place(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_document(text, name="job.yaml")
    assert str(caught.value).startswith("job.yaml: ") and says in str(caught.value)


def test_the_example_is_what_it_was() -> None:
    text = (EXAMPLES / "demo.yaml").read_text()
    assert read_document(text, name="demo.yaml") == DEMO


def test_a_file_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xef\xbb\xbfapiVersion: \xc3\xa9")
    with pytest.raises(SpecError, match="apiVersion: 'é' is not available"):
        read_job(path)
    path.write_bytes(b"\xff")
    with pytest.raises(SpecError, match="cannot be read"):
        read_job(path)


@pytest.mark.parametrize("number", [0.1, 1e-8, 3e-4, 0.95, 1e21, 1e300, 5e-324])
def test_a_float_is_read_to_the_last_bit(number: float) -> None:
    for text in (repr(number), f"{number:.17e}"):
        read = plain_value(text)
        assert isinstance(read, float) and math.isclose(read, number, rel_tol=0)
