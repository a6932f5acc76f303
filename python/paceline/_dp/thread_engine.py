"""The thread engine: replicas as threads of one process, in the ordinary graph.

Replica 0 is the user's module on the calling thread; each other one is a shell round
the same parameters (``replicate.py``) on a thread that lives as long as the engine.
Autograd sees one graph, so all that works on a plain module works here.  Where replicas
side by side would not compute what the plain module does, they run one after the other,
in order, on the calling thread: where something of torch binds to that thread
(``thread_state.py``), and where the forward draws random numbers, of which torch has
one generator for all threads (``rng.py``).  The first forward of each combination of
training flags finds that out, and which parameters a forward writes, of which replicas
have copies then (``effects.py``); it runs in order.

    caller    post 1..n-1 | replica 0 | wait for 1..n-1
    thread k                replica k
"""

from __future__ import annotations

import contextvars
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from paceline._compat import torch_graph
from paceline._dp.effects import Forward
from paceline._errors import as_of_replica
from paceline._replicas.generators import has_generator
from paceline._replicas.nesting import InsideReplica, is_inside_replica
from paceline._replicas.replicate import check_norms, parts_of
from paceline._replicas.thread_state import State, binds_to_thread

if TYPE_CHECKING:
    from paceline import _native
    from paceline._replicas.call import ReplicaCall

# ---- threads ------------------------------------------------------------------------


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
            is_interrupt = isinstance(error, KeyboardInterrupt) and (
                threading.get_ident() == self._caller
            )
            is_exit = self._replica == 0 and not isinstance(error, Exception)
            if is_interrupt or is_exit:
                self.error = error
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
    """Threads that live until they are closed, or nobody holds this object."""

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

    def close(self) -> None:
        """End the threads and wait for their end; may be called again."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads.clear()


# ---- the engine ---------------------------------------------------------------------


class ThreadEngine:
    """Runs the replicas of a :class:`paceline.DataParallel` as threads."""

    name = "thread"
    n_replicas = 0
    lock: AbstractContextManager[Any] = nullcontext()

    def __init__(self) -> None:
        self._process, self._is_forked = os.getpid(), False
        self._lock = threading.Lock()
        self._threads = ThreadPool()

    def run(self, call: ReplicaCall, scattered: _native.Scattered) -> list[Any]:
        """Return the outputs of the replicas, in order."""
        parts = [scattered.leaves(k) for k in range(len(scattered.sizes))]
        if torch.is_grad_enabled():
            separate = _copied if torch_graph.is_transformed() else _with_own_version
            for part in parts[1:]:
                part[:] = map(separate, part, parts[0])
        chunks = [scattered.tree.unflatten(part) for part in parts]
        return self.run_lists(
            call, [args for args, _ in chunks], [kwargs for _, kwargs in chunks]
        )

    def run_lists(
        self, call: ReplicaCall, inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> list[Any]:
        """Return the outputs of the replicas, each given its arguments."""
        parts = parts_of(call.module)
        check_devices(parts, call.devices[0])
        check_norms(parts)
        forward = Forward(parts)
        n_replicas = len(inputs)
        if call.replicate is not None:
            replicas = call.replicate(call.module, call.devices[:n_replicas])
        else:
            replicas = forward.replicas(n_replicas)
        if call.parallel_apply is not None:
            return call.parallel_apply(replicas, inputs, kwargs)
        return self.apply(forward, replicas, inputs, kwargs, call.devices)

    def apply(
        self,
        forward: Forward,
        replicas: Sequence[Module],
        inputs: Sequence[Any],
        kwargs: Sequence[dict[str, Any]],
        devices: Sequence[torch.device],
    ) -> list[Any]:
        """Return what each replica returns; the error of the lowest is raised."""
        calls = [
            partial(replica, *(args if isinstance(args, (list, tuple)) else (args,)))
            for replica, args in zip(replicas, inputs, strict=True)
        ]
        tasks = [
            Task(partial(call, **(named or {})), k, devices[k])
            for k, (call, named) in enumerate(zip(calls, kwargs, strict=True))
        ]
        is_nested = is_inside_replica()
        with InsideReplica():
            if is_nested:
                return [task.run_and_take() for task in tasks]
            outputs = self._run(forward, tasks, [*inputs[:1], *kwargs[:1]])
        forward.check_kept()
        return outputs

    def _run(
        self, forward: Forward, tasks: list[Task], arguments: Sequence[Any]
    ) -> list[Any]:
        record = forward.record
        self._renew_if_forked()
        is_forked = self._is_forked  # torch's own threads stay behind
        in_order = record is None or record.uses_rng or is_forked or binds_to_thread()
        if in_order or has_generator(*arguments):
            return forward.run_in_order([task.run_and_take for task in tasks])
        with self._lock:
            return self._run_side_by_side(tasks, forward)

    def _renew_if_forked(self) -> None:
        """Leave threads, and a lock that one may hold, to the parent's process."""
        if self._process != os.getpid():
            self._process, self._is_forked = os.getpid(), True
            self._lock, self._threads = threading.Lock(), ThreadPool()

    def _run_side_by_side(self, tasks: list[Task], forward: Forward) -> list[Any]:
        """Run each task on a thread, and on its share of the cores."""
        n_own = torch.get_num_threads()
        share = max(1, n_own // len(tasks))
        try:
            torch.set_num_threads(share)
            state = State()
            for task in tasks[1:]:
                task.enter(state, contextvars.copy_context(), share)
            with forward.watched():
                self._threads.run(tasks)
        finally:
            torch.set_num_threads(n_own)
        return [task.take() for task in tasks]

    def beside(self) -> AbstractContextManager[Any]:
        """Have nothing to note: threads see all that a forward leaves."""
        return nullcontext()

    def close(self) -> None:
        """End the threads; a later run starts them anew."""
        self._renew_if_forked()
        with self._lock:
            threads, self._threads = self._threads, ThreadPool()
        threads.close()


def _with_own_version(leaf: Any, of_replica_0: Any) -> Any:
    """Return an input of a replica that other replicas may change theirs beside.

    All parts of a batch are views of it, and share the count by which autograd sees
    that a tensor which it has saved was changed in place.
    """
    if type(leaf) is not torch.Tensor or leaf is of_replica_0 or leaf.is_inference():
        return leaf
    return leaf.clone() if leaf.requires_grad else leaf.data


def _copied(leaf: Any, of_replica_0: Any) -> Any:
    """Return the same as `_with_own_version`, with what a transform has added to it."""
    if not isinstance(leaf, torch.Tensor) or leaf is of_replica_0:
        return leaf
    return leaf.clone()


def check_devices(parts: list[Module], device: torch.device) -> None:
    """Raise torch's error where a parameter or buffer is on another device."""
    for part in parts:
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and not tensor.is_cpu:
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{device} (device_ids[0]) but found one of them on device: "
                    f"{tensor.device}"
                )
