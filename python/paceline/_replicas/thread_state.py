"""What torch keeps a thread, so that a replica's thread computes as the caller would.

Grad mode, inference mode, autocast, a default device, flushing of denormal numbers and
context variables are carried over.  What cannot be (modes that see each operation,
hooks on saved tensors, transforms) is found by :func:`binds_to_thread`: the replicas
then run one after the other on the caller's own thread, which is right by construction.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any

import torch

from paceline._compat import torch_flags, torch_modes
from paceline._replicas.errors import UnsupportedCallError

_AUTOCAST_DEVICES = ("cpu", "cuda")


def binds_to_thread() -> bool:
    """Tell whether something is on that another thread would not see."""
    return sees_operations() or torch_modes.has_saved_tensors_hooks()


def sees_operations() -> bool:
    """Tell the same of all but hooks on saved tensors."""
    return bool(
        torch_modes.binds_by_other_means()
        or not all(map(torch_modes.is_device_mode, torch_modes.function_modes()))
    )


def default_device() -> str:
    """Return the default device that is on, where nothing else is.

    Raise UnsupportedCallError if something is on that another process would not see.
    """
    modes = torch_modes.function_modes()
    is_device = bool(modes) and all(map(torch_modes.is_device_mode, modes))
    if not is_device or torch_modes.binds_by_other_means():
        raise UnsupportedCallError(
            "something is on that sees the operations of this process alone: a mode "
            "(__torch_function__, __torch_dispatch__), a transform of torch.func, or "
            "tracing"
        )
    return str(modes[-1].device)


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
        self.modes = torch_modes.function_modes()
        self.flush = torch_flags.flushes_denormals()

    def run(
        self,
        context: contextvars.Context,
        n_cores: int,
        call: Callable[[], Any],
    ) -> Any:
        """Return what ``call`` returns in this state, on a thread that is ours."""
        if torch.get_num_threads() != n_cores:
            torch.set_num_threads(n_cores)
        if self.flush != torch_flags.flushes_denormals():
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
                torch_modes.push_function_mode(mode)
            try:
                return context.run(call)
            finally:
                for _ in self.modes:
                    torch_modes.pop_function_mode()
                if is_cast:
                    torch.autocast_decrement_nesting()
