"""The statistics of the benchmark: figures from the times of many steps.

Other work on a machine can only make a step longer.  So the low end of the times shows
what the code can do, and the median what it did on that day.  Comparisons use the 10th
percentile: it is low enough to exclude most noise and, unlike the minimum, does not
depend on a single lucky step.

A ratio is computed within a group of processes, in which the contestants took turns
under the same load.  Groups are independent of each other, so the uncertainty comes
from resampling groups, not steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

N_RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the interpolated percentile; `share` is 0 to 100.

    >>> percentile([1.0, 2.0, 3.0], 50)
    2.0
    """
    return float(np.percentile(values, share))


def median_with_interval(values: Sequence[float]) -> Interval:
    """Return the median over groups and its 95 % percentile-bootstrap interval.

    With five groups the interval is about the range of the five values.  If a small
    difference matters, run more groups.

    >>> print(median_with_interval([1.5, 1.5, 1.5]))
    1.50 [1.50, 1.50]
    """
    data = np.asarray(values, dtype=float)
    random = np.random.default_rng(0)
    medians = np.median(random.choice(data, (N_RESAMPLES, data.size)), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Interval(float(np.median(data)), float(low), float(high))
