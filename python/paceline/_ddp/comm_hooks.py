"""Communication hooks: the user's own way to average a bucket of gradients.

The reducer passes each full bucket to a runner (csrc/python/ddp/comm_hook.c).  The
runner copies it to a torch tensor, passes that to the hook, and at the end of the
backward writes the result of the hook's future back.  The rest of a step is as without
a hook.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from paceline import _native
from paceline._compat import torch_core, torch_groups
from paceline._ddp import forks, group_comm
from paceline._ddp.mixed_precision import StandIn

_ORDER_LOST = (
    "a step has failed while a communication hook was at work, so its collectives may "
    "no longer be in the same order on all ranks: make a new process group for the "
    "hook, and wrap the model anew, on every rank"
)

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]


class GradBucket(dist.GradBucket):  # type: ignore[misc, name-defined]
    """One bucket of gradients, as passed to a communication hook.

    Its methods are those of `torch.distributed.GradBucket
    <https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>`_.  Gradients are this
    rank's own, not divided by the number of ranks.
    """

    _index: int
    _buffer: torch.Tensor
    _parameters: list[torch.Tensor]
    _is_last: bool

    @classmethod
    def of(
        cls,
        index: int,
        buffer: torch.Tensor,
        parameters: list[torch.Tensor],
        is_last: bool,
    ) -> GradBucket:
        """Make a bucket; only torch's reducer can call torch's own constructor."""
        self = cls.__new__(cls)
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last
        return self

    def index(self) -> int:
        """Return the bucket's number: 0 fills first in a backward."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients, one after another: a 1-D tensor, or a sparse one.

        Complex gradients are given as real and imaginary parts, in turn.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor that :meth:`buffer` returns."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return a view of the buffer for each parameter, in its shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        views, at, buffer = [], 0, self._buffer
        if self._parameters[0].is_complex() and not buffer.is_complex():
            buffer = torch.view_as_complex(buffer.view(-1, 2))
        for parameter in self._parameters:
            views.append(
                buffer.as_strided(
                    parameter.shape,
                    _strides_of(parameter),
                    buffer.storage_offset() + at,
                )
            )
            at += parameter.numel()
        return views

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the buffer's order."""
        held = self._parameters
        return [p.parameter if isinstance(p, StandIn) else p for p in held]

    def is_last(self) -> bool:
        """Tell whether this is the last bucket of the step."""
        return self._is_last


def _as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one row; complex values as both parts, in turn."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1)


def _strides_of(parameter: torch.Tensor) -> tuple[int, ...]:
    if torch_core.is_dense(parameter):
        return tuple(parameter.stride())
    shape = parameter.shape
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


class CommHookRunner:
    """Passes the buckets of its owner, a reducer, to a hook, and writes its results.

    With `uses_group` a process group, perhaps that of the hook, also carries the
    reducer's own messages.
    """

    def __init__(
        self,
        reducer: _native.Reducer,
        parameters: Sequence[torch.Tensor],
        sparse: Iterable[int],
        hooks: CommHooks,
        uses_group: bool,
    ) -> None:
        self._uses_group = uses_group
        self._reducer: _native.Reducer = weakref.proxy(reducer)
        self._parameters = parameters
        self._sparse = frozenset(sparse)
        self._hooks = hooks
        self._hook, self._state = hooks.registered[0]
        self._pending: list[tuple[int, torch.Tensor, Any]] = []
        self._members: list[list[torch.Tensor]] = []
        self._refusal: RuntimeError | None = None
        self._next = 0  # the next bucket's number; empty ones have none

    def post(self, index: int) -> None:
        """Start the hook's work on a full bucket."""
        if self._hooks.has_lost_order:
            raise RuntimeError(_ORDER_LOST)
        reducer = self._reducer
        if index == 0:  # a step begins, in which the buckets do not change
            self._next = 0
            self._refusal = None
            self._members = [
                [self._parameters[i] for i in bucket if i not in self._sparse]
                for bucket in reducer.buckets
            ]
        parameters = self._members[index]
        if parameters and self._refusal is None:
            n_elems = sum(p.numel() for p in parameters)
            values = torch.empty(
                n_elems, dtype=parameters[0].dtype, device=parameters[0].device
            )
            reducer.read_bucket(index, values)
            is_last = not self._sparse and not any(self._members[index + 1 :])
            self._begin(index, _as_reals(values), list(parameters), is_last)
        if self._uses_group and index == len(self._members) - 1:
            # As its futures complete, a hook may issue more (PowerSGD does), on other
            # threads: all ranks must have done so before the step's own messages.
            for _, _, future in self._pending:
                group_comm.await_future(future, reducer.poll)

    def _begin(
        self,
        index: int,
        buffer: torch.Tensor,
        parameters: list[torch.Tensor],
        is_last: bool,
    ) -> None:
        bucket = GradBucket.of(self._next, buffer, parameters, is_last)
        self._next += 1
        future = self._hook(self._state, bucket)
        kind: type = type(future)
        if not issubclass(kind, torch_core.FUTURES):
            # Raised at the step's end, so that peers with the same hook do so too.
            self._refusal = RuntimeError(
                "DDP communication hook's callback must return a torch.futures.Future "
                f"object, but got {kind.__module__}.{kind.__qualname__}."
            )
            return
        self._pending.append((index, buffer, forks.note(future)))

    def abandon(self) -> None:
        """Leave a failed step.

        Work in flight may wait for a rank that never started it, and would then pair
        with that rank's next work: from then on gradients could be anything.
        """
        pending, self._pending = self._pending, []
        if not all(future.done() for _, _, future in pending):
            self._hooks.has_lost_order = True

    def refuse(self) -> None:
        """Raise if the hook returned something other than a future."""
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal

    def finish(self) -> None:
        """Wait for the hook's results, and write them to the buckets."""
        self.refuse()
        for index, buffer, future in self._pending:
            result = self._result_of(future)
            flat = result if result.is_sparse else _as_reals(result.detach())
            if flat.numel() != buffer.numel() or flat.is_sparse:
                raise RuntimeError(
                    "DDP communication hook's future has a tensor of shape "
                    f"{tuple(result.shape)} for a bucket of {buffer.numel()} elements: "
                    "return the averaged bucket.buffer()"
                )
            flat = flat.to(buffer.dtype).contiguous()
            if self._members[index][0].is_complex():
                flat = torch.view_as_complex(flat.view(-1, 2))
            self._reducer.write_bucket(index, flat)
        self._pending.clear()

    def finish_sparse(self, indices: list[int], is_active: bool, binds: bool) -> None:
        """Let the hook average each of the gradients declared sparse."""
        for k, i in enumerate(indices):
            parameter = self._parameters[i]
            gradient = _sparse_gradient(parameter, is_active)
            self._begin(i, gradient, [parameter], k == len(indices) - 1)
            self.refuse()
        results = [(i, self._result_of(future)) for i, _, future in self._pending]
        self._pending.clear()
        for i, result in results if binds else []:
            self._parameters[i].grad = result

    def _result_of(self, future: Any) -> torch.Tensor:
        result = group_comm.wait_for_future(future, self._reducer.poll)
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        if not isinstance(result, torch.Tensor):
            raise RuntimeError(
                "DDP communication hook's future must hold a tensor, but holds "
                f"{type(result).__name__}: return the averaged bucket.buffer()"
            )
        return result


