"""``mixed_precision``: a forward with copies of the parameters in fewer bits.

::

    parameter (full) -- to(param_dtype), recorded --> copy, in the module's slot
    .grad (full) <------ autograd ------------------- gradient of the copy
         |  ^
         |  +-- to(full) ------- mean over the ranks, of reduce_dtype
         +-- to(reduce_dtype) -> bucket

Parameters never change their dtype.  A copy stands in the slot of ``_parameters`` while
the module runs, and again in a backward, from the first output or checkpoint that it
reaches, for recomputation.  The reducer has a :class:`StandIn` for each parameter; its
``.grad`` is the parameter's, converted to another dtype in both directions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline._compat import torch_core, torch_graph, torch_groups
from paceline._ddp.model_spec import Model

_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class Precision:
    """Dtypes of forwards, of gradients' averages, and of buffers; None: unchanged."""

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None  # None: as param_dtype
    buffer_dtype: torch.dtype | None

    @classmethod
    def of(cls, config: Any) -> Precision:
        """Read torch's ``_MixedPrecision``, or an object with its fields."""
        get: Any = functools.partial(getattr, config)  # flags are those of FSDP
        casts = get("cast_root_forward_inputs", get("cast_forward_inputs", True))
        if not casts or get("keep_low_precision_grads", False):
            raise NotImplementedError(
                f"mixed_precision is {config!r}: inputs are always cast, and gradients "
                "have the parameters' dtype: leave out cast_root_forward_inputs=False "
                "and keep_low_precision_grads=True"
            )
        dtypes: list[Any] = [get(name, "missing") for name in _FIELDS]
        if any(dtype not in _DTYPES for dtype in dtypes):
            raise TypeError(
                f"mixed_precision is {config!r}: give torch.nn.parallel.distributed."
                "_MixedPrecision, whose param_dtype, reduce_dtype and buffer_dtype are "
                "float16, bfloat16, float32, float64 or None"
            )
        return cls(*dtypes)


def check(module: torch.nn.Module, model: Model, precision: Precision | None) -> None:
    """Raise if copies cannot replace the model's parameters."""
    if precision is None:
        return
    if model.sparse:
        raise NotImplementedError(
            "mixed_precision is not supported for modules with sparse=True, whose "
            "gradients autograd cannot convert: leave out one of the two"
        )
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise NotImplementedError(
            "mixed_precision is not supported for parts that torch.jit has compiled: "
            "use torch.autocast in the module's forward instead"
        )


# ---- a forward ----------------------------------------------------------------------

_Slot = tuple[dict[str, Any], str, torch.Tensor]


def _slots(module: torch.nn.Module, dtype: torch.dtype) -> Iterator[_Slot]:
    """Yield (``_parameters``, name, parameter) of each with another dtype."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            full = f"{path}.{name}" if path else name
            if (
                parameter is not None
                and parameter.is_floating_point()
                and parameter.dtype != dtype
                and full not in ignored
            ):
                yield part._parameters, name, parameter


class _Swap:
    """Puts copies in place of a module's parameters, until :meth:`restore`."""

    _slots: Sequence[_Slot] = ()  # dynamo makes, and deletes, one without __init__

    def __init__(self, slots: list[_Slot], copies: dict[torch.Tensor, Any]) -> None:
        self._slots, self._copies = slots, copies
        for owner, name, parameter in slots:
            owner[name] = copies[parameter]

    def restore(self) -> None:
        """Put the parameters back, except where the module has replaced a copy."""
        slots, self._slots = self._slots, []
        for owner, name, parameter in slots:
            if owner.get(name) is self._copies[parameter]:
                owner[name] = parameter

    # The engine calls this object at the end of the backward, or drops it on failure.
    __call__ = __del__ = restore


def _copy_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in the parameter's graph, with its class and its attributes."""
    kind, copy = type(parameter), parameter.to(dtype)
    if kind is torch.nn.Parameter:
        copy.__class__ = kind  # the same without a node of the graph
    elif type(copy) is not kind:
        copy = copy.as_subclass(kind)
    shared, own = vars(parameter), vars(copy)  # own: of a class with its data there
    copy.__dict__ = {**shared, **own} if own else shared
    return copy


