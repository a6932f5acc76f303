"""A world whose operations a process group carries: see csrc/comm/group_comm.h.

For groups with an unknown backend (MPI, a subclass in Python), for hosts that cannot be
linked, and for machines that refuse shared memory.  It calls the group's own methods,
since those of ``torch.distributed`` accept registered groups only.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native
from paceline._compat import torch_core, torch_groups
from paceline._ddp import forks

_POLL_SECONDS = 0.05


def wait_for(work: Any) -> None:
    """Wait for work that a process group has begun, and raise its error.

    A group may return a Work or a future, or finish at once.  A Work in Python whose
    class has a ``wait`` may do its part there.  From any other Work this asks for a
    future first, as torch's own wrapper does: a Work with a future need not implement
    ``wait``.
    """
    own_wait = (
        getattr(type(work), "wait", None) if isinstance(work, dist.Work) else None
    )
    has_own_wait = isinstance(own_wait, types.FunctionType)
    if has_own_wait:
        dist.Work.wait(work)  # torch's core calls the class's own, with a timeout
    future = work
    get_future = getattr(work, "get_future", None)
    if get_future is not None:
        try:
            future = get_future()
        except (NotImplementedError, RuntimeError):
            future = None  # this kind has no future
    if hasattr(future, "add_done_callback"):
        wait_for_future(future, lambda: None)
    elif work is not None and not has_own_wait:
        work.wait()


def wait_for_future(future: Any, poll: Callable[[], None]) -> Any:
    """Return a future's value, or raise what it raises; see :func:`await_future`."""
    await_future(future, poll)
    return future.wait()


def await_future(future: Any, poll: Callable[[], None]) -> None:
    """Wait until a future is done, with a result or an error.

    The future's own ``wait`` ignores signals.  This one calls `poll` now and then,
    which can end the wait by raising.
    """
    if not future.done():
        is_done = threading.Event()
        future.add_done_callback(lambda _: is_done.set())
        while not is_done.wait(_POLL_SECONDS):
            poll()


class GroupComm:
    """Carries the operations of a world over a process group, in their order.

    The group makes the sums: every rank gets the backend's result.  Gradients are
    divided by the number of ranks before they are summed, as in torch's wrapper.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = forks.note(group)
        self._size = int(group.size())
        self._pending: list[tuple[int, Any]] = []

    def serve(self, world: _native.RankWorld) -> None:
        """Use the arena of ``world``, which owns this object."""
        self._world = weakref.ref(world)

    def _range(self, dtype: str, offset_bytes: int, n_elems: int) -> torch.Tensor:
        """Return a range of the arena; it keeps the world alive."""
        # The core has torch's names of types.
        kind: torch.dtype = getattr(torch, dtype)
        return torch.frombuffer(
            self._world(), dtype=kind, count=n_elems, offset=offset_bytes
        )

    def issue(
        self,
        kind: str,
        dtype: str,
        reduction: str,
        offset_bytes: int,
        n_elems: int,
        root: int,
        ticket: int,
    ) -> None:
        """Begin one operation of the world."""
        if n_elems == 0 and kind != "barrier":
            return
        if kind == "barrier":
            work = self._group.allreduce(
                [torch.zeros(1, device="cpu")], dist.AllreduceOptions()
            )
        else:
            tensor = self._range(dtype, offset_bytes, n_elems)
            work = self._begin(kind, tensor, reduction, root)
        self._pending.append((ticket, forks.note(work)))

    def _begin(self, kind: str, tensor: torch.Tensor, reduction: str, root: int) -> Any:
        if kind == "all-reduce":
            return self._all_reduce(tensor, reduction)
        if kind == "broadcast":
            options = dist.BroadcastOptions()
            options.rootRank = root
            options.rootTensor = 0
            return self._group.broadcast([tensor], options)
        if kind == "all-gather":
            rows = list(tensor.chunk(self._size))
            mine = rows[self._group.rank()].clone()
            return self._group.allgather(
                [rows], [mine], torch_groups.all_gather_options()
            )
        raise NotImplementedError(
            f"paceline carries no {kind} over a process group: use all-reduce"
        )

    def _all_reduce(self, tensor: torch.Tensor, reduction: str) -> Any:
        options = dist.AllreduceOptions()
        kind: Any = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        options.reduceOp = kind
        if reduction == "mean":
            tensor.mul_(1.0 / self._size)
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return self._group.allreduce([tensor], options)

    def wait(self, ticket: int) -> None:
        """Wait for all operations up to ``ticket``."""
        while self._pending and self._pending[0][0] <= ticket:
            _, work = self._pending.pop(0)
            wait_for(work)

    def drop(self) -> None:
        """Forget operations in flight, since the world has failed.

        A Work may hold memory of the world, and keep the world and this object alive.
        """
        self._pending.clear()


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(
    wait_for,
    wait_for_future,
    await_future,
    GroupComm._range,
    GroupComm.issue,
    GroupComm._begin,
    GroupComm._all_reduce,
    GroupComm.wait,
    GroupComm.drop,
)
