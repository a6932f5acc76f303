"""What torch keeps a thread, so that a replica's thread computes as the caller would.

Grad mode, inference mode, autocast, a default device, flushing of denormal numbers and
context variables are carried over.  What cannot be (modes that see each operation,
hooks on saved tensors, transforms) is told by :func:`binds_to_thread`: the replicas
then run one after the other on the caller's own thread, which is right by construction.
Private names of torch stand here and in ``_torch.py`` alone.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext

_AUTOCAST_DEVICES = ("cpu", "cuda")


def _zero(*_: Any) -> int:
    return 0


def _none(*_: Any) -> None:
    return None


_C = torch._C
_n_function_modes = getattr(_C, "_len_torch_function_stack", _zero)
_n_dispatch_modes = getattr(_C, "_len_torch_dispatch_stack", _zero)
_function_mode: Callable[[int], Any] = getattr(_C, "_get_function_stack_at", _none)
_transform = getattr(getattr(_C, "_functorch", None), "peek_interpreter_stack", _none)
_saved_hooks = getattr(_C._autograd, "_top_saved_tensors_default_hooks", _none)
_saved_hooks_error = getattr(
    _C._autograd, "_saved_tensors_hooks_get_disabled_error_message", _none
)
_is_function_enabled = getattr(_C, "_is_torch_function_enabled", None)


def has_dispatch_modes() -> bool:
    """Tell whether something sees each operation below autograd."""
    return bool(_n_dispatch_modes())


def binds_to_thread() -> bool:
    """Tell whether something is on that another thread would not see."""
    if _n_dispatch_modes() or _transform() is not None:
        return True
    for i in range(_n_function_modes()):
        if type(_function_mode(i)) is not DeviceContext:
            return True
    return (
        _saved_hooks(True) is not None
        or _saved_hooks_error() is not None
        or (_is_function_enabled is not None and not _is_function_enabled())
        or _C._is_tracing()
    )


def _flushes_denormals(smallest: float = sys.float_info.min) -> bool:
    return smallest / 2.0 == 0.0


class State:
    """The state of the thread that makes it, to be entered in another."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_DEVICES
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.modes = [_function_mode(i) for i in range(_n_function_modes())]
        self.flush = _flushes_denormals()

    def run(
        self,
        context: contextvars.Context,
        n_cores: int,
        call: Callable[[], Any],
    ) -> Any:
        """Return what ``call`` returns in this state, on a thread that is ours."""
        if torch.get_num_threads() != n_cores:
            torch.set_num_threads(n_cores)
        if self.flush != _flushes_denormals():
            torch.set_flush_denormal(self.flush)
        is_cast = any(is_enabled for _, is_enabled, _ in self.autocast)
        with torch.inference_mode() if self.inference else contextlib.nullcontext():
            torch.set_grad_enabled(self.grad)
            for device, is_enabled, dtype in self.autocast:
                torch.set_autocast_enabled(device, is_enabled)
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(self.autocast_cache)
            if is_cast:  # an autocast inside is not the outermost one
                torch.autocast_increment_nesting()
            for mode in self.modes:
                _C._push_on_torch_function_stack(mode)
            try:
                return context.run(call)
            finally:
                for _ in self.modes:
                    _C._pop_torch_function_stack()
                if is_cast:
                    torch.autocast_decrement_nesting()
