"""Room for the descriptors of a world among the files that a process may open.

A rank has one of each other rank of its host, and the first rank of a host some of each
other host.  The soft limit (``ulimit -n``) is often 1,024, for the sake of old programs
that call ``select()``; a process may raise it up to the hard one.
"""

from __future__ import annotations

import os
import resource
import sys

_SPARE = 64
"""For what else is opened meanwhile, where the hard limit leaves it."""


def make_room(n_more: int) -> None:
    """Raise the soft limit, where `n_more` descriptors need that, and no further.

    Raises
    ------
    OSError
        If the hard limit leaves no room for so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        needed = len(os.listdir("/proc/self/fd")) + n_more
    except FileNotFoundError:  # there is no /proc
        return
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if needed > most:
        raise OSError(
            f"{needed} files are to be open in this process, and its limit is {hard}: "
            "raise it (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile of a "
            "container)"
        )
    wanted = min(needed + _SPARE, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