class _Copies:
    """The copies of one forward, and the hook that puts them back in its backward.

    It refers to the module weakly: that may keep its outputs, and with them the hook.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = weakref.ref(module), dtype
        self._made: dict[torch.Tensor, Any] = {}  # one for all names of a parameter
        self._last: Callable[[], _Swap | None] = lambda: None  # in a backward

    def swap(self) -> _Swap | None:
        """Put copies in place of the parameters that have none there yet."""
        module = self._module()
        slots = list(_slots(module, self._dtype)) if module is not None else []
        with torch.enable_grad():  # they require gradients in evaluations too
            for _, _, parameter in slots:
                if parameter not in self._made:
                    self._made[parameter] = _copy_of(parameter, self._dtype)
        return _Swap(slots, self._made) if slots else None

    def __call__(self, gradient: torch.Tensor | None = None) -> None:
        if (last := self._last()) is not None and last._slots:
            return
        swap = self.swap()
        self._made = {}  # a loss that is kept keeps this hook; later, copies are new
        if swap is not None:  # the first output or checkpoint does it
            self._last = weakref.ref(swap)
            torch_core.at_end_of_backward(swap)


def run(
    module: torch.nn.Module,
    dtype: torch.dtype,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return the module's output for these inputs, computed in ``dtype``."""
    inputs, kwargs = torch_groups.cast_inputs(dtype, inputs, kwargs)
    copies = _Copies(module, dtype)
    swap = copies.swap()
    before = torch_graph.exchange_before_recomputing(copies)
    try:
        output = module(*inputs, **kwargs)
    finally:
        torch_graph.exchange_before_recomputing(before)
        if swap is not None:
            swap.restore()
    torch_core.hook_outputs(output, copies)
    return output


# ---- gradients ----------------------------------------------------------------------


class StandIn(torch.Tensor):
    """Replaces a parameter in the reducer: its gradient, in another dtype."""

    parameter: torch.Tensor
    reduce_dtype: torch.dtype

    @classmethod
    def of(cls, parameter: torch.Tensor, dtype: torch.dtype) -> StandIn:
        """Make one with the parameter's shape and strides; its values are unused."""
        self = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        self = self.as_subclass(cls)
        self.parameter, self.reduce_dtype = parameter, dtype
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """The parameter's gradient, converted in both directions."""
        gradient = self.parameter.grad
        return None if gradient is None else gradient.detach().to(self.reduce_dtype)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        parameter = self.parameter
        if value is not None:
            value = value.to(parameter.dtype)
            if parameter.grad is not None:
                with torch.no_grad():  # the user or a graph may hold this tensor
                    parameter.grad.copy_(value)
                return
        parameter.grad = value

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook on the parameter."""
        return self.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def _post_accumulate_grad_hooks(self) -> Any:
        return self.parameter._post_accumulate_grad_hooks

    @_post_accumulate_grad_hooks.setter
    def _post_accumulate_grad_hooks(self, hooks: Any) -> None:
        self.parameter._post_accumulate_grad_hooks = hooks


def prepare(model: Model, precision: Precision | None) -> list[Any]:
    """Cast the buffers; return the tensors that a reducer takes as parameters.

    Returns ``model.trainable`` itself if all gradients keep their dtype.
    """
    if precision is None:
        return model.trainable
    for _, owner, name in model.buffers:
        buffer = owner[name]
        if buffer.is_floating_point():
            buffer.data = buffer.to(dtype=precision.buffer_dtype)
    for _, p in model.parameters:  # for code that reads these of torch's class
        dtype = precision.param_dtype if p.is_floating_point() else None
        low = torch.empty(p.shape, dtype=dtype or p.dtype, device="meta")
        vars(p).update(_mp_param=low, _fp_param=p.data)
    dtype = precision.reduce_dtype or precision.param_dtype
    stand_ins = [
        StandIn.of(p, dtype)
        if dtype is not None and p.is_floating_point() and p.dtype != dtype
        else p
        for p in model.trainable
    ]
    is_any = any(type(p) is StandIn for p in stand_ins)
    return stand_ins if is_any else model.trainable


def release(reduced: Sequence[torch.Tensor]) -> None:
    """Free the memory of stand-ins after a reducer has read their shape and strides."""
    for tensor in reduced:
        if type(tensor) is StandIn:
            tensor.untyped_storage().resize_(0)


torch_core.skip_frames(
    run,
    _slots,
    _Swap.__init__,
    _Swap.restore,
    _copy_of,
    _Copies.swap,
    _Copies.__call__,
    StandIn.grad.fget,  # type: ignore[attr-defined]
    StandIn.grad.fset,  # type: ignore[attr-defined]
)
