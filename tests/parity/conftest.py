"""What the comparisons with torch share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def start_by_fork(forked_workers):
    """Have every file's worker processes forked."""
