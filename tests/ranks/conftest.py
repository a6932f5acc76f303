"""Where ranks meet that start without a launcher."""

import pytest


@pytest.fixture
def store(tmp_path):
    """Return where ranks meet."""
    return str(tmp_path / "store")
