"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

MOST_SECONDS = 30.0


def until(condition: Callable[[], object], seconds: float = MOST_SECONDS) -> bool:
    """Wait until a condition holds; return False if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
