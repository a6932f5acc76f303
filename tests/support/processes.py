"""The resources of a process, from /proc: descriptors, mappings, children."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from pathlib import Path


def descriptors() -> dict[int, str]:
    """Return this process's open descriptors, each with its file or kind."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor that lists this folder
            continue
    return found


def shared_mappings() -> list[str]:
    """Return the lines of this process's memory map for the memory of worlds."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:paceline (" in line]


def shared_names() -> list[str]:
    """Return Paceline's names in shared memory, which should be empty."""
    return [name for name in os.listdir("/dev/shm") if "paceline" in name]


def new_descriptors(before: dict[int, str]) -> dict[int, str]:
    """Return the descriptors that were closed `before`, or open for another file."""
    return {fd: link for fd, link in descriptors().items() if before.get(fd) != link}


JOINED_SECONDS = 20.0
Holdings = tuple[dict[int, str], int, list[str]]


def holdings() -> Holdings:
    """Return this process's descriptors, number of threads, and shared mappings."""
    gc.collect()
    return descriptors(), len(os.listdir("/proc/self/task")), shared_mappings()


def held_beyond(before: Holdings, seconds: float = 0.0) -> list[str]:
    """Return what is held now and was not before; wait until nothing is, or time is up.

    Resources of earlier tests may go at any time, so a missing one does not count.
    /proc may list a thread for a moment after it was joined.
    """
    began = time.monotonic()
    while True:
        _, n_threads, mappings = holdings()
        new = [f"{fd}: {link}" for fd, link in new_descriptors(before[0]).items()]
        new += list((Counter(mappings) - Counter(before[2])).elements())
        new += ["a thread"] * (n_threads - before[1])
        most = max(seconds, JOINED_SECONDS) if set(new) == {"a thread"} else seconds
        if not new or time.monotonic() > began + most:
            return new
        time.sleep(0.02)


def leftovers(before: dict[int, str]) -> list[str]:
    """Return new descriptors of the kinds that Paceline opens.

    These are sockets, pidfds and shared memory.  A DataLoader opens pipes and files,
    and closes them at any time.
    """
    gc.collect()
    new = new_descriptors(before)
    kinds = ("socket:", "anon_inode:[pidfd]", "/memfd:")
    ours = {fd: link for fd, link in new.items() if link.startswith(kinds)}
    return [f"fd {fd}: {link}" for fd, link in ours.items()] + shared_mappings()


def children() -> set[str]:
    """Return this process's children, as numbers in words."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def is_asleep(pid: int) -> bool:
    """Tell whether a process's main thread waits, and does so for a while."""
    for _ in range(20):
        stat = Path(f"/proc/{pid}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] != "S":
            return False
        time.sleep(0.01)
    return True


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Wait up to `seconds` for processes to end; return those that still run."""
    until = time.monotonic() + seconds
    while running := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > until:
            return running
        time.sleep(0.05)
    return []