def _sparse_gradient(parameter: torch.Tensor, is_active: bool) -> torch.Tensor:
    """Return a sparse gradient to reduce: a copy of the original, or an empty one.

    It is a copy, since hooks change it in place, and two tables that are added to each
    other share the memory of their gradients.
    """
    gradient = parameter.grad if is_active else None
    if gradient is None:
        return torch.sparse_coo_tensor(
            torch.empty((1, 0), dtype=torch.int64, device=parameter.device),
            parameter.detach().new_empty((0, *parameter.shape[1:])),
            parameter.shape,
            check_invariants=False,
        )
    gradient = gradient.detach()
    return gradient.clone() if gradient.is_sparse else gradient.to_sparse(1)


class _DefaultGroup:
    """Replaces, in a copy, the default process group, which cannot be pickled."""


class CommHooks:
    """The communication hook of a wrapper, if it has one."""

    def __init__(self) -> None:
        self.registered: list[tuple[Hook, Any]] = []  # and its state; one at most
        self.is_builtin = False  # a hook that torch has written in C++
        self.name = ""  # for the logging data
        self.has_lost_order = False  # work of a failed step may be left in its group
        forks.note(self)  # a state may hold a group

    def refuse_second(self, *methods: str) -> None:
        """Raise if there is a hook; `methods` begin with the one called."""
        if self.registered or self.is_builtin:
            raise RuntimeError(
                f"{' or '.join(methods)} can only be called once. For another hook, "
                "wrap the module again."
            )

    def __getstate__(self) -> dict[str, Any]:
        packed = [
            (hook, _DefaultGroup if torch_groups.is_default_group(state) else state)
            for hook, state in self.registered
        ]
        return {**vars(self), "registered": packed, "has_lost_order": False}

    def __setstate__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)
        forks.note(self)
        self.registered = [
            (hook, torch_groups.default_group() if state is _DefaultGroup else state)
            for hook, state in self.registered
        ]


def refusal(hook: Any) -> Exception | None:
    """Return the error that torch raises if `hook` cannot be a hook."""
    if not callable(hook):
        return TypeError("Communication hook must be callable.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    kind = dist.GradBucket  # type: ignore[attr-defined]
    if bucket is not None and not _is_as(bucket.annotation, kind):
        return ValueError(
            "Communication hook: bucket annotation should be dist.GradBucket."
        )
    if not _is_as(signature.return_annotation, torch.futures.Future[torch.Tensor]):
        return ValueError(
            "Communication hook: return annotation should be "
            "torch.futures.Future[torch.Tensor]."
        )
    return None


def _is_as(annotation: Any, expected: Any) -> bool:
    """Tell whether an annotation is as expected, missing, or text."""
    return annotation in (inspect.Parameter.empty, expected) or isinstance(
        annotation, str
    )


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(
    GradBucket.of.__func__,  # type: ignore[attr-defined]
    _as_reals,
    CommHookRunner.post,
    CommHookRunner._begin,
    CommHookRunner.abandon,
    CommHookRunner.refuse,
    CommHookRunner.finish,
    CommHookRunner.finish_sparse,
    CommHookRunner._result_of,
    _sparse_gradient,
)
