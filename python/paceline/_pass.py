"""One forward through a wrapper, as its outputs know it."""

from __future__ import annotations

import threading
from typing import Any

import torch

from paceline import _native, _torch


class Passes(threading.local):
    """The forwards under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.open: list[Pass | None] = []


class Demand:
    """That the next backward is synchronised, whatever its forward was.

    Made by ``model.reducer.prepare_for_backward()``; it ends with the step that it has
    asked for.

    Attributes
    ----------
    step : int
        The reducer's number of steps when it was made; -1 before.
    """

    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = -1


class Pass:
    """The hook on a forward's outputs: it says that the backward of them begins.

    The end of that is then known too: also where every gradient comes out of a backward
    inside it, as with reentrant checkpointing.  Each forward has one of its own, which
    remembers whether ``no_sync`` was on, and that one forward has one backward to come,
    however many its outputs.

    Parameters
    ----------
    reducer : paceline._native.Reducer
        Of the wrapper that is about to run its module.
    demand : Demand
        The wrapper's.
    is_first : bool
        Whether a backward of the outputs is the one that the forward awaits; False for
        a second watch of the same outputs.
    """

    __slots__ = ("_demand", "_is_first", "_is_synchronised", "_reducer")

    def __init__(
        self, reducer: _native.Reducer, demand: Demand, is_first: bool = True
    ) -> None:
        self._reducer = reducer
        self._demand = demand
        self._is_synchronised = reducer.sync
        self._is_first = is_first

    def watch(self, output: Any) -> bool:
        """Have the beginning of the backward of ``output`` noticed, if it can be."""
        is_watched = False
        if isinstance(output, torch.Tensor):
            leaves = [output]
        else:
            leaves = _torch.tensor_leaves(output)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self)  # type: ignore[no-untyped-call]
                is_watched = True
        return is_watched

    def forward_ends(self, output: Any) -> None:
        """Watch what the forward has returned, and say so to the peers."""
        self._reducer.forward_ends(self.watch(output))

    def forward_fails(self) -> None:
        """Say that the module has raised: no backward comes of this."""
        self._reducer.forward_fails()

    def __call__(self, gradient: torch.Tensor) -> None:
        reducer = self._reducer
        is_synchronised = self._is_synchronised or self._demand.step == reducer.step
        reducer.on_output(is_synchronised, self._is_first)
        self._is_first = False
