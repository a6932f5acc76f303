"""Worker processes that outlive a wrapper, for tests that make many wrappers.

Starting a worker costs a second, the import of torch::

    with keep_workers():
        ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline._workers import group

_kept: list[KeptWorkers] | None = None


class KeptWorkers(group.WorkerGroup):
    """Workers that serve the next wrapper of their number, where they may go on."""

    def close(self, *args: Any) -> None:
        is_well = self.is_sound and self.is_ready and self._processes.pid == os.getpid()
        is_idle = not any(channel.is_busy for channel in self.channels)
        if _kept is not None and is_well and is_idle:
            _kept.append(self)
        else:
            super().close(*args)


def _take(n_workers: int, *args: Any) -> group.WorkerGroup:
    for workers in _kept or ():
        if len(workers.channels) == n_workers == len(workers.pids):
            _kept.remove(workers)
            return workers
    return KeptWorkers(n_workers, *args)


@contextmanager
def keep_workers() -> Iterator[None]:
    """Have workers of wrappers that are closed inside serve the next wrappers."""
    global _kept
    outer, _kept = _kept, []
    own, group.WorkerGroup = group.WorkerGroup, _take
    try:
        yield
    finally:
        group.WorkerGroup = own
        groups, _kept = _kept, None
        for workers in groups:
            workers.close()
        _kept = outer
