"""Room for the descriptors of a world among the files that a process may open.

A rank has one descriptor for each other rank of its host; the first rank of a host also
has some for each other host.  The soft limit (``ulimit -n``) is often 1,024, for old
programs that call ``select()``.  A process may raise it up to the hard limit.
"""

from __future__ import annotations

import os
import resource
import sys

_SPARE = 64
"""For other files opened meanwhile, if the hard limit leaves room."""


def make_room(n_more: int) -> None:
    """Raise the soft limit if `n_more` descriptors need that, and only so far."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + n_more
    except FileNotFoundError:  # there is no /proc
        return
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if needed > most:
        raise OSError(
            f"this process needs {needed} open files, and its limit is {hard}: "
            "raise it (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile of a "
            "container)"
        )
    wanted = min(needed + _SPARE, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
