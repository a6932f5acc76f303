"""How long a wait may take, without time in which this process was stopped."""

import time

LOOK_SECONDS = 0.2
"""A wait looks more often: no more counts of the time between two looks."""


class Patience:
    """The time left of a wait; as ``pli_stopwatch`` of csrc/core/clock.h."""

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def left(self) -> float:
        """Return the seconds left, which may be negative."""
        before, self._looked = self._looked, time.monotonic()
        self._left -= min(self._looked - before, LOOK_SECONDS)
        return self._left
