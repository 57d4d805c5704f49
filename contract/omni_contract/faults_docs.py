"""Writes the table of fault classes into the page about faults, between two markers."""

from typing import Final

from omni_contract.faults import FAULTS, FaultRow

_BEGIN: Final = "<!-- `make manifests` writes this from contract/omni_contract/faults.py -->\n"
_END: Final = "<!-- End of the written part. -->\n"
_HEAD: Final = """\
| class | noticed by | supervisors | operator | counts against |
| --- | --- | --- | --- | --- |
"""
_BUDGETS: Final = {
    "user": "`limit`",
    "infrastructure": "`infrastructureLimit`",
    "none": "nothing",
}


def fault_table() -> str:
    """A row for each class."""
    rows = (_row(str(fault), row) for fault, row in FAULTS.items())
    return _HEAD + "".join(rows)


def with_fault_table(page: str) -> str:
    """The page with the table of now. One without the markers gets them at its end."""
    before, begin, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    if not begin and before:
        before = f"{before}\n"
    return f"{before}{_BEGIN}{fault_table()}{_END}{after}"


def _row(name: str, row: FaultRow) -> str:
    by_operator = str(row.by_operator) + (", leaves the node out" if row.excludes_node else "")
    cells = (
        f"`{name}`",
        row.detector,
        "-" if row.in_pod is None else str(row.in_pod),
        by_operator,
        _BUDGETS[row.budget],
    )
    return f"| {' | '.join(cells)} |\n"
