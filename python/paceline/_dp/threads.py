"""Tasks of replicas, their threads and waits, and the exceptions that they raise.

::

    caller    post 1..n-1 | replica 0 | wait for 1..n-1
    thread k                replica k

Replicas that run in order are watched.  If one waits for another thread for some time,
as in a synchronised BatchNorm, threads begin the others.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import logging
import math
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from paceline._compat import torch_core
from paceline._dp.thread_state import State

_local = threading.local()
_log = logging.getLogger("paceline")


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


class Task:
    """One forward of one replica, run once, by the first thread that asks for it."""

    def __init__(
        self, call: Callable[[], Any], replica: int, device: torch.device
    ) -> None:
        self._calls = [call]
        self._elsewhere: Callable[[Callable[[], Any]], Any] | None = None
        self.replica = replica
        self._device = device
        self._caller = threading.get_ident()
        self._is_done = threading.Lock()
        self._is_done.acquire()
        self.thread: int | None = None
        self.has_failed = self.is_left_behind = False
        self.output: Any = None
        self.error: BaseException | None = None

    def enter(self, state: State, context: contextvars.Context, share: int) -> None:
        """If another thread runs it, use this state, and `share` cores."""
        self._elsewhere = partial(state.run, context, share)

    def run(self) -> None:
        """Run the call; keep its output or its error, and raise nothing."""
        try:
            call = self._calls.pop()
        except IndexError:  # begun by another thread
            return
        self.thread = threading.get_ident()
        is_mine = self.thread == self._caller
        try:
            if is_mine or self._elsewhere is None:
                self.output = call()
            else:
                self.output = self._elsewhere(call)
        except BaseException as error:
            self.has_failed = True
            if is_mine and not isinstance(error, Exception):
                self.error = error  # Ctrl-C, an exit
            else:
                self.error = as_of_replica(error, self.replica, self._device)
        finally:
            del call
            self._is_done.release()

    @property
    def has_begun(self) -> bool:
        """Whether a thread runs it, or has run it."""
        return not self._calls

    def cancel(self) -> None:
        """Count as done if no thread has begun it."""
        with contextlib.suppress(IndexError):
            self._calls.pop()
            self._is_done.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has run, and tell so; an interrupted wait may be repeated."""
        if not self._is_done.acquire(timeout=timeout_s):
            return False
        self._is_done.release()
        return True

    def take(self) -> Any:
        """Return what the replica returned, or raise what it raised."""
        error, self.error = self.error, None
        if error is None:
            return self.output
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame


_Inbox = queue.SimpleQueue[Callable[[], Any] | None]


def _serve(inbox: _Inbox) -> None:
    """Run calls until None arrives; keep no reference to a call in between."""
    with InsideReplica():
        while (call := inbox.get()) is not None:
            call()
            del call


