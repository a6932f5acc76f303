"""Tasks of replicas, their threads and waits, and the exceptions that they raise.

::

    caller    post 1..n-1 | replica 0 | wait for 1..n-1
    thread k                replica k

Replicas that run in order are watched.  If one waits for another thread for some time,
as in a synchronised BatchNorm, threads begin the others.
"""

from __future__ import annotations

import contextvars
import copy
import logging
import math
import os
import queue
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from paceline._compat import openmp, torch_core, torch_graph
from paceline._dp.thread_state import State

OF_ONE_THREAD = (threading.local, type(threading.Lock()), type(threading.RLock()))
"""Types of objects that another thread cannot use: it has other values, or waits."""

has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
"""Tell whether Python runs one thread at a time, which may begin at any time."""

_IS_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

_Result = TypeVar("_Result")

_local = threading.local()
_log = logging.getLogger("paceline")


def is_inside_replica() -> bool:
    """Tell whether this thread runs a replica."""
    return getattr(_local, "is_inside", False)


def run_inside(call: Callable[[], _Result]) -> _Result:
    """Run a call in this thread as one that runs a replica."""
    before = is_inside_replica()
    try:
        _local.is_inside = True
        return call()
    finally:  # without a call, before which Ctrl-C could come
        _local.is_inside = before


class Task:
    """One forward of one replica, run once, by the first thread that asks for it."""

    def __init__(
        self, call: Callable[[], Any], replica: int, device: torch.device
    ) -> None:
        self._call: Callable[[], Any] | None = call
        # The thread that has begun it; 0 if cancelled. One step: a signal may come.
        self._claim: dict[str, int] = {}
        self._elsewhere: Callable[[int, Callable[[], Any]], Any] | None = None
        self.n_cores = 1
        self.replica = replica
        self._device = device
        self._caller = threading.get_ident()
        self._ending = threading.Lock()
        self._ending.acquire()
        self.has_ended = self.is_left_behind = False
        self.output: Any = None
        self.error: BaseException | None = None

    def enter(self, state: State, context: contextvars.Context, n_cores: int) -> None:
        """If another thread runs it, use this state, and `n_cores` cores."""
        self._elsewhere, self.n_cores = partial(state.run, context), n_cores

    def run(self) -> None:
        """Run the call; keep its output or its error, and raise nothing."""
        mine = threading.get_ident()
        if self._claim.setdefault("thread", mine) != mine:
            return
        try:
            call, self._call = self._call, None
            assert call is not None, "a task runs once"
            if mine == self._caller or self._elsewhere is None:
                self.output = call()
            else:
                self.output = self._elsewhere(self.n_cores, call)
        except BaseException as error:
            if mine == self._caller and not isinstance(error, Exception):
                self.error = error  # Ctrl-C, an exit
            else:
                self.error = as_of_replica(error, self.replica, self._device)
        finally:
            call = None
            self.has_ended = True
            self._ending.release()

    @property
    def thread(self) -> int | None:
        """The thread that runs it, or has run it; 0 if it is cancelled."""
        return self._claim.get("thread")

    def cancel(self) -> None:
        """Count as ended if no thread has begun it."""
        if self._claim.setdefault("thread", 0) == 0:
            self.has_ended = True

    def wait(self) -> None:
        """Wait until it has ended or is left behind.

        A signal may have broken it off on this thread: there is nothing to wait for.
        """
        mine = threading.get_ident()
        while not (self.has_ended or self.is_left_behind or self.thread == mine):
            self._ending.acquire(timeout=PATIENCE_S / 4)

    def take(self) -> Any:
        """Return what the replica returned, or raise what it raised, once it has."""
        self.wait()
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
    while (call := inbox.get()) is not None:
        run_inside(call)
        del call


