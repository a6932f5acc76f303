"""Each program of the table does the same with replicas as with the plain module.

Replicas are kept from forward to forward, and equal new ones in each.
"""

import pytest
from kept import as_new
from programs import ROWS, cases, check


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), cases())
def test_a_program_does_as_with_the_plain_module(row, device):
    with as_new():
        check(row, device)


def test_each_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
