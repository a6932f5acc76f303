"""The limit of CPU time of this process's control groups, of version 1 and 2.

A group's limit holds for all groups below it, so each folder from this process's own
group up to the mount is read, and the tightest limit counts.  In a container the path
that the kernel names may lie outside of what is mounted: then the mount is the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many cores' worth of time may be used; None: no limit."""
    quotas = []
    for folder in _folders("cpu", root):
        words = _read(folder / "cpu.max").split()
        if len(words) != 2:
            v1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [_read(folder / name).strip() for name in v1]
        quota, period = map(_number, words)
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups that a controller may limit."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
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


def _number(text: str) -> int | None:
    """Return a whole number that is no less than 0; None of "max", -1 and the like."""
    return int(text) if text.isdecimal() else None
