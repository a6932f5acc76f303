"""The meeting point of ranks that start without a launcher."""

import pytest


@pytest.fixture
def store(tmp_path):
    """Return the path of the file over which ranks meet."""
    return str(tmp_path / "store")
