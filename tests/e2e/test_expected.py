"""The table of expected faults agrees with the product's own table and with the docs."""

from omni_contract.faults import FAULTS
from tests.cluster.chart import ROOT
from tests.e2e.cluster.expected import EXPECTED, expectation_table
from tests.e2e.cluster.record import Fault


def test_every_fault_has_its_row_in_the_order_of_injection() -> None:
    assert [row.name for row in EXPECTED] == list(Fault)


def test_what_is_expected_is_what_the_product_promises_of_the_class() -> None:
    for row in EXPECTED:
        if row.fault is None:
            assert (row.action, row.counter, row.pods) == (None, "none", "stay")
        else:
            promised = FAULTS[row.fault]
            assert row.counter == promised.budget
            # Supervisors mend what they notice; only the rest falls to the operator.
            assert row.action is (promised.in_pod or promised.by_operator)


def test_the_docs_show_the_table() -> None:
    assert expectation_table() in (ROOT / "docs" / "testing.md").read_text()
