"""The worlds of this process, which it leaves as it ends, and why it ends.

A program's uncaught exception is in ``sys.last_value``.  A process that multiprocessing
started has none there.  Before Python 3.12 its exception is the one being handled when
finalizers run.  Since then they may run later, so the exception is kept as it leaves
the process's ``run``, which ``sys.monitoring`` reports.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
import weakref
from contextlib import suppress
from multiprocessing import process, util
from types import CodeType
from typing import Any

from paceline import _native
from paceline._ddp import forks

_GOODBYE_PRIORITY = 100
"""Before multiprocessing's own finalizers, whose priority is at most 10."""

_live_worlds: weakref.WeakSet[_native.RankWorld] = weakref.WeakSet()
_owner_pid = 0

_TOOLS = (3, 4)  # tool numbers of sys.monitoring without a predefined meaning
_NAME = "paceline"
_kept: list[Any] = [None, None]  # the code of `run`, and the exception that left it


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
        _keep_error_of_child()
    _live_worlds.add(world)


def _say_goodbye() -> None:
    """Leave every world; peers that wait for this rank get the traceback, if any."""
    if os.getpid() != _owner_pid:
        return  # a forked child: the worlds belong to its parent
    error = _last_error()
    text = "".join(traceback.format_exception(error)) if error is not None else None
    for world in list(_live_worlds):
        with suppress(RuntimeError, UnicodeEncodeError):
            if text is not None:
                world.note_exception(text)
            world.leave()


def _keep_error_of_child() -> None:
    """If multiprocessing started this process, keep the exception of ``run``."""
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is None or process.parent_process() is None:
        return
    names = {n: monitoring.get_tool(n) for n in _TOOLS}
    tool = next((n for n in _TOOLS if names[n] in (None, _NAME)), None)
    if tool is None:
        return  # peers then learn that this process left, but not why
    if names[tool] is None:  # else a parent set it before the fork
        monitoring.use_tool_id(tool, _NAME)
    _kept[0] = _code_of_run()
    keep = _native.unwound_keeper(_kept)
    monitoring.register_callback(tool, monitoring.events.PY_UNWIND, keep)
    monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _code_of_run() -> CodeType:
    frame: Any = sys._getframe()
    bootstrap = process.BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
    while frame.f_back is not None and frame.f_back.f_code is not bootstrap:
        frame = frame.f_back
    is_found = frame.f_back is not None  # not found in another thread
    code: CodeType = frame.f_code if is_found else process.BaseProcess.run.__code__
    return code


def _last_error() -> BaseException | None:
    """Return the exception that ends this process, if one does."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        error = sys.exc_info()[1] or _kept[1]
    if isinstance(error, SystemExit):
        error = error.__context__  # torch's spawn exits in its exception handler
    return error
