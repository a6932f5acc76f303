"""torch's state of a thread, so that a replica's thread computes like the caller's.

Grad mode, inference mode, autocast, a default device, flushing of denormal numbers and
context variables are carried over.  Modes that see each operation, and transforms,
cannot be.  If :func:`sees_operations` finds one, replicas run one after the other on
the caller's own thread, which is always right.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable
from typing import Any

import torch

from paceline import _gpu
from paceline._compat import torch_modes


def sees_operations() -> bool:
    """Tell whether a mode or transform is on that another thread would not see."""
    return bool(
        torch_modes.binds_to_thread()
        or not all(map(torch_modes.is_device_mode, torch_modes.function_modes()))
    )


def _flushes_denormals(smallest: float = sys.float_info.min) -> bool:
    """Tell whether this thread takes denormal numbers for zero."""
    return smallest / 2.0 == 0.0


class State:
    """The state of the thread that creates it, for use in another."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", _gpu.machine.device_type)
        ]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.modes = torch_modes.function_modes()
        self.flush = _flushes_denormals()

    def run(
        self,
        context: contextvars.Context,
        n_cores: int,
        call: Callable[[], Any],
    ) -> Any:
        """Return what ``call`` returns in this state, on a thread of this package."""
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
            if is_cast:  # else an inner autocast clears the cache as it ends
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
