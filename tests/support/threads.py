"""Run a function in several threads at once."""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Callable
from typing import Any

IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
"""Whether this Python can do without a GIL; it may have one all the same."""


def in_threads(function: Callable[[int], Any], n: int = 4) -> list[Any]:
    """Run `function(i)` in n threads that begin together; return what they return.

    If one raises, raise its error after all have ended.
    """
    results: list[Any] = [None] * n
    errors: list[BaseException] = []
    barrier = threading.Barrier(n)

    def run(i: int) -> None:
        try:
            barrier.wait()
            results[i] = function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
