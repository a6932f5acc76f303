"""Crews that outlive a wrapper, where somebody asks for it.

Starting a worker costs a second, the import of torch.  A program that makes many
wrappers one after the other (a test suite) keeps their workers::

    with keep_workers():
        ...
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline import _crew

_kept: list[_crew.Crew] | None = None


@contextmanager
def keep_workers() -> Iterator[None]:
    """Have workers of wrappers that are closed inside serve the next wrappers."""
    global _kept
    outer, _kept = _kept, []
    try:
        yield
    finally:
        crews, _kept = _kept, outer
        for crew in crews:
            crew.close()


def hire(n_workers: int) -> tuple[_crew.Crew, bool]:
    """Return a crew, and whether its workers are ready."""
    for crew in _kept or ():
        if len(crew.channels) == n_workers and len(crew.pids) == n_workers:
            _kept.remove(crew)  # type: ignore[union-attr]
            return crew, True
    return _crew.Crew(n_workers), False


def release(crew: _crew.Crew, pid: int, is_sound: bool) -> None:
    """Take a crew back from an engine of process `pid`; `is_sound`: it may go on."""
    is_idle = is_sound and not any(channel.is_busy for channel in crew.channels)
    if _kept is not None and is_idle and pid == os.getpid():
        _kept.append(crew)
    else:
        crew.close()
