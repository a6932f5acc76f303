"""One forward through a wrapper, as its outputs know it."""

from __future__ import annotations

from typing import Any

import torch

from paceline import _native, _torch


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
    """

    __slots__ = ("_is_first", "_is_synchronised", "_reducer")

    def __init__(self, reducer: _native.Reducer) -> None:
        self._reducer = reducer
        self._is_synchronised = reducer.sync
        self._is_first = True

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

    def __call__(self, gradient: torch.Tensor) -> None:
        self._reducer.on_output(self._is_synchronised, self._is_first)
        self._is_first = False
