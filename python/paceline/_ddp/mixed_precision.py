"""``mixed_precision``: a forward with copies of the parameters in fewer bits.

::

    parameter (full) -- to(param_dtype), recorded --> copy, in the module's slot
    .grad (full) <------ autograd ------------------- gradient of the copy
         |  ^
         |  +-- to(full) ------- mean over the ranks, of reduce_dtype
         +-- to(reduce_dtype) -> bucket

Parameters never change their dtype.  A copy stands in the slot of ``_parameters`` while
the module runs, and again in the backward for recomputation (checkpoints).  The reducer
has a :class:`StandIn` for each parameter; its ``.grad`` is the parameter's, converted
to another dtype in both directions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline._compat import torch_core, torch_groups
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
        dtypes = [getattr(config, name, config) for name in _FIELDS]
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


class _Copies:
    """The copies of one forward, and the hook on its outputs that puts them back.

    It refers to the module weakly: that may keep its outputs, and with them the hook.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        self._module, self._dtype = weakref.ref(module), dtype
        self._made: dict[torch.Tensor, Any] = {}  # one for all names of a parameter

    def swap(self) -> _Swap | None:
        """Put copies in place of the parameters that have none there yet."""
        module = self._module()
        slots = list(_slots(module, self._dtype)) if module is not None else []
        for _, _, parameter in slots:
            if parameter not in self._made:
                self._made[parameter] = parameter.to(self._dtype)
        return _Swap(slots, self._made) if slots else None

    def __call__(self, gradient: torch.Tensor) -> None:
        with torch.enable_grad():  # for a retained graph, copies are made again
            swap = self.swap()
        self._made = {}  # a loss that is kept keeps this hook
        if swap is not None:  # the first output with a gradient does it
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
    try:
        output = module(*inputs, **kwargs)
    finally:
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
    _Copies.swap,
    _Copies.__call__,
    StandIn.grad.fget,  # type: ignore[attr-defined]
    StandIn.grad.fset,  # type: ignore[attr-defined]
)
