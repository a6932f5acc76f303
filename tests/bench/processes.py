"""What processes use, seen from outside: their children, CPU time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

# A process's CPU clock has a number that is made of its id: clock_getcpuclockid(3),
# which Python lacks.  Unlike /proc/<pid>/stat it counts nanoseconds, not ticks.
CPUCLOCK_SCHED = 2


def tree(pid: int) -> list[int]:
    """The process and all that descend from it; who is gone meanwhile is left out."""
    found = [pid]
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = listed.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            found += tree(int(child))
    return found


def cpu_ns(pids: Iterable[int]) -> int:
    """User and system time of all threads of these processes so far."""
    return sum(time.clock_gettime_ns(~pid << 3 | CPUCLOCK_SCHED) for pid in pids)


def pss_mib(pid: int) -> float:
    """A process's memory; a page shared by n processes counts as 1/n of a page.

    The resident set would count shared buckets in full once for every rank.
    """
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("smaps_rollup has no Pss line")


def pin(number: int) -> None:
    """Bind this process to one core, the `number`-th of those that it may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})
