"""A wrapper's work at the end of each backward, once the averages are in place."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_core
from paceline._ddp import group_comm


class StepCallbacks:
    """Runs callbacks inside the backward: ``Reducer.on_finish``.

    It refers to neither the wrapper nor the reducer, which owns it: a dropped wrapper
    must be freed at once.
    """

    def __init__(self) -> None:
        self.always: list[Callable[[], object]] = []  # after every step
        self._once: list[Callable[[], object]] = []

    def attach(self, reducer: _native.Reducer | None) -> None:
        """Attach this to a reducer, if there is anything to call."""
        if reducer is not None:
            reducer.on_finish = self if self.always or self._once else None

    def once(self, reducer: _native.Reducer, call: Callable[[], object]) -> None:
        """Call ``call`` after the next step."""
        self._once.append(call)
        reducer.on_finish = self

    def __call__(self) -> None:
        once, self._once = self._once, []
        for call in (*self.always, *once):
            call()


def wait_for(futures: Iterable[Any]) -> None:
    """Wait for work that a hook has begun; signals end the wait."""
    for future in futures:
        group_comm.wait_for(future)


def take_optimizers(
    parameters: Iterable[torch.nn.Parameter],
) -> Callable[[], object] | None:
    """Return what steps the optimizers of ``_apply_optimizer_in_backward``, or None.

    This removes torch's hooks, which step by gradients of one rank.  Call the result
    after the reducer's step.
    """
    owners = [p for p in parameters if getattr(p, "_in_backward_optimizers", None)]
    applied = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    handles = getattr(applied, "param_to_optim_hook_handle_map", {})
    for parameter in owners:
        for handle in handles.get(parameter, ()):
            handle.remove()
    return functools.partial(_step_optimizers, owners) if owners else None


def _step_optimizers(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Step by the averages; the gradients used become None."""
    for parameter in parameters:
        for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        parameter.grad = None


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(StepCallbacks.__call__, wait_for, _step_optimizers)
