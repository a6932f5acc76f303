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
    """Collect garbage while a condition does not hold; return whether it does then.

    Without a GIL an object that one thread has made and another lets go stays until the
    first one runs Python again, or until a collection: autograd's threads sleep.  What
    such an object holds may have been made by another thread, too.
    """
    for _ in range(4):
        if condition():
            return True
        gc.collect()
    return bool(condition())
