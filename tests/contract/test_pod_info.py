"""What a pod reads of its own annotations: lines as the kubelet writes them."""

from pathlib import Path

import pytest

from omni_contract import names
from omni_contract.errors import OmniError
from omni_contract.packed import pack, read_packed
from omni_contract.pod_info import Assignment, parse_annotations
from omni_contract.records import History

# As Kubernetes' FormatMap writes it with Go's %q: escapes, bytes that are no UTF-8.
WRITTEN = (
    r'a="plain"'
    "\n"
    r'b="a \"quoted\" \\ word"'
    "\n"
    r'c="two\nlines\tand\a\b\f\r\v"'
    "\n"
    r'd="größe ≤ 1 = ok"'
    "\n"
    r'e="\u200b\x7f\U000e0001"'
    "\n"
    r'f="\xff"'
    "\n"
    r'g=""'
)


def test_values_are_read_exactly() -> None:
    assert parse_annotations(WRITTEN) == {
        "a": "plain",
        "b": 'a "quoted" \\ word',
        "c": "two\nlines\tand\a\b\f\r\v",
        "d": "größe ≤ 1 = ok",
        "e": "\u200b\x7f\U000e0001",
        "f": "\ufffd",
        "g": "",
    }


def annotations(**changed: str) -> dict[str, str]:
    return {
        names.ANNOTATION_ATTEMPT: "3",
        names.ANNOTATION_INDEX: "1",
        names.ANNOTATION_RENDEZVOUS: "a-0.a.team.svc:29400",
        names.ANNOTATION_HISTORY: History(user_restarts=2).model_dump_json(),
    } | {getattr(names, f"ANNOTATION_{name}"): value for name, value in changed.items()}


def test_a_part_is_attempt_index_rendezvous_and_history() -> None:
    part = Assignment.parse(annotations())
    assert (part.attempt, part.index, part.rendezvous) == (3, 1, "a-0.a.team.svc:29400")
    assert part.history == History(user_restarts=2)
    assert Assignment.parse(annotations(INDEX="")).index is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ATTEMPT": "many"}, "annotation megascale-omni.dev/attempt of this pod: 'many'"),
        ({"INDEX": "x"}, "annotation megascale-omni.dev/index of this pod: 'x'"),
        ({"HISTORY": "4"}, "annotation megascale-omni.dev/history of this pod: '4'"),
    ],
)
def test_a_wrong_annotation_is_named(changed: dict[str, str], words: str) -> None:
    with pytest.raises(OmniError, match=words):
        Assignment.parse(annotations(**changed))


def test_a_file_that_is_being_replaced_is_not_an_error(tmp_path: Path) -> None:
    assert Assignment.read(tmp_path / "annotations") is None


def test_a_line_that_is_not_quoted_is_refused() -> None:
    with pytest.raises(OmniError, match="no quoted value"):
        parse_annotations("a=plain")


def test_a_packed_document_is_read_from_its_mounted_folder(tmp_path: Path) -> None:
    for name, piece in (pack("plan.json", "x" * 10) | pack("other.json", "y")).items():
        (tmp_path / name).write_bytes(piece)
    assert read_packed(tmp_path, "plan.json") == "x" * 10
    with pytest.raises(OmniError, match=r"no placement\.json is packed there"):
        read_packed(tmp_path, "placement.json")
    (tmp_path / "plan.json.gz.000").write_bytes(b"cut")
    with pytest.raises(OmniError, match=r"no plan\.json is packed there"):
        read_packed(tmp_path, "plan.json")
