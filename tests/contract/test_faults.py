"""The table of faults is whole, and the page about faults shows it."""

import pytest

from omni_contract.faults import FAULTS
from omni_contract.faults_docs import fault_table, with_fault_table
from omni_contract.spec_run import FaultClass, RestartAction


def test_every_class_has_its_row() -> None:
    assert set(FAULTS) == set(FaultClass)


def test_what_costs_nothing_cannot_restart_for_ever_by_itself() -> None:
    """Waiting for room is nobody's fault, nor is a drain, which a job follows only to another node;
    all else is limited."""
    free = {fault: row.by_operator for fault, row in FAULTS.items() if row.budget == "none"}
    assert free == {
        FaultClass.NODE_TAINTED: RestartAction.REPLACE_POD,
        FaultClass.PENDING_TIMEOUT: RestartAction.RESTART_JOB,
    }


def test_the_table_tells_each_row_in_one_line() -> None:
    head, rule, *rows = fault_table().splitlines()
    assert len(rows) == len(FAULTS)
    assert {line.count(" | ") for line in (head, rule, *rows)} == {4}
    gpu = next(row for row in rows if "`GpuHardware`" in row)
    assert "ReplacePod, leaves the node out | `infrastructureLimit` |" in gpu


def test_the_page_keeps_its_words_and_gets_the_table_of_now() -> None:
    page = with_fault_table("# Faults\n")
    assert page.startswith("# Faults\n\n<!-- `make manifests`")
    assert fault_table() in page
    page = f"{page}More words.\n"
    assert with_fault_table(page) == page
    old = page.replace("`Hang`", "`Slow`")
    assert old != page and with_fault_table(old) == page


@pytest.mark.parametrize("page", ["", "# Faults\n"])
def test_a_page_without_markers_gets_them_once(page: str) -> None:
    written = with_fault_table(page)
    assert with_fault_table(written) == written
    assert written.count("<!-- `make manifests`") == 1
