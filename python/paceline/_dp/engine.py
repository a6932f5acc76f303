"""One forward in replicas, each with copies of the model on its device.

::

    caller    scatter | send the model | replica 0 | wait for 1..n-1 | gather
    thread k                             replica k          (on GPUs)

    caller    scatter | send the model | replica 0 | 1 | ... | n-1 | gather

On GPUs replicas run in parallel.  Threads only enqueue; none waits for a device.  They
use the caller's current stream on each device, and the caller's state in torch
(``thread_state.py``).

On the CPU they run in order on the caller's thread: torch's own threads already use
every core, and programs need not be thread-safe.  Only replicas that wait for one
another run side by side there, too (``threads.py``).  Without a GIL they run in
parallel, as on GPUs, and share torch's threads.  A backward on the CPU has one thread,
the caller's.

Each device has its own generator of random numbers.  If a forward draws from a
generator that replicas share (the CPU's, Python's, NumPy's, or that of a device with
several replicas), its replicas run in order, so that runs can be repeated.  The first
call with each combination of training flags also runs in order, to find this out, and
so does each call until one in which at most one replica draws: then nothing depends on
the order.  Other threads may draw, too, and nothing tells whose numbers these were.
A forward that runs backward passes, or whose parts are in a list of their class, always
runs in order.

On GPUs, hooks on saved tensors, and so a checkpoint around the wrapper, apply to
replica 0 alone.  A backward has a thread for each device.  These threads would call the
hooks in parallel, and repeat a checkpoint's forward several times at once, on other
streams and with other random numbers: torch keeps the random state of one device only.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch.nn import Module

from paceline import _gpu, _native
from paceline._compat import torch_modes
from paceline._compat.torch_core import tensors_with_graph
from paceline._dp import originals, rng, threads, transfers
from paceline._dp.group import HOST, Group
from paceline._dp.parameters import ModelCopies
from paceline._dp.replicate import Entries, Trained, parts_of
from paceline._dp.thread_state import State, sees_operations
from paceline._dp.threads import Task, Watch

_Result = TypeVar("_Result")

_log = logging.getLogger("paceline")

_DRAWN = (
    "random numbers were drawn from generators that replicas share during a forward of "
    "DataParallel: its replicas run one after the other until a forward draws none, so "
    "that runs can be repeated. If another thread draws them, give that thread its own "
    "generator (torch.Generator, random.Random, numpy.random.default_rng)"
)


class _Kept:
    """What a call uses, kept for the next one."""

    def __init__(self) -> None:
        self.group: Group | None = None
        self.replicated: ModelCopies | None = None
        self.threads = threads.ThreadPool()


class Engine:
    """Runs the replicas of a :class:`paceline.DataParallel`.

    Parameters
    ----------
    device_ids : sequence
        The number of each replica's GPU; for the CPU, anything.
    is_cpu : bool
        Replicas are on the CPU.
    """

    def __init__(self, device_ids: Sequence[Any], *, is_cpu: bool) -> None:
        self.device_ids = list(device_ids)
        self.indices = [0] * len(device_ids) if is_cpu else self.device_ids
        self.is_cpu = is_cpu
        self._machine: Any = HOST if is_cpu else _gpu.machine
        self._process = os.getpid()
        self._first = _Kept()
        self._free: queue.SimpleQueue[_Kept] = queue.SimpleQueue()  # on GPUs
        self._free.put(self._first)
        self._here: Any = threading.local()
        self._draws: dict[bytes, bool | None] = {}  # None: find out
        self._waiting: set[bytes] = set()
        self._drawn_module: Module | None = None
        self._has_warned = False
        self._running: set[object] = set()
        self._last_begun: object = None

    def _check_process(self) -> None:
        if not self.is_cpu and self._process != os.getpid():
            raise RuntimeError(
                "a DataParallel on GPUs cannot be called in a forked process: start "
                "processes by spawn, and create the wrapper there"
            )

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Run a call with what it uses; raise in a forked process with GPUs.

        A forward may wait for a call in another thread.  So on the CPU each thread has
        its own set.  On GPUs, where a set holds copies of the model, a call makes
        another one only if it has waited for some time.
        """
        self._check_process()
        is_recorded = torch.is_grad_enabled()
        try:
            # A subclass's gather() may call the wrapper.
            if not self.is_cpu and not hasattr(self._here, "kept"):
                return self._run_reserved(call)
            return call()
        except BaseException as error:
            if not isinstance(error, Exception):  # Ctrl-C may leave a no_grad() on
                torch.set_grad_enabled(is_recorded)
            raise

    def _run_reserved(self, call: Callable[[], _Result]) -> _Result:
        try:
            self._here.kept = self._reserved()
            return call()
        finally:  # Ctrl-C within these lines loses the set: another one will be made
            kept = vars(self._here).pop("kept", None)
            if kept is not None:
                self._free.put(kept)

    def _reserved(self) -> _Kept:
        try:
            return self._free.get(timeout=threads.PATIENCE_S)
        except queue.Empty:
            return _Kept()

    @property
    def _kept(self) -> _Kept:
        kept: _Kept | None = getattr(self._here, "kept", None)
        if kept is None and self.is_cpu:
            kept = self._here.kept = _Kept()
        return kept or self._first

    @property
    def group(self) -> Group:
        """The devices, opened on first use."""
        self._check_process()
        kept = self._kept
        if kept.group is None:
            kept.group = Group(self.indices, self._machine)
        return kept.group

    @property
    def _replicated(self) -> ModelCopies | None:
        return self._kept.replicated

    def forget_model(self) -> None:
        """Drop all that holds the model, before a further call with the same one."""
        self._drawn_module = self._kept.replicated = None

    # ---- a forward ------------------------------------------------------------------

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], n: int, dim: int
    ) -> tuple[list[Any], tuple[int, ...]]:
        """Return each replica's arguments, on its device, and its number of rows."""
        self._refuse_capture()
        streams, is_recorded = self.group.streams(), torch.is_grad_enabled()
        # The forward may turn gradients on: inputs that require some have a graph.
        with torch_modes.grad_mode(not torch.is_inference_mode_enabled()):
            tree, sizes, parts = _native.scatter(inputs, kwargs, n, dim)
            placed = [
                transfers.to_member(streams, tree, parts, is_recorded, k)
                for k in range(len(parts))
            ]
        return placed, sizes

    def replicas(self, module: Module, n_replicas: int) -> list[Module]:
        """Return the module, and replicas of it on their devices."""
        self._refuse_capture()
        parts = parts_of(module)
        entries = Entries.of(parts)
        self._check_devices(entries)
        replicated = self._replicated
        if replicated is None:
            replicated = self._kept.replicated = ModelCopies(self.group)
        return replicated.replicas(parts, entries, n_replicas, self.group.streams())

    def apply(
        self,
        module: Module,
        replicas: Sequence[Module],
        inputs: Sequence[Any],
        kwargs: Sequence[Any],
    ) -> list[Any]:
        """Return each replica's output; if some fail, raise the error of the first."""
        self._refuse_capture()
        parts, group = parts_of(module), self.group
        if len(replicas) > len(group):
            raise ValueError(
                f"parallel_apply() got {len(replicas)} replicas, but the wrapper has "
                f"{len(group)} devices: give at most one replica per device"
            )
        if len(replicas) == 1:
            self._check_devices(Entries.of(parts))
        streams, state, n_cores = group.streams(), State(), torch.get_num_threads()
        tasks: list[Task] = []
        for k, (replica, args, named) in enumerate(
            zip(replicas, inputs, kwargs, strict=True)
        ):
            args = args if isinstance(args, (list, tuple)) else (args,)
            call = partial(replica, *args, **(named or {}))
            where = group.indices[k], streams.handles[k]
            run = partial(self._run_on, *where, call)
            tasks.append(Task(run, k, group.devices[k]))
            if len(replicas) > 1:
                tasks[k].enter(state, contextvars.copy_context(), n_cores)
        outputs: list[Any] = []
        this = object()
        try:
            self._running.add(this)
            self._last_begun = this  # before the next line: threads may switch
            alone = this if len(self._running) == 1 else None
            if len(tasks) == 1:
                threads.run_inside(tasks[0].run)
                return [tasks[0].take()]
            trained = Trained(replicas)
            arguments = [*inputs[:1], *kwargs[:1]]
            outputs = threads.run_inside(
                partial(self._run, parts, replicas, tasks, arguments, alone)
            )
            trained.check(outputs)
            return outputs
        finally:
            self._running.discard(this)
            if self._replicated is not None:
                self._replicated.finish(streams, outputs)
            if not torch.is_grad_enabled():
                # The cache would keep casts of the replicas' parameters, which are new
                # ones in each forward, until the outermost autocast ends.
                torch.clear_autocast_cache()

    def _run(
        self,
        parts: list[Module],
        replicas: Sequence[Module],
        tasks: list[Task],
        arguments: Sequence[Any],
        alone: object,
    ) -> list[Any]:
        if not self.is_cpu:
            indices = dict.fromkeys(self.indices[: len(tasks)])
            rng.seed_apart(map(self._machine.generator, indices))
        if self._drawn_module is not parts[0]:
            if self._drawn_module is not None:
                self._draws, self._waiting = {}, set()
            self._drawn_module = parts[0]
        in_order = partial(self._run_in_order, parts, replicas, tasks, alone)
        if sees_operations():
            return in_order(None)[0]
        key = bytes((torch.is_grad_enabled(), *(bool(p.training) for p in parts)))
        if key in self._waiting:
            return self._run_side_by_side(tasks, is_apart=True)[0]
        draws = self._draws.get(key)
        has_hooks = torch_modes.has_saved_tensors_hooks
        is_bound = self.is_cpu and (threads.has_gil() or has_hooks())
        if is_bound or (not draws and rng.has_generator(*arguments)):
            return in_order(key)[0]
        if draws is False:
            outputs, draws = self._run_side_by_side(tasks)
        else:
            outputs, found = in_order(key)
            if draws is None:
                others = threads.OF_ONE_THREAD if self.is_cpu else ()
                draws = rng.have_generator(parts, others) if found is False else found
        self._draws[key] = draws
        if draws is None and not self._has_warned:
            self._has_warned = True
            _log.warning(_DRAWN)
        return outputs

    # ---- in order -------------------------------------------------------------------

    def _run_in_order(
        self,
        parts: list[Module],
        replicas: Sequence[Module],
        tasks: list[Task],
        alone: object,
        key: bytes | None,
    ) -> tuple[list[Any], bool | None]:
        """Return the outputs, and whether replicas must not run side by side.

        The latter is None if the next call must find out, because several may have
        drawn.  If a replica waits for the next ones, they run side by side, from now on
        in all calls with this `key`; None: the caller's modes allow no threads.
        `alone` is this call's `_last_begun`, or None if others ran when it began.
        """
        lists = originals.lists_of_classes(parts)
        inner = self._replicated.inner_backwards if self._replicated else None
        watched, is_recorded = originals.Originals(parts), torch.is_grad_enabled()

        def call(k: int) -> Any:
            """Return replica `k`'s output, if it wrote only to its own tensors."""
            run = partial(_run_or_wait, tasks[k])
            if k > 0 and not self.is_cpu:
                run = partial(torch_modes.without_saved_tensors_hooks, run)
            before = originals.put(originals.of_replica(lists, parts, replicas[k]))
            try:
                if k == 0:
                    output = run()
                else:  # replica 0 may leave another mode to the caller
                    with inner or nullcontext(), torch.set_grad_enabled(is_recorded):
                        output = run()
            finally:
                originals.put(before)
            try:
                if k == 0 or watch.has_started:
                    watched.look()
                else:
                    watched.check(k)
            except RuntimeError:
                if self._last_begun is alone:
                    raise
                # A call in another thread may have made the change.
                watched.look()
            return output

        can_start = key is not None and not lists
        watch = Watch(tasks, self._kept.threads, can_start=can_start)
        try:
            calls: list[Callable[[], Any]]
            calls = [partial(call, k) for k in range(len(tasks))]
            outputs, draw = watch.over(partial(self._call_all, calls))
        finally:
            if key is not None and watch.has_started:
                self._waiting.add(key)
        has_run_backward = inner is not None and inner.were_seen
        return outputs, True if lists or has_run_backward else draw

    def _call_all(
        self, calls: list[Callable[[], Any]]
    ) -> tuple[list[Any], bool | None]:
        """Return the outputs; None if a shared generator moved in several, or False."""
        if self.is_cpu and threads.has_gil():
            return [call() for call in calls], False
        outputs, n_drew, before = [], 0, self._marks()
        for call in calls:
            outputs.append(call())
            now = self._marks()
            n_drew, before = n_drew + (now != before), now
        return outputs, None if n_drew > 1 else False

    def _marks(self) -> list[Any]:
        """Return values that change if a generator that replicas share is used."""
        if self.is_cpu:
            return rng.marks()
        shared = {i for i in self.indices if self.indices.count(i) > 1}
        return rng.marks(map(self._machine.generator, sorted(shared)))

    # ---- in parallel ----------------------------------------------------------------

    def _run_side_by_side(
        self, tasks: list[Task], *, is_apart: bool = False
    ) -> tuple[list[Any], bool | None]:
        """Return outputs of replicas on threads; None if numbers were drawn, or False.

        Another thread may have drawn them: the next call finds out.  If all are `apart`
        from this thread, it can leave those behind that wait for one that failed.
        """
        before = self._marks()
        watch = Watch(tasks, self._kept.threads)

        def run() -> None:
            watch.start(tasks if is_apart else tasks[1:])
            if not is_apart:
                tasks[0].run()
            for task in tasks:  # all run, even if one has failed
                task.wait()

        if self.is_cpu and not threads.has_gil():
            threads.share_cores(tasks, partial(watch.over, run))
        else:
            watch.over(run)
        outputs = [task.take() for task in tasks]
        return outputs, None if self._marks() != before else False

    # ---- before and after -----------------------------------------------------------

    def _check_devices(self, entries: Entries) -> None:
        """Raise torch's error if a tensor is not on the first device."""
        machine, first = self._machine, self.indices[0]
        by_device = {t.device: t for t in entries.values if t is not None}
        for tensor in by_device.values():
            if machine.index_of_tensor(tensor, first) != first:
                device = machine.device(first)
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{device} (device_ids[0]) but found one of them on device: "
                    f"{tensor.device}; move it by module.to('{device}')"
                )

    def release(self) -> None:
        """Remove what a forward has set, in replicas that nothing else holds."""
        if self._replicated is not None:
            self._replicated.release()

    def join(
        self,
        outputs: Sequence[Any],
        sizes: tuple[int, ...] | None,
        dim: int,
        output: torch.device,
    ) -> Any:
        """Return the output for the whole batch, on a device."""
        join = None if self.is_cpu else transfers.Joiner(self.group.streams(), output)
        with _recorded(outputs):
            return _native.gather(list(outputs), sizes or (), dim, join)

    def bring(self, output: Any, where: torch.device) -> Any:
        """Return the output of one replica, on a device."""
        if self.is_cpu:
            return output
        with _recorded([output]):
            return transfers.Joiner(self.group.streams(), where).of_replica(output, 0)

    def _run_on(self, index: int, stream: Any, call: Callable[[], Any]) -> Any:
        with self._machine.on(index, stream):
            return call()

    def _refuse_capture(self) -> None:
        """Raise if a CUDA graph is being captured."""
        if self._machine.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured round a DataParallel: replicas on "
                "several GPUs cannot be part of a graph; capture the bare module on "
                "one GPU, do not capture, or train with DistributedDataParallel"
            )


def _run_or_wait(task: Task) -> Any:
    """Return the output of a replica, which another thread may have begun."""
    task.run()
    return task.take()


def _recorded(outputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """Return a context that records a graph if the caller does, or if outputs have one.

    A forward may turn gradients on or off.
    """
    has_graph = torch.is_grad_enabled() or any(map(tensors_with_graph, outputs))
    return torch_modes.grad_mode(has_graph)
