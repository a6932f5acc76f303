"""Where ranks meet that start without a launcher."""

from pathlib import Path

import pytest


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Return where ranks meet."""
    return str(tmp_path / "store")
