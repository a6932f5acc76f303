"""The worlds of this process, which it leaves as it ends."""

from __future__ import annotations

import atexit
import os
import traceback
import weakref
from contextlib import suppress
from multiprocessing import util

from paceline import _native
from paceline._ddp import forks
from paceline._ddp.last_error import keep_error_of_child, last_error

_GOODBYE_PRIORITY = 100
"""Before multiprocessing's own finalizers, whose priority is at most 10."""

_live_worlds: weakref.WeakSet[_native.RankWorld] = weakref.WeakSet()
_owner_pid = 0


def add(world: _native.RankWorld) -> None:
    """Leave a world as this process ends, if it lives until then."""
    global _owner_pid
    forks.prepare()
    if _owner_pid != os.getpid():
        _owner_pid = os.getpid()
        atexit.unregister(_say_goodbye)
        atexit.register(_say_goodbye)
        # Before Python 3.13 processes that multiprocessing started do not call atexit.
        util.Finalize(None, _say_goodbye, exitpriority=_GOODBYE_PRIORITY)
        keep_error_of_child()
    _live_worlds.add(world)


def _say_goodbye() -> None:
    """Leave every world; peers that wait for this rank get the traceback, if any."""
    if os.getpid() != _owner_pid:
        return  # a forked child: the worlds belong to its parent
    error = last_error()
    text = "".join(traceback.format_exception(error)) if error is not None else None
    for world in list(_live_worlds):
        with suppress(RuntimeError, UnicodeEncodeError):
            if text is not None:
                world.note_exception(text)
            world.leave()
