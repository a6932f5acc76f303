"""The threads of OpenMP, which torch's operators on the CPU use."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

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
    """Return OpenMP's function for that, if the library that torch uses has it.

    A process may have several: the loader looks among those that torch depends on.
    """
    library = ctypes.CDLL(torch._C.__file__)
    try:
        host = library.omp_get_initial_device()
        return functools.partial(library.omp_pause_resource, _PAUSE_SOFT, host)
    except AttributeError:
        return None
