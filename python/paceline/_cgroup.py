"""The limits of this process's control groups, of version 1 and 2.

A group's limit holds for all groups below it, so each folder from this process's own
group up to the mount is read, and the tightest limit counts.  In a container the path
that the kernel names may lie outside of what is mounted: then the mount is the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_MOUNT = "sys/fs/cgroup"
_NO_LIMIT_BYTES = 1 << 62
"""Version 1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True)
class Usage:
    """A limit, and how much of it is used."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        """What is left."""
        return max(0, self.limit - self.used)


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


def memory(root: Path = ROOT) -> Usage | None:
    """Return the limit of memory, in bytes, with the least left; None: no limit.

    Cached files that the kernel drops as soon as memory is short are not counted.
    """
    limits = []
    for folder in _folders("memory", root):
        limit = _either(folder, "memory.max", "memory.limit_in_bytes")
        used = _either(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or limit >= _NO_LIMIT_BYTES:
            continue
        stat = dict(_pairs(_read(folder / "memory.stat")))
        cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        limits.append(Usage(limit, max(0, (used or 0) - cached)))
    return min(limits, key=lambda usage: usage.free, default=None)


def tasks(root: Path = ROOT) -> Usage | None:
    """Return the limit of processes and threads with the least left; None: no limit."""
    limits = []
    for folder in _folders("pids", root):
        limit = _number(_read(folder / "pids.max").strip())
        if limit is not None:
            used = _number(_read(folder / "pids.current").strip())
            limits.append(Usage(limit, used or 0))
    return min(limits, key=lambda usage: usage.free, default=None)


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


def _either(folder: Path, *names: str) -> int | None:
    found = (_number(_read(folder / name).strip()) for name in names)
    return next((number for number in found if number is not None), None)


def _pairs(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        number = _number(value.strip())
        if number is not None:
            yield name, number
