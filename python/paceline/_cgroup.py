"""The CPU time limit that control groups, version 1 or 2, set for this process.

A group's limit also holds for all groups below it.  So each folder from this process's
own group up to the mount is read, and the tightest limit counts.  In a container, the
path that the kernel reports may lie outside of the mount; then the mount is the group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNT = "sys/fs/cgroup"


def threads_of_each(n_ranks: int) -> int:
    """Return each rank's share of the cores, by this thread's affinity and quota."""
    n_cores = min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)
    return max(int(n_cores) // n_ranks, 1)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the limit of CPU time in cores, such as 1.5; None if there is no limit."""
    quotas = []
    for folder in _folders("cpu", root):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            v1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_read(folder / name).strip() for name in v1]
        if all(word.isdecimal() and int(word) for word in words):  # not "max" or "-1"
            quota, period = map(int, words)
            quotas.append(quota / period)
    return min(quotas, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders that may hold a controller's limits for this process."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if number == "0" and not controllers:
            mounts = [root / _MOUNT, root / _MOUNT / "unified"]
        elif controller in names:
            mounts = [root / _MOUNT / name for name in {controller, controllers}]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            for n in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:n])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
