"""Backward passes that a forward runs itself, through a replica's copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from paceline._compat import torch_graph
from paceline._dp.replicate import tensors_of


class InnerBackwards:
    """Tracks the backwards inside one forward whose replicas run in order.

    They give gradients to the module's own parameters.  A forward that then sets
    ``p.grad = None`` does so on its copies; the module keeps those gradients.

    Attributes
    ----------
    were_seen : bool
        Whether a replica that has copies ran one.
    hooks : dict
        Called with the gradients of copies, until the forward clears it.
    """

    def __init__(self, parts: list[Module]) -> None:
        self._parts = parts
        self._is_running = False
        self._tasks: set[int] = set()
        self._has_grads = False
        self.were_seen = False
        self.hooks: dict[int, Callable[[torch.Tensor], None]] = {0: self.see}

    def __enter__(self) -> None:
        """Note that a replica's forward begins."""
        self._is_running = True
        self._tasks = set()

    def see(self, *_: Any) -> None:
        """Note a backward, before it gives gradients to the parameters."""
        if self._is_running:
            if not self._tasks:
                originals = self._originals()
                self._has_grads = any(p.grad is not None for p in originals)
            self._tasks.add(torch_graph.current_task())

    def _originals(self) -> list[torch.Tensor]:
        found = tensors_of(self._parts).values()
        return [tensor for tensor in found if tensor.requires_grad and tensor.is_leaf]

    def __exit__(self, *_: object) -> None:
        """Remove gradients if replica 0 left none; warn if that is a guess."""
        self._is_running = False
        self.were_seen |= bool(self._tasks)
        if not self._tasks or (self._has_grads and len(self._tasks) == 1):
            return
        if not self._has_grads:
            for tensor in self._originals():
                tensor.grad = None
        warnings.warn(
            "the forward of DataParallel runs backward passes: in a replica, "
            "p.grad = None has no effect, because parameters are copies and gradients "
            "go to the module itself. If replica 0 leaves no gradients, those of the "
            "others are dropped; if it leaves some, all are added. Use "
            "torch.autograd.grad in forward instead",
            stacklevel=2,
        )
