"""Communication hooks: the user's own way to average a bucket of gradients.

The reducer hands each full bucket to a runner (csrc/python/ddp/comm_hook.c), which
copies it to a tensor of torch's, gives that to the hook, and puts what comes of the
hook's future back at the end of the backward.  Everything else of a step goes as
without a hook.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from paceline import _native
from paceline._compat import torch_core, torch_groups
from paceline._ddp import group_comm

if TYPE_CHECKING:
    from paceline._ddp.session import Session

_ORDER_LOST = (
    "a step has failed while a communication hook was at work, so its collectives may "
    "no longer be in the same order on all ranks: make a new process group for the "
    "hook, and wrap the model anew, on every rank"
)

Hook = Callable[[Any, Any], "torch.futures.Future[torch.Tensor]"]

_ONCE = "{} or {} can only be called once. For another hook, wrap the module anew."


class GradBucket(dist.GradBucket):  # type: ignore[misc, name-defined]
    """One bucket of gradients, as a communication hook sees it.

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
        """Make a bucket; torch's own constructor is its reducer's alone."""
        self = cls.__new__(cls)
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last
        return self

    def index(self) -> int:
        """Return the bucket's number: 0 is the first that is full in a backward."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients, one after another: a 1-D tensor, or a sparse one.

        Of complex gradients these are the real and imaginary parts, in turn.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Exchange the tensor that :meth:`buffer` returns."""
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
        return list(self._parameters)

    def is_last(self) -> bool:
        """Tell whether no bucket comes after this one in the step."""
        return self._is_last


def _as_reals(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in one row; of complex ones both parts, in turn."""
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
    """Gives a reducer's buckets to a hook, and its results back.

    Parameters
    ----------
    reducer : paceline._native.Reducer
        The wrapper's; it owns this object.
    parameters : list of torch.Tensor
        All that require a gradient, in the reducer's order.
    sparse : list of int
        Which of them are declared sparse.
    state, hook
        The user's.
    uses_group : bool
        Whether a process group, perhaps the hook's, carries the reducer's messages too.
    """

    def __init__(
        self,
        reducer: _native.Reducer,
        parameters: list[torch.nn.Parameter],
        sparse: list[int],
        state: Any,
        hook: Hook,
        uses_group: bool,
    ) -> None:
        self._uses_group = uses_group
        self._reference = weakref.ref(reducer)
        self._parameters = parameters
        self._sparse = frozenset(sparse)
        self._state = state
        self._hook = hook
        self._pending: list[tuple[int, torch.Tensor, Any]] = []
        self._members: list[list[torch.nn.Parameter]] = []
        self._has_lost_order = False
        self._refusal: RuntimeError | None = None
        self._next = 0  # the bucket's number, without those that hold nothing

    @property
    def _reducer(self) -> _native.Reducer:
        reducer = self._reference()
        assert reducer is not None, "called by its reducer alone"
        return reducer

    def post(self, index: int) -> None:
        """Begin the hook's work on a full bucket."""
        if self._has_lost_order:
            raise RuntimeError(_ORDER_LOST)
        reducer = self._reducer
        if index == 0:  # of a step, in which the buckets stay what they are
            self._next = 0
            self._refusal = None
            self._members = [
                [self._parameters[i] for i in bucket if i not in self._sparse]
                for bucket in reducer.buckets
            ]
        if self._members[index] and self._refusal is None:
            self._post(index, self._members[index])
        if self._uses_group and index == len(self._members) - 1:
            # A hook may issue more as its futures come (PowerSGD does), on threads of
            # their own: all ranks must have done so before the step's own messages.
            for _, _, future in self._pending:
                group_comm.await_future(future, reducer.poll)

    def _post(self, index: int, parameters: list[torch.nn.Parameter]) -> None:
        values = torch.empty(
            sum(p.numel() for p in parameters),
            dtype=parameters[0].dtype,
            device=parameters[0].device,
        )
        self._reducer.read_bucket(index, values)
        is_last = not self._sparse and not any(self._members[index + 1 :])
        self._begin(index, _as_reals(values), list(parameters), is_last)

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
            # Raised at the step's end: peers whose hooks do the same learn it of those.
            self._refusal = RuntimeError(
                "DDP communication hook's callback must return a torch.futures.Future "
                f"or torch._C.Future object, but got {kind.__module__}."
                f"{kind.__qualname__}."
            )
            return
        self._pending.append((index, buffer, future))

    def abandon(self) -> None:
        """Leave a step that failed.

        What is under way may wait for a rank that never began it, and would take that
        rank's next work for it: from then on gradients could be anything.
        """
        pending, self._pending = self._pending, []
        if not all(future.done() for _, _, future in pending):
            self._has_lost_order = True

    def refuse(self) -> None:
        """Raise if the hook has returned what is no future."""
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
                    "give what bucket.buffer() has become"
                )
            flat = flat.to(buffer.dtype).contiguous()
            if self._members[index][0].is_complex():
                flat = torch.view_as_complex(flat.view(-1, 2))
            self._reducer.write_bucket(index, flat)
        self._pending.clear()

    def finish_sparse(self, indices: list[int], is_active: bool, binds: bool) -> None:
        """Have the hook average gradients that are declared sparse, each by itself."""
        for k, i in enumerate(indices):
            parameter = self._parameters[i]
            gradient = _sparse_gradient(parameter if is_active else None, parameter)
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
                f"{type(result).__name__}: give what bucket.buffer() has become"
            )
        return result


