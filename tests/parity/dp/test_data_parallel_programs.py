"""Each program of the table does with replicas what it does with the plain module."""

import importlib
from pathlib import Path

import pytest
from programs import ROWS, check

for path in sorted((Path(__file__).parent / "programs").glob("[a-z]*.py")):
    importlib.import_module(f"programs.{path.stem}")


def case(row, device):
    reason = row.broken_on.get(device)
    marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
    return pytest.param(row, device, id=f"{row.name}-{device}", marks=marks)


CASES = [case(row, device) for row in ROWS for device in row.on.split()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "device"), CASES)
def test_a_program_does_as_with_the_plain_module(row, device):
    check(row, device)


def test_each_row_has_a_name_of_its_own():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)
