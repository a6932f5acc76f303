"""Wait for what another thread or process does."""

from __future__ import annotations

import gc
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


def once_collected(condition: Callable[[], object]) -> bool:
    """Collect garbage until a condition holds; return False if it never does.

    One collection may not do.  A thread of torch holds the end of a graph for a moment
    after its backward.  Without a GIL, what another thread has made stays until a
    collection, and what that thing holds until the next one.
    """

    def holds() -> object:
        gc.collect()
        return condition()

    return until(holds)
