"""One forward in replicas, each with copies of the model on its device.

::

    caller    scatter | send the model | replica 0 | wait for 1..n-1 | gather
    thread k                             replica k          (on GPUs)

    caller    scatter | send the model | replica 0 | 1 | ... | n-1 | gather

On GPUs replicas run in parallel.  Threads only enqueue; none waits for a device.  They
use the caller's current stream on each device, and the caller's state in torch
(``thread_state.py``).

On the CPU they run in order on the caller's thread: torch's own threads already use
every core, and programs need not be thread-safe.

Each device has its own generator of random numbers.  If a forward draws from a
generator that replicas share (the CPU's, Python's, NumPy's, or that of a device with
several replicas), its replicas run in order, so that runs can be repeated.  The first
call with each combination of training flags also runs in order, to find this out.  So
does a forward that runs backward passes, or whose parts are in a list of their class.

On GPUs, hooks on saved tensors, and so a checkpoint around the wrapper, apply to
replica 0 alone.  A backward has a thread for each device.  These threads would call the
hooks in parallel, and repeat a checkpoint's forward several times at once, on other
streams and with other random numbers: torch keeps the random state of one device only.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Module

from paceline import _gpu, _native
from paceline._compat import torch_modes
from paceline._dp import originals, rng, transfers
from paceline._dp.generators import generators_of, has_generator
from paceline._dp.group import HOST, Group
from paceline._dp.parameters import ModelCopies
from paceline._dp.replicate import Trained, held_by, parts_of
from paceline._dp.thread_state import State, sees_operations
from paceline._dp.threads import InsideReplica, Task, ThreadPool

_log = logging.getLogger("paceline")


class Engine:
    """Runs the replicas of a :class:`paceline.DataParallel`.

    Parameters
    ----------
    indices : sequence of int
        The GPU of each replica; zeros for the CPU.
    is_cpu : bool
        Replicas are on the CPU.
    """

    def __init__(self, indices: Sequence[int], *, is_cpu: bool) -> None:
        self.indices = list(indices)
        self.is_cpu = is_cpu
        self._machine: Any = HOST if is_cpu else _gpu.machine
        self._lock = threading.RLock()  # a subclass's gather() may call the wrapper
        self._process = os.getpid()
        # On the CPU a forward may wait for another thread's: each thread has its own.
        self._kept: Any = threading.local() if is_cpu else SimpleNamespace()
        self._threads = ThreadPool()
        self._draws: dict[bytes, bool] = {}
        self._drawn_module: Module | None = None
        self._running: set[object] = set()
        self._last_begun: object = None

    def _check_process(self) -> None:
        if self._process != os.getpid() and not self.is_cpu:
            raise RuntimeError(
                "a DataParallel on GPUs cannot be called in a forked process: start "
                "processes by spawn, and create the wrapper there"
            )

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """The lock that a call holds; raises in a forked process with GPUs."""
        self._check_process()
        return nullcontext() if self.is_cpu else self._lock

    @property
    def group(self) -> Group:
        """The devices, opened on first use."""
        self._check_process()
        group: Group | None = getattr(self._kept, "group", None)
        if group is None:
            group = self._kept.group = Group(self.indices, self._machine)
        return group

    @property
    def _replicated(self) -> ModelCopies | None:
        return getattr(self._kept, "replicated", None)

    def forget_model(self) -> None:
        """Drop all that holds the model, before a further call with the same one."""
        self._drawn_module = self._kept.replicated = None

    # ---- a forward ------------------------------------------------------------------

    def place(self, scattered: _native.Scattered) -> list[Any]:
        """Return the arguments of each replica, on its device."""
        self._refuse_capture()
        streams = self.group.streams()
        return [
            transfers.to_member(streams, scattered, k)
            for k in range(len(scattered.sizes))
        ]

    def replicas(self, module: Module, n_replicas: int) -> list[Module]:
        """Return the module, and replicas of it on their devices."""
        self._refuse_capture()
        parts = parts_of(module)
        self._check_devices(parts)
        replicated = self._replicated
        if replicated is None:
            replicated = self._kept.replicated = ModelCopies(self.group)
        return replicated.replicas(parts, n_replicas, self.group.streams())

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
            self._check_devices(parts)
        streams = group.streams()
        tasks = []
        for k, (replica, args, named) in enumerate(
            zip(replicas, inputs, kwargs, strict=True)
        ):
            args = args if isinstance(args, (list, tuple)) else (args,)
            call = partial(replica, *args, **(named or {}))
            where = group.indices[k], streams.handles[k]
            run = partial(self._run_on, *where, call)
            tasks.append(Task(run, k, group.devices[k]))
        outputs: list[Any] = []
        try:
            with InsideReplica():
                if len(tasks) == 1:
                    return [tasks[0].run_and_take()]
                trained = Trained(replicas)
                outputs = self._run(parts, replicas, tasks, [*inputs[:1], *kwargs[:1]])
            trained.check(outputs)
            return outputs
        finally:
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
    ) -> list[Any]:
        if self.is_cpu:
            return self._run_in_order(parts, replicas, tasks)[0]
        if self._drawn_module is not parts[0]:
            if self._drawn_module is not None:
                self._draws = {}
            self._drawn_module = parts[0]
        flags = bytes(bool(part.training) for part in parts)
        key = flags + bytes((torch.is_grad_enabled(),))
        draws = self._draws.get(key)
        if sees_operations() or (not draws and has_generator(*arguments)):
            return self._run_in_order(parts, replicas, tasks)[0]
        if draws is False:
            outputs, self._draws[key] = self._run_side_by_side(tasks)
            return outputs
        outputs, found = self._run_in_order(parts, replicas, tasks)
        self._draws[key] = bool(draws) or found or bool(generators_of(parts))
        return outputs

    # ---- in order -------------------------------------------------------------------

    def _run_in_order(
        self, parts: list[Module], replicas: Sequence[Module], tasks: list[Task]
    ) -> tuple[list[Any], bool]:
        """Return the outputs, and whether replicas must not run side by side."""
        lists = originals.lists_of_classes(parts)
        inner = self._replicated.inner_backwards if self._replicated else None
        watched, this = originals.Originals(parts), object()

        def call(k: int) -> Any:
            """Return replica `k`'s output, if it wrote only to its own tensors."""
            run = tasks[k].run_and_take
            if k > 0 and not self.is_cpu:
                run = partial(torch_modes.without_saved_tensors_hooks, run)
            before = originals.put(originals.of_replica(lists, parts, replicas[k]))
            try:
                with inner if k > 0 and inner is not None else nullcontext():
                    output = run()
            finally:
                originals.put(before)
            # Otherwise a call in another thread may have made the change.
            if k > 0 and began_alone and self._last_begun is this:
                watched.check(k)
            else:
                watched.look()
            return output

        try:
            self._running.add(this)
            began_alone, self._last_begun = len(self._running) == 1, this
            outputs, draw = self._call_all(
                [partial(call, k) for k in range(len(tasks))]
            )
        finally:
            self._running.discard(this)
        has_run_backward = inner is not None and inner.were_seen
        return outputs, draw or bool(lists) or has_run_backward

    def _call_all(self, calls: list[Callable[[], Any]]) -> tuple[list[Any], bool]:
        """Return the outputs, and whether replicas used a generator that they share."""
        if torch_modes.count_dispatch_modes():  # they intercept reads of generators
            return [call() for call in calls], False
        if self.is_cpu:
            return rng.run_in_order(calls)
        others = rng.other_streams(), self._shared_generators()
        outputs, draw = rng.run_in_order(calls)
        others_drew = others != (rng.other_streams(), self._shared_generators())
        return outputs, draw or others_drew

    def _shared_generators(self) -> list[Any]:
        """Return the generators' states of devices with more than one replica."""
        shared = {i for i in self.indices if self.indices.count(i) > 1}
        return [self._machine.generator_state(index) for index in sorted(shared)]

    # ---- in parallel ----------------------------------------------------------------

    def _run_side_by_side(self, tasks: list[Task]) -> tuple[list[Any], bool]:
        """Return outputs of replicas on threads, and whether they shared generators."""
        before = rng.marks()
        state, n_cores = State(), torch.get_num_threads()
        for task in tasks[1:]:
            task.enter(state, contextvars.copy_context(), n_cores)
        self._threads.run(tasks)
        draws = rng.marks() != before
        if draws:
            _log.warning(
                "a forward of DataParallel drew random numbers of the CPU in replicas "
                "that ran in parallel: from now on they run one after the other, so "
                "that runs can be repeated"
            )
        return [task.take() for task in tasks], draws

    # ---- before and after -----------------------------------------------------------

    def _check_devices(self, parts: list[Module]) -> None:
        """Raise torch's error if a tensor is not on the first device."""
        machine, first = self._machine, self.indices[0]
        by_device = {tensor.device: tensor for tensor in held_by(parts)}
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
        return _native.gather(list(outputs), sizes or (), dim, join)

    def bring(self, output: Any, where: torch.device) -> Any:
        """Return the output of one replica, on a device."""
        if self.is_cpu:
            return output
        return transfers.Joiner(self.group.streams(), where).of_replica(output, 0)

    def _run_on(self, index: int, stream: Any, call: Callable[[], Any]) -> Any:
        with self._machine.on(index, stream):
            return call()

    def _refuse_capture(self) -> None:
        """Raise if a CUDA graph is being captured."""
        if self._machine.is_capturing():
            raise RuntimeError(
                "a CUDA graph is being captured round a DataParallel: replicas on "
                "several GPUs cannot be part of a graph; capture the module inside it "
                "instead, or train with DistributedDataParallel"
            )
