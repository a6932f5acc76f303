"""Timings: kernels in this process, then whole steps of one rank and of two.

What must hold on a GPU is judged beside each figure ("meets", "misses"); a benchmark is
no test, and a figure that misses fails nothing.
"""

from __future__ import annotations

import time

import bench_kernels
import bench_steps
import session
from checks import checks_of, is_rehearsal, run_here


def run(seconds: float) -> bool:
    until = time.monotonic() + seconds - 15
    good = True
    if not is_rehearsal():
        good = run_here(bench_kernels.checks())
    return session.run_on_ranks(checks_of(bench_steps), (1, 2), until) and good