def _sparse_gradient(
    owner: torch.Tensor | None, parameter: torch.Tensor
) -> torch.Tensor:
    """Return a sparse gradient to reduce: a copy of the owner's, or one without rows.

    A copy, since hooks change it in place, and two tables that are added to each other
    have gradients of the same memory.
    """
    gradient = owner.grad if owner is not None else None
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
    """Stands in a copy for the default process group, which cannot be pickled."""


def pack_hooks(hooks: list[tuple[Hook, Any]]) -> list[tuple[Hook, Any]]:
    """Return hooks and their states as a copy of the wrapper keeps them."""
    return [
        (hook, _DefaultGroup if _is_default_group(state) else state)
        for hook, state in hooks
    ]


def unpack_hooks(hooks: list[tuple[Hook, Any]]) -> list[tuple[Hook, Any]]:
    """Return what :func:`pack_hooks` was given, in the process of the copy."""
    return [
        (hook, torch_groups.default_group() if state is _DefaultGroup else state)
        for hook, state in hooks
    ]


def _is_default_group(state: Any) -> bool:
    return isinstance(state, dist.ProcessGroup) and torch_groups.is_default_group(state)


class CommHooks(TorchDDP):
    """The methods of a wrapper for communication hooks."""

    _session: Session
    _comm_hooks: list[tuple[Hook, Any]]
    _has_builtin_hook: bool = False
    _comm_hook_name: str

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Have ``hook`` average the gradients, bucket by bucket, in place of us.

        Parameters
        ----------
        state : object
            Given to the hook each time; None, say, or a process group.
        hook : callable
            ``hook(state, bucket)`` begins the averaging of one
            ``torch.distributed.GradBucket`` and returns a
            ``torch.futures.Future[torch.Tensor]`` of what ``bucket.buffer()`` becomes:
            a tensor of as many elements.  Gradients come as they are: it is the hook
            that divides by the number of ranks.

        Raises
        ------
        TypeError
            If the hook is not callable.
        ValueError
            If an annotation of its is not what torch asks for.
        RuntimeError
            If the wrapper has a hook.  Out of ``backward()``: if the hook returns no
            future of a fitting tensor.  What the hook, or its future, raises comes out
            of ``backward()`` too; the other ranks get ``PeerError``.

        Notes
        -----
        The contract is that of `torch's method
        <https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html>`_.  Where it differs:

        - Buckets are up to 25 MiB, and the last up to 1 MiB, where no ``bucket_cap_mb``
          was given; in the first backward they are cut in the reverse order of the
          parameters, from the second on in the order in which gradients came.
        - The buffer is a tensor of its own: a hook may keep it.
        - bfloat16 hooks work on the CPU (``strict`` refuses them, as torch does).
        - A copy of the wrapper, and a model that was changed, keep the hook.
        - A parameter whose gradient comes a second time after its bucket has gone
          raises on every rank.
        - After a step that failed while the hook's work was under way, further steps
          raise: a collective that only some ranks began would pair with the next one.

        Examples
        --------
        Each bucket travels as float16 (in this world of one rank, to nobody):

        >>> import torch, torch.distributed as dist
        >>> from paceline import DistributedDataParallel
        >>> from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        >>> dist.init_process_group(
        ...     "gloo", store=dist.HashStore(), rank=0, world_size=1
        ... )
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        >>> model(torch.full((1, 2), 3.0)).sum().backward()
        >>> model.module.weight.grad
        tensor([[3., 3.]])
        >>> dist.destroy_process_group()
        """
        self._check_hook(hook)
        if self._comm_hooks or self._has_builtin_hook:
            raise RuntimeError(
                _ONCE.format("register_comm_hook", "register_builtin_comm_hook")
            )
        self._comm_hooks.append((hook, state))
        try:
            self._session.attach_comm_hook()
        except BaseException:
            self._comm_hooks.clear()
            raise
        self._comm_hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Have a hook that torch has written in C++ average the gradients.

        Parameters
        ----------
        comm_hook_type : torch.distributed.BuiltinCommHookType
            ``ALLREDUCE``, which is what happens anyway, or ``FP16_COMPRESS``.
        """
        kinds = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        if not isinstance(comm_hook_type, kinds):
            raise TypeError(
                f"comm_hook_type is {comm_hook_type!r}: give a "
                "torch.distributed.BuiltinCommHookType"
            )
        if self._comm_hooks or self._has_builtin_hook:
            raise RuntimeError(
                _ONCE.format("register_builtin_comm_hook", "register_comm_hook")
            )
        if comm_hook_type == kinds.FP16_COMPRESS:
            self.register_comm_hook(
                self.process_group, default_hooks.fp16_compress_hook
            )
        self._has_builtin_hook = True
        self._comm_hook_name = str(comm_hook_type)

    def _check_hook(self, hook: Any) -> None:
        """Raise for what cannot be a hook, as torch does."""
        if not callable(hook):
            self._refuse_hook(TypeError, "Communication hook must be callable.")
        signature = inspect.signature(hook)
        bucket = signature.parameters.get("bucket")
        kind = dist.GradBucket  # type: ignore[attr-defined]
        if bucket is not None and not self._is_as(bucket.annotation, kind):
            self._refuse_hook(
                ValueError,
                "Communication hook: bucket annotation should be dist.GradBucket.",
            )
        future = torch.futures.Future[torch.Tensor]
        if not self._is_as(signature.return_annotation, future):
            self._refuse_hook(
                ValueError,
                "Communication hook: return annotation should be "
                "torch.futures.Future[torch.Tensor].",
            )
        if self._session.options.strict:
            self._check_comm_hook(hook)  # type: ignore[no-untyped-call]  # torch's own

    def _refuse_hook(self, kind: type[Exception], message: str) -> None:
        self._log_and_throw(kind, message)  # type: ignore[no-untyped-call]

    @staticmethod
    def _is_as(annotation: Any, expected: Any) -> bool:
        """Tell whether an annotation is as expected; one that is text may be."""
        return annotation in (inspect.Parameter.empty, expected) or isinstance(
            annotation, str
        )


# Called in backwards, which may be part of what torch.compile is given.
torch_core.skip_frames(
    GradBucket.of.__func__,  # type: ignore[attr-defined]
    _as_reals,
    CommHookRunner.post,
    CommHookRunner._post,
    CommHookRunner._begin,
    CommHookRunner.abandon,
    CommHookRunner.refuse,
    CommHookRunner.finish,
    CommHookRunner.finish_sparse,
    CommHookRunner._result_of,
    CommHookRunner._reducer.fget,  # type: ignore[attr-defined]
    _sparse_gradient,
)
