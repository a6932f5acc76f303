"""What each replica is to do, and threads of those on GPUs.

::

    caller    post 1..n-1 | replica 0 | wait for 1..n-1
    thread k                replica k
"""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paceline._dp.errors import as_of_replica
from paceline._dp.nesting import InsideReplica
from paceline._dp.thread_state import State


class Task:
    """One forward of one replica, run once."""

    __slots__ = (
        "_call",
        "_caller",
        "_device",
        "_is_done",
        "_replica",
        "error",
        "output",
    )

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
        """Have it run in the state of another thread, on so many cores."""
        assert self._call is not None
        self._call = partial(state.run, context, share, self._call)

    def run(self) -> None:
        """Run the call; nothing is raised."""
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
        """Wait until it has run; may be interrupted, and waited for again."""
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
            del error  # its traceback leads to this frame


_Inbox = queue.SimpleQueue[Callable[[], Any] | None]


def _serve(inbox: _Inbox) -> None:
    """Run what comes until None does; the thread holds on to nothing in between."""
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
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._inboxes)

    def grow(self, n_threads: int) -> None:
        """Have at least this many."""
        while len(self._threads) < n_threads:
            inbox: _Inbox = queue.SimpleQueue()
            thread = threading.Thread(
                target=_serve,
                args=(inbox,),
                name=f"paceline-replica-{len(self._threads) + 1}",
                daemon=True,
            )
            thread.start()
            self._inboxes.append(inbox)
            self._threads.append(thread)

    def run(self, tasks: list[Task]) -> None:
        """Run the first task here, the others side by side; return when all ran."""
        self.grow(len(tasks) - 1)
        try:
            for inbox, task in zip(self._inboxes, tasks[1:], strict=False):
                inbox.put(task.run)
            tasks[0].run()
            for task in tasks[1:]:
                task.wait()
        except BaseException:  # Ctrl-C: nobody computes on behind the caller's back
            self._drain()
            raise

    def _drain(self) -> None:
        """Wait until no thread has anything to do, whatever signals come."""
        for inbox in self._inboxes:
            barrier = threading.Event()
            while not barrier.is_set():
                try:
                    inbox.put(barrier.set)
                    barrier.wait()
                except KeyboardInterrupt:
                    continue