def _end(inboxes: list[_Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)


# ---- replicas that wait for one another ---------------------------------------------

PATIENCE_S = 2.0
"""How long a thread must wait for another one before this counts as a wait for it."""
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
_STUCK = (
    "replicas %s of DataParallel wait for other threads and do not go on; errors of "
    "other replicas: %s"
)
_WAITING = (threading.__name__, queue.__name__)


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


class Watch:
    """Watches the replicas of one call, for those that wait for another thread.

    If the only one that has begun waits, the others begin.  If all wait, and one has
    failed, they are left behind: their threads may never end, and other ones take their
    places.  Only the caller's own thread cannot leave a wait.

    Parameters
    ----------
    tasks : list of Task
        The replicas.
    pool : ThreadPool
        Runs those that begin beside others.
    can_start : bool
        Whether others may begin; else a log only says that one waits.

    Attributes
    ----------
    has_started : bool
        Whether replicas run side by side.
    """

    def __init__(
        self, tasks: list[Task], pool: ThreadPool, *, can_start: bool = True
    ) -> None:
        self._tasks = tasks
        self._pool = pool
        self._can_start = can_start
        self._places: list[Any] = []
        self._since = 0.0
        self._is_over = False
        self.has_started = False

    def over(self, call: Callable[[], _Result]) -> _Result:
        """Run a call under this watch; leave no thread at work on tasks.

        Not a context manager: Ctrl-C may come before the first line of ``__exit__``.
        """
        interrupt: BaseException | None = None
        try:
            self._begin()
            return call()
        finally:
            self._is_over, self._places = True, []
            is_at_work = True
            while is_at_work:
                try:
                    while is_at_work:
                        try:
                            self._end()
                            is_at_work = False
                        except BaseException as error:  # of a signal
                            interrupt = error
                except BaseException as error:  # of one that came with it
                    interrupt = error
            if interrupt is not None:
                try:
                    raise interrupt
                finally:
                    del interrupt  # its traceback refers to this frame

    def _begin(self) -> None:
        _watched.add(self)
        if not (_watchers and _watchers[-1].is_alive()):  # the first, or after a fork
            thread = threading.Thread(target=_watch, name="paceline-watch", daemon=True)
            _watchers[:] = [thread]
            thread.start()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            task.wait()
        if any(task.is_left_behind for task in self._tasks):
            self._pool.renew()
        _watched.discard(self)
        self._tasks = []  # the watching thread may hold this object for a while

    def start(self, tasks: Sequence[Task]) -> None:
        """Have threads run tasks that have not begun."""
        self.has_started, self._places = True, []
        self._pool.start(tasks)

    def look(self) -> None:
        """Start replicas, or leave them behind, if all at work have waited."""
        at_work = [t for t in self._tasks if t.thread and not t.has_ended]
        to_begin = [t for t in self._tasks if t.thread is None]
        if not at_work or not self._have_waited(at_work):
            return
        replicas = [task.replica for task in at_work]
        if self.has_started:
            errors = [t.error for t in self._tasks if t.error is not None]
            for task in at_work if errors or self._is_over else ():
                task.is_left_behind = True
            texts = ["".join(traceback.format_exception(error)) for error in errors]
            _log.warning(_STUCK, replicas, "\n".join(texts) or "none")
        elif to_begin:
            _log.warning(_WAITS, replicas[0], _GO_ON if self._can_start else _STAY)
            if self._can_start:
                self.start(to_begin)

    def _have_waited(self, tasks: Sequence[Task]) -> bool:
        """Tell, once for each wait, whether all tasks have waited for some time."""
        now, places = time.monotonic(), [_place_of_wait(t.thread or 0) for t in tasks]
        if places != self._places or None in places:
            self._places, self._since = places, now
        elif now - self._since >= PATIENCE_S:
            self._since = math.inf
            return True
        return False


_watched: set[Watch] = set()
_watchers: list[threading.Thread] = []


def _look() -> None:
    for watch in list(_watched):
        try:
            watch.look()
        except Exception:  # of a logging handler
            traceback.print_exc()


def _watch() -> None:
    while True:
        time.sleep(PATIENCE_S / 4)
        if not _IS_FREE_THREADED:
            _look()
        elif _watched:  # frames that a thread has seen may stay until that thread ends
            with suppress(RuntimeError):  # Python ends
                thread = threading.Thread(target=_look, daemon=True)
                thread.start()
                thread.join()


# ---- threads ------------------------------------------------------------------------


def share_cores(tasks: Sequence[Task], call: Callable[[], _Result]) -> _Result:
    """Run a call; give each task its share of the cores that torch uses here."""
    n_cores = torch.get_num_threads()
    share = max(1, n_cores // len(tasks))
    for task in tasks:
        task.n_cores = share
    openmp.end_workers()
    try:
        torch.set_num_threads(share)
        return call()
    finally:
        torch.set_num_threads(n_cores)


class ThreadPool:
    """Threads that end with this object."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._inboxes: list[_Inbox] = []
        weakref.finalize(self, _end, self._inboxes)

    def start(self, tasks: Sequence[Task]) -> None:
        """Have a thread run each task that has not begun."""
        torch_graph.renew_engine()
        if self._process != os.getpid():  # a forked process has none of the threads
            self._process = os.getpid()
            self._inboxes.clear()
        while len(self._inboxes) < len(tasks):
            inbox: _Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox,),
                name=f"paceline-replica-{len(self._inboxes) + 1}",
                daemon=True,
            )
            try:
                thread.start()
                self._inboxes.append(inbox)
            except BaseException:
                if inbox not in self._inboxes:
                    inbox.put(None)  # Ctrl-C: it may have started
                raise
        for inbox, task in zip(self._inboxes, tasks, strict=False):
            inbox.put(task.run)

    def renew(self) -> None:
        """Let the threads end after their work; others take their places."""
        _end(self._inboxes)
        self._inboxes.clear()


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
