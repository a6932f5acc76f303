"""Each program of the table does on CPU replicas what the plain module does."""

import pytest
from programs import ROWS, check, rows_on


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), rows_on("cpu"))
def test_a_program_does_as_with_the_plain_module(row, device):
    check(row, device)


def test_each_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
