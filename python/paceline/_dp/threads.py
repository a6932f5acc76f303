"""Tasks of replicas, threads for those on GPUs, and the exceptions that replicas raise.

::

    caller    post 1..n-1 | replica 0 | wait for 1..n-1
    thread k                replica k
"""

from __future__ import annotations

import contextvars
import copy
import queue
import threading
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline._compat import torch_core
from paceline._dp.thread_state import State

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


class Task:
    """One forward of one replica, run once."""

    def __init__(
        self, call: Callable[[], Any], replica: int, device: torch.device
    ) -> None:
        self._call: Callable[[], Any] | None = call
        self._replica = replica
        self._device = device
        self._caller = threading.get_ident()
        self._is_done = threading.Lock()
        self._is_done.acquire()
        self.output: Any = None
        self.error: BaseException | None = None

    def enter(self, state: State, context: contextvars.Context, share: int) -> None:
        """Make it run in another thread's state, with `share` cores."""
        assert self._call is not None
        self._call = partial(state.run, context, share, self._call)

    def run(self) -> None:
        """Run the call; keep its output or its error, and raise nothing."""
        call, self._call = self._call, None
        assert call is not None
        try:
            self.output = call()
        except BaseException as error:
            is_mine = threading.get_ident() == self._caller
            if is_mine and not isinstance(error, Exception):
                self.error = error  # Ctrl-C, an exit
            else:
                self.error = as_of_replica(error, self._replica, self._device)
        finally:
            del call
            self._is_done.release()

    def run_and_take(self) -> Any:
        """Run the call, and return what it returns, or raise what it raises."""
        self.run()
        return self.take()

    def wait(self) -> None:
        """Wait until it has run; an interrupted wait may be repeated."""
        with self._is_done:
            pass

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

    def run(self, tasks: list[Task]) -> None:
        """Run the first task here, the others in parallel; return when all are done."""
        self.grow(len(tasks) - 1)
        try:
            for inbox, task in zip(self._inboxes, tasks[1:], strict=False):
                inbox.put(task.run)
            tasks[0].run()
            for task in tasks[1:]:
                task.wait()
        except BaseException:  # Ctrl-C: leave no thread at work in the background
            self._drain()
            raise

    def _drain(self) -> None:
        """Wait until all threads are idle, even if signals arrive."""
        for inbox in self._inboxes:
            barrier = threading.Event()
            while not barrier.is_set():
                try:
                    inbox.put(barrier.set)
                    barrier.wait()
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
