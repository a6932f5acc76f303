"""What a process holds, as /proc shows it: descriptors, mappings, children."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path


def descriptors() -> dict[int, str]:
    """Return this process's open descriptors and what each one is."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the listing's own
            continue
    return found


def shared_mappings() -> list[str]:
    """Return the lines of this process's memory map that show Paceline's memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "memfd:paceline" in line]


def leftovers(before: dict[int, str]) -> list[str]:
    """Return what of Paceline's kind this process holds and did not `before`.

    That is sockets, pidfds and shared memory; a DataLoader has pipes and files of its
    own, which it closes when it likes.
    """
    gc.collect()
    new = {fd: link for fd, link in descriptors().items() if before.get(fd) != link}
    kinds = ("socket:", "anon_inode:[pidfd]", "/memfd:")
    ours = {fd: link for fd, link in new.items() if link.startswith(kinds)}
    return [f"fd {fd}: {link}" for fd, link in ours.items()] + shared_mappings()


def is_running(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    """Return the processes that still run after `seconds`; at once if none does."""
    until = time.monotonic() + seconds
    while running := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > until:
            return running
        time.sleep(0.05)
    return []
