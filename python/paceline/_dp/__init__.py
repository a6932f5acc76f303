"""DataParallel: replicas of one model in one program.

::

    data_parallel    the wrapper: torch's arguments, and what a subclass overrides
      engines          which engine runs the replicas, and why
        thread_engine    threads of this process
        process/engine   worker processes

Public names are in ``paceline`` itself.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DataParallel":  # where pickles of 0.1 look for it
        from paceline._dp.data_parallel import DataParallel

        return DataParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
