"""Timings: replicas, whole steps of one rank, kernels in this process, two ranks.

What must hold on a GPU is judged beside each figure ("meets", "misses"); a benchmark is
no test, and a figure that misses fails nothing.
"""

from __future__ import annotations

import time

import bench_kernels
import bench_replicas
import bench_steps
import session
from checks import checks_of, is_rehearsal, run_here
from replica_world import in_one_process


def run(seconds: float) -> bool:
    until = time.monotonic() + seconds - 15
    steps, replicas = checks_of(bench_steps), in_one_process(checks_of(bench_replicas))
    good = session.run_on_ranks(replicas, (1,), until)
    good = session.run_on_ranks(steps, (1,), until) and good
    if not is_rehearsal():
        good = run_here(bench_kernels.checks()) and good
    return session.run_on_ranks(steps, (2,), until) and good
