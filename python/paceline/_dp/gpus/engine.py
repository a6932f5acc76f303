"""A forward on several GPUs: each replica on a thread, and a device, of its own.

::

    caller    scatter | send the model | replica 0 | wait for 1..n-1 | gather
    thread k                             replica k

Threads only enqueue: nobody waits for a device.  The streams are those that are the
caller's current ones, on each device; so is what torch keeps a thread
(``thread_state.py``).

Devices have generators of random numbers of their own.  A forward that draws from one
that replicas share (the CPU's, Python's, NumPy's, that of a device which is there more
than once) runs its replicas in order, so that runs can be repeated; its first call of
each combination of training flags does so too, and finds that out.

Hooks on saved tensors, and so a checkpoint round the wrapper, are replica 0's alone.  A
backward has a thread for each device: these would call the hooks side by side, and
repeat a checkpoint's forward at a time, on other streams than its own, with other
random numbers than those of its own, of which torch keeps those of one device.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from paceline import _gpu
from paceline._compat import torch_modes
from paceline._dp import rng
from paceline._dp.gpus import transfers
from paceline._dp.gpus.generators import generators_of, has_generator
from paceline._dp.gpus.group import Group
from paceline._dp.gpus.parameters import Replicated
from paceline._dp.gpus.thread_state import State, sees_operations
from paceline._dp.gpus.threads import Task, ThreadPool
from paceline._dp.nesting import InsideReplica
from paceline._dp.replicate import check_structure, parts_of, structure_of

if TYPE_CHECKING:
    from paceline import _native

_log = logging.getLogger("paceline")


class GpuEngine:
    """Runs the replicas of a :class:`paceline.DataParallel` on GPUs.

    Parameters
    ----------
    indices : sequence of int
        The GPU of each replica.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self._lock = threading.RLock()  # a gather() of a subclass may call the wrapper
        self._process = os.getpid()
        self._group: Group | None = None
        self._threads = ThreadPool()
        self._replicated: Replicated | None = None
        self._draws: dict[bytes, bool] = {}
        self._drawn_module: Module | None = None

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                "a DataParallel on GPUs cannot be called in a forked process: start "
                "processes by spawn, and make it there"
            )

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """What each call holds; in a forked process nobody may ever let go of it."""
        self._check_process()
        return self._lock

    @property
    def group(self) -> Group:
        """The devices, opened by the first who asks."""
        self._check_process()
        if self._group is None:
            self._group = Group(self.indices)
        return self._group

    # ---- a forward ------------------------------------------------------------------

    def place(self, scattered: _native.Scattered) -> list[Any]:
        """Return the arguments of each replica, on its device."""
        refuse_capture()
        group = self.group
        streams = group.streams()
        return [
            transfers.to_member(group, streams, scattered, k)
            for k in range(len(scattered.sizes))
        ]

    def replicas(self, module: Module, n_replicas: int) -> list[Module]:
        """Return the module, and replicas of it on their devices."""
        refuse_capture()
        parts = parts_of(module)
        self._check_devices(parts)
        if self._replicated is None:
            self._replicated = Replicated(self.group)
        return self._replicated.replicas(parts, n_replicas, self.group.streams())

    def apply(
        self,
        module: Module,
        replicas: Sequence[Module],
        inputs: Sequence[Any],
        kwargs: Sequence[Any],
    ) -> list[Any]:
        """Return what each replica returns; the error of the lowest is raised."""
        refuse_capture()
        parts, group = parts_of(module), self.group
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
            tasks.append(Task(partial(_run_on, *where, call), k, group.devices[k]))
        structure = structure_of(parts)
        try:
            with InsideReplica():
                if len(tasks) == 1:
                    return [tasks[0].run_and_take()]
                outputs = self._run(parts, tasks, [*inputs[:1], *kwargs[:1]])
            check_structure(parts, structure)
            return outputs
        finally:
            if self._replicated is not None:
                self._replicated.finish(replicas, streams)
            if not torch.is_grad_enabled():
                # It would hold on to casts of the replicas' parameters, which are new
                # ones in each forward, until the outermost autocast ends.
                torch.clear_autocast_cache()

    def _run(
        self, parts: list[Module], tasks: list[Task], arguments: Sequence[Any]
    ) -> list[Any]:
        if self._drawn_module is not parts[0]:
            self._drawn_module, self._draws = parts[0], {}
        flags = bytes(bool(part.training) for part in parts)
        key = flags + bytes((torch.is_grad_enabled(),))
        draws = self._draws.get(key)
        if sees_operations() or (not draws and has_generator(*arguments)):
            return self._run_in_order(tasks)[0]
        if draws is False:
            outputs, self._draws[key] = self._run_side_by_side(tasks)
            return outputs
        outputs, found = self._run_in_order(tasks)
        self._draws[key] = bool(draws) or found or bool(generators_of(parts))
        return outputs

    def _run_in_order(self, tasks: list[Task]) -> tuple[list[Any], bool]:
        """Return the outputs, and whether a generator was used that replicas share."""
        calls: list[Callable[[], Any]] = [task.run_and_take for task in tasks]
        without = torch_modes.without_saved_tensors_hooks
        calls[1:] = [partial(without, call) for call in calls[1:]]
        if torch_modes.count_dispatch_modes():  # they would see what generators do
            return [call() for call in calls], False
        others, devices = rng.other_streams(), self._shared_generators()
        draws = rng.Draws()
        outputs = rng.run_in_order([partial(draws.watch, call) for call in calls])
        others_drew = others != rng.other_streams()
        others_drew |= devices != self._shared_generators()
        return outputs, draws.were_made or others_drew

    def _run_side_by_side(self, tasks: list[Task]) -> tuple[list[Any], bool]:
        """Return the same, of replicas that run on threads."""
        before = rng.marks()
        state, n_cores = State(), torch.get_num_threads()
        for task in tasks[1:]:
            task.enter(state, contextvars.copy_context(), n_cores)
        self._threads.run(tasks)
        draws = rng.marks() != before
        if draws:
            _log.warning(
                "a forward of DataParallel drew random numbers of the CPU in replicas "
                "that ran side by side: from now on they run one after the other, so "
                "that runs can be repeated"
            )
        return [task.take() for task in tasks], draws

    def _shared_generators(self) -> list[Any]:
        """Return the states of generators of devices that are there more than once."""
        shared = {i for i in self.indices if self.indices.count(i) > 1}
        return [_gpu.machine.generator_state(index) for index in sorted(shared)]

    def _check_devices(self, parts: list[Module]) -> None:
        """Raise torch's error where a parameter or buffer is not on the first GPU."""
        machine, first = _gpu.machine, self.indices[0]
        for part in parts:
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is None or machine.index_of_tensor(tensor, first) == first:
                    continue
                device = machine.device(first)
                raise RuntimeError(
                    "module must have its parameters and buffers on device "
                    f"{device} (device_ids[0]) but found one of them on device: "
                    f"{tensor.device}; move it by module.to('{device}')"
                )

    def release(self) -> None:
        """Remove what a forward has set, of replicas that nothing else refers to."""
        if self._replicated is not None:
            self._replicated.release()

    # ---- around it ------------------------------------------------------------------

    def join(
        self,
        outputs: Sequence[Any],
        sizes: tuple[int, ...] | None,
        dim: int,
        output: torch.device,
    ) -> Any:
        """Return the output for the whole batch, on a device."""
        return transfers.gather(self.group, outputs, sizes, dim, output)

    def bring(self, output: Any, where: torch.device) -> Any:
        """Return the output of one replica, on a device."""
        return transfers.bring_all(self.group, output, where)


def _run_on(index: int, stream: Any, call: Callable[[], Any]) -> Any:
    with _gpu.machine.on(index, stream):
        return call()


def refuse_capture() -> None:
    """Raise where a CUDA graph is being captured."""
    if _gpu.machine.is_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured round a DataParallel: replicas on several "
            "GPUs cannot be part of a graph; capture the module inside it instead, or "
            "train with DistributedDataParallel"
        )
