"""Each program of the table does on simulated GPUs what the plain module does.

Its replicas, which are kept from forward to forward, equal new ones in each forward.
"""

import pytest
from kept import as_new
from programs import check, rows_on


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), rows_on("gpu"))
def test_a_program_does_as_with_the_plain_module(row, device):
    with as_new():
        check(row, device)
