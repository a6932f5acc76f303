"""Room for the descriptors of a world among the files that a process may open.

A rank has one of each other rank of its host, and the first rank of a host some of each
other host.  The soft limit (``ulimit -n``) is often 1,024, for the sake of old programs
that call ``select()``; a process may raise it up to the hard one.
"""

from __future__ import annotations

import os
import resource

_SPARE = 64
"""For what else is opened meanwhile."""


def make_room(n_more: int) -> None:
    """Raise the soft limit, where `n_more` descriptors need that, and no further.

    Raises
    ------
    OSError
        If the hard limit leaves no room for so many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + n_more + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise OSError(
            f"{needed} files are to be open in this process, and its limit is {hard}: "
            "raise it (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile of a "
            "container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
