"""Each program of the table does on simulated GPUs what the plain module does."""

import pytest
from programs import check, rows_on


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), rows_on("gpu"))
def test_a_program_does_as_with_the_plain_module(row, device):
    check(row, device)
