"""The threads of OpenMP, which torch's operators on the CPU use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

_PAUSE_SOFT = 1


def end_workers() -> None:
    """End the threads that work for this one; its next operator makes new ones.

    After each operator they spin for milliseconds, which takes cores from others.
    """
    pause = _pause()
    if pause is not None:
        pause()


@functools.cache
def _pause() -> Callable[[], object] | None:
    """Return OpenMP's function for that, if the library that torch uses has it."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    for path in sorted({line.split(maxsplit=5)[5] for line in lines if "omp" in line}):
        try:
            library = ctypes.CDLL(path)
            host = library.omp_get_initial_device()
            return functools.partial(library.omp_pause_resource, _PAUSE_SOFT, host)
        except (OSError, AttributeError):
            continue
    return None
