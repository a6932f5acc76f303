"""How a process of the doctor's is started."""

from __future__ import annotations

import os
import sys
from multiprocessing import spawn


def command(module: str, function: str, *arguments: str) -> list[str]:
    """Return a command line that calls a function, with modules found as here."""
    executable = spawn.get_executable()
    if not executable:
        raise RuntimeError("no Python interpreter to start: sys.executable is not set")
    code = (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
        f"from {module} import {function} as f; f(*{list(arguments)!r})"
    )
    return [os.fsdecode(executable), "-c", code]
