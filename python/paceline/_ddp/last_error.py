"""The exception that ends this process, for the ranks that will wait for it.

A program's own is in ``sys.last_value``.  A process that multiprocessing started has
none there: before Python 3.12 its exception is the one being handled when finalizers
run; since then they may run later, so the exception is kept as it leaves the process's
``run``, where ``sys.monitoring`` tells of it.
"""

from __future__ import annotations

import sys
from multiprocessing import process
from types import CodeType
from typing import Any

from paceline import _native

_TOOLS = (3, 4)  # of sys.monitoring's numbers those that it has given no meaning
_NAME = "paceline"
_kept: list[Any] = [None, None]  # the code of `run`, and what it was left by


def keep_error_of_child() -> None:
    """Keep what this process's ``run`` raises, where multiprocessing started it."""
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    if monitoring is None or process.parent_process() is None:
        return
    names = {n: monitoring.get_tool(n) for n in _TOOLS}
    tool = next((n for n in _TOOLS if names[n] in (None, _NAME)), None)
    if tool is None:
        return  # peers then hear that this process has left, but not why
    if names[tool] is None:  # else it was forked from such a process
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
    is_found = frame.f_back is not None  # it is not, in another thread
    code: CodeType = frame.f_code if is_found else process.BaseProcess.run.__code__
    return code


def last_error() -> BaseException | None:
    """Return the exception that ends this process, if one does."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        error = sys.exc_info()[1] or _kept[1]
    if isinstance(error, SystemExit):
        error = error.__context__  # torch's spawn exits in its handler
    return error
