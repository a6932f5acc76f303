"""Whether this thread runs a replica: wrappers inside one call their module plainly."""

from __future__ import annotations

import threading

_local = threading.local()


def is_inside_replica() -> bool:
    """Tell whether this thread runs a replica."""
    return getattr(_local, "depth", 0) > 0


class InsideReplica:
    """Mark this thread as one that runs a replica."""

    __slots__ = ()

    def __enter__(self) -> None:
        _local.depth = getattr(_local, "depth", 0) + 1

    def __exit__(self, *ignored: object) -> None:
        _local.depth -= 1
