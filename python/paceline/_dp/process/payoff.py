"""Whether worker processes can pay, as far as the first calls tell.

What the plain module takes for the whole batch is not known without running it, but a
bound is: replica 0's part, one after the other for all replicas.  A call that takes
longer than that, because of what it costs to reach the others, cannot be faster than
the plain module.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("paceline")
N_SKIPPED = 3
"""Calls that come before: workers start, memory is touched for the first time."""
N_CALLS = 15


class Payoff:
    """The times of the first calls; logs one line where replicas cannot pay."""

    def __init__(
        self, n_replicas: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._n_replicas, self._clock = n_replicas, clock
        self._n_calls = 0
        self._part = 0.0
        self._whole: list[float] = []
        self._parts: list[float] = []

    @property
    def is_over(self) -> bool:
        """Whether enough calls were seen."""
        return self._n_calls >= N_SKIPPED + N_CALLS

    @contextmanager
    def call(self) -> Iterator[None]:
        """Time a call as a whole; one that fails does not count."""
        begin = self._clock()
        yield
        self._n_calls += 1
        if self._n_calls > N_SKIPPED:
            self._whole.append(self._clock() - begin)
            self._parts.append(self._part)
        if self._n_calls == N_SKIPPED + N_CALLS:
            self._judge()

    def replica_0_begins(self) -> None:
        """Record when replica 0 begins its part of a call."""
        self._part = -self._clock()

    def replica_0_ends(self) -> None:
        """Record when it ends."""
        self._part += self._clock()

    def _judge(self) -> None:
        n = self._n_replicas
        pairs = zip(self._whole, self._parts, strict=True)
        if statistics.median(whole - n * part for whole, part in pairs) <= 0.0:
            return
        _log.info(
            "a forward takes %.2f ms with %d replicas, of which replica 0's part of "
            "the batch is %.2f ms: %d such parts in a row would take less, so "
            "DataParallel is not faster than the plain module here",
            1000 * statistics.median(self._whole),
            n,
            1000 * statistics.median(self._parts),
            n,
        )
