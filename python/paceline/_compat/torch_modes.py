"""Probes of torch's state per thread: modes, transforms, hooks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._device import DeviceContext

_C = torch._C
count_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
push_function_mode: Callable[[Any], None] = _C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
is_torch_function_enabled: Callable[[], bool] = _C._is_torch_function_enabled
is_tracing: Callable[[], bool] = _C._is_tracing
# Whether torch.export traces, in any thread; torch 2.7 and newer.
is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)
_hooks: Any = _C._autograd
_top_hooks = getattr(_hooks, "_top_saved_tensors_default_hooks", None)

_UNCHANGED = nullcontext()  # torch's contexts cost microseconds each


def grad_mode(is_on: bool) -> AbstractContextManager[Any]:
    """Return a context that records a graph, or none; nothing in it may change that."""
    is_as_before = torch.is_grad_enabled() == is_on
    return _UNCHANGED if is_as_before else torch.set_grad_enabled(is_on)


def without_inference() -> AbstractContextManager[Any]:
    """Return a context that is not in inference mode, but may record a graph."""
    is_on = torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if is_on else _UNCHANGED


def is_traced() -> bool:
    """While torch exports: tell whether it is this thread that it traces."""
    return torch.compiler.is_dynamo_compiling() or count_dispatch_modes() > 0


def function_modes() -> list[Any]:
    """Return the modes that intercept torch's functions on this thread."""
    n_modes = _C._len_torch_function_stack()
    return [_C._get_function_stack_at(i) for i in range(n_modes)]


def is_device_mode(mode: Any) -> bool:
    """Tell whether a mode is a default device, which other threads can also use."""
    return type(mode) is DeviceContext


def binds_to_thread() -> bool:
    """Tell whether this thread has state that others lack, besides function modes.

    Hooks on saved tensors do not count: they see replica 0's tensors.
    """
    return bool(
        count_dispatch_modes()
        or not is_torch_function_enabled()
        or has_transform()
        or is_tracing()
    )


def has_transform() -> bool:
    """Tell whether a transform of torch.func is on, such as vmap or grad."""
    return _C._functorch.peek_interpreter_stack() is not None


def without_transforms() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are plain, even if a transform is on."""
    context: AbstractContextManager[Any] = _C._DisableFuncTorch()
    return context


def without_torch_function() -> AbstractContextManager[Any]:
    """Return a context in which no mode or subclass intercepts torch's functions."""
    context: AbstractContextManager[Any] = _C.DisableTorchFunction()
    return context


def has_saved_tensors_hooks() -> bool:
    """Tell whether hooks on saved tensors are on in this thread, or forbidden."""
    if _are_hooks_forbidden():
        return True
    if _top_hooks is not None:
        return _top_hooks(True) is not None
    try:  # forbidding them raises if some are on
        _hooks._saved_tensors_hooks_disable("paceline asks whether hooks are on")
    except RuntimeError:
        return True
    finally:
        _hooks._saved_tensors_hooks_enable()
    return False


def is_mutation_allowed() -> bool:
    """Tell whether ``allow_mutation_on_saved_tensors`` is on, in any thread.

    It copies a tensor that is changed if an operation has saved a tensor with the same
    address: replicas save tensors with other ones.
    """
    name = "_allow_mutation_on_saved_tensors_enabled"
    return bool(getattr(torch.autograd.graph, name, False))


def _are_hooks_forbidden() -> bool:
    return _hooks._saved_tensors_hooks_get_disabled_error_message() is not None


def without_saved_tensors_hooks(call: Callable[[], Any]) -> Any:
    """Return the result of a call made without hooks on saved tensors.

    If torch cannot remove them, hooks that return tensors unchanged are put on top.
    Then torch does not detect that a saved tensor was changed in place.
    """
    if _are_hooks_forbidden() or not has_saved_tensors_hooks():
        return call()
    if _top_hooks is None:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            return call()
    pairs = []
    while (pair := _top_hooks(True)) is not None:
        pairs.append(pair)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        return call()
    finally:
        for pair in reversed(pairs):
            _hooks._push_saved_tensors_default_hooks(*pair)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