def _end(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


# ---- replicas that wait for one another ---------------------------------------------

PATIENCE_S = 2.0
"""How long a thread must wait for another one before this counts as a wait for it."""
_N_TIMES = 15
"""Any other call may last this many times as long before the log mentions it."""
_WAITS = (
    "replica %d of DataParallel waits for another thread, and the replicas after it "
    "have not begun: %s. For a BatchNorm over the whole batch use "
    "torch.nn.SyncBatchNorm over ranks, with paceline.DistributedDataParallel"
)
_GO_ON = "from now on replicas of this model run side by side"
_STAY = (
    "they must run in order under a mode or transform of torch, or if a class has a "
    "list of its layers, so that this call may never end"
)
_STOPPED = (
    "replica %d of DataParallel has been in one call for %d s: if it waits there for a "
    "replica that has not begun, it never ends; a wait by threading or queue would "
    "let that replica begin"
)
_STUCK = (
    "replicas %s of DataParallel wait for other threads and do not go on; these have "
    "failed: %s"
)
_WAITING = (threading.__name__, queue.__name__)


def _place_of_call(thread: int) -> Any:
    """Return where a thread is."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (id(frame), frame.f_lasti)


def _place_of_wait(thread: int) -> Any:
    """Return where a thread waits by ``threading`` or ``queue``; None if it does not.

    These are waits for another thread, except in a debugger (pydevd).
    """
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_globals.get("__name__") != threading.__name__:
        return None
    while frame is not None and frame.f_globals.get("__name__") in _WAITING:
        frame = frame.f_back
    if frame is None or "pydev" in str(frame.f_globals.get("__name__")):
        return None
    return id(frame), frame.f_lasti


class _Waits:
    """Where some threads wait, and since when."""

    def __init__(
        self, place_of: Callable[[int], Any] = _place_of_wait, n_times: int = 1
    ) -> None:
        self._place_of = place_of
        self._n_times = n_times
        self._places: list[Any] = []
        self._since = 0.0

    def have_lasted(self, tasks: Sequence[Task]) -> bool:
        """Tell, once for each wait, whether all tasks have waited for some time."""
        now, places = time.monotonic(), [self._place_of(t.thread or 0) for t in tasks]
        if places != self._places or None in places:
            self._places, self._since = places, now
        elif now - self._since >= PATIENCE_S * self._n_times:
            self._since = math.inf
            return True
        return False


class ReplicaWatch:
    """Watches replicas that run in order; starts all if one waits for another thread.

    Parameters
    ----------
    tasks : list of Task
        The replicas.
    start : callable or None
        Starts those that have not begun; None: only say that one waits.

    Attributes
    ----------
    has_started : bool
    """

    def __init__(
        self, tasks: list[Task], start: Callable[[Sequence[Task]], None] | None
    ) -> None:
        self._tasks = tasks
        self._start = start
        self._waits = _Waits()
        self._calls = _Waits(_place_of_call, _N_TIMES)
        self.has_started = False

    def __enter__(self) -> ReplicaWatch:
        _watched.add(self)
        if not (_watchers and _watchers[-1].is_alive()):  # the first, or after a fork
            thread = threading.Thread(target=_look, name="paceline-watch", daemon=True)
            _watchers[:] = [thread]
            thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        _watched.discard(self)
        self._tasks = []  # the watching thread may hold this object for a while

    def look(self) -> None:
        """Start the other replicas if the one at work has waited for some time."""
        at_work = [t for t in self._tasks if t.has_begun and not t.wait(0)]
        to_begin = [t for t in self._tasks if not t.has_begun]
        if not at_work:
            return
        replicas = [task.replica for task in at_work]
        if to_begin and self._calls.have_lasted(at_work):
            _log.warning(_STOPPED, replicas[0], PATIENCE_S * _N_TIMES)
        if not self._waits.have_lasted(at_work):
            return
        if self.has_started:
            failed = [t.replica for t in self._tasks if t.has_failed]
            _log.warning(_STUCK, replicas, failed)
        elif to_begin:
            _log.warning(_WAITS, replicas[0], _GO_ON if self._start else _STAY)
            if self._start:
                self.has_started = True
                self._start(to_begin)


_watched: set[ReplicaWatch] = set()
_watchers: list[threading.Thread] = []


def _look() -> None:
    while True:
        time.sleep(PATIENCE_S / 4)
        for watch in list(_watched):
            watch.look()
            del watch  # or it would be held during the sleep


# ---- threads ------------------------------------------------------------------------


class ThreadPool:
    """Threads that end with this object."""

    def __init__(self) -> None:
        self._inboxes: list[_Inbox] = []
        weakref.finalize(self, _end, self._inboxes)

    def grow(self, n_threads: int) -> None:
        """Start threads until there are `n_threads`."""
        while len(self._inboxes) < n_threads:
            inbox: _Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox,),
                name=f"paceline-replica-{len(self._inboxes) + 1}",
                daemon=True,
            )
            thread.start()
            self._inboxes.append(inbox)

    def start(self, tasks: Sequence[Task]) -> None:
        """Have a thread run each task that has not begun."""
        self.grow(len(tasks))
        for inbox, task in zip(self._inboxes, tasks, strict=False):
            inbox.put(task.run)

    def run(self, tasks: list[Task], *, is_apart: bool = False) -> None:
        """Run tasks in parallel; return when all are done.

        The first one runs here, unless it `is_apart`.
        """
        try:
            self.start(tasks if is_apart else tasks[1:])
            if not is_apart:
                tasks[0].run()
            self.wait(tasks)
        finally:
            self.drain(tasks)

    def wait(self, tasks: list[Task], *, is_over: bool = False) -> None:
        """Wait until tasks are done; leave those behind that wait for one that failed.

        Their threads may never end: other ones take their places.  If the call
        `is_over`, leave all behind that wait.
        """
        waits = _Waits()
        while left := [t for t in tasks if not (t.is_left_behind or t.wait(0))]:
            if left[0].wait(PATIENCE_S) or not waits.have_lasted(left):
                continue
            failed = [task.replica for task in tasks if task.has_failed]
            _log.warning(_STUCK, [task.replica for task in left], failed)
            if failed or is_over:
                for task in left:
                    task.is_left_behind = True
                _end(self._inboxes)
                self._inboxes.clear()
                return

    def drain(self, tasks: list[Task]) -> None:
        """Leave no thread at work on tasks, even if signals arrive (Ctrl-C)."""
        for task in tasks:
            task.cancel()
        while True:
            try:
                return self.wait(tasks, is_over=True)
            except KeyboardInterrupt:
                continue


# ---- exceptions --------------------------------------------------------------------


def as_of_replica(error: BaseException, replica: int, device: Any) -> BaseException:
    """Return the exception to raise in the caller for an error in a replica.

    It has the type and attributes of `error`, even if its constructor takes other
    arguments; its message is torch's, with the traceback of the replica.  An error that
    is not an ``Exception`` (``SystemExit``), or cannot be copied, becomes a
    ``RuntimeError``.
    """
    text = "".join(traceback.format_exception(error))
    name = type(error).__name__
    message = f"Caught {name} in replica {replica} on device {device}.\nOriginal {text}"
    if not isinstance(error, Exception):
        return RuntimeError(message)
    try:
        return _with_message(_renewed(error), message)
    except Exception:  # a type that allows neither a copy nor a new message
        return RuntimeError(message)


def _with_message(error: Exception, message: str) -> Exception:
    """Set an exception's message; if its type hides it, set it as the cause."""
    if isinstance(error, KeyError):
        error.args = (torch_core.key_error_message(message),)
    else:
        error.args = (message,)
    if isinstance(error, ImportError):
        error.msg = message
    if not _shows(error, message):
        error.__cause__ = RuntimeError(message)
    return error


def _renewed(error: Exception) -> Exception:
    """Return a copy without the traceback, which would keep the replica's frames."""
    kind = type(error)
    try:
        renewed = copy.copy(error)
        if type(renewed) is kind and renewed is not error:
            return renewed
    except Exception:  # the constructor needs other arguments
        pass
    renewed = kind.__new__(kind, *error.args)
    renewed.__dict__.update(error.__dict__)
    return renewed


def _shows(error: BaseException, message: str) -> bool:
    try:
        return message in str(error)
    except Exception:
        return False
