"""Backward passes that a forward runs itself, through a replica's copies."""

from __future__ import annotations

import warnings

import torch
from torch.nn import Module

from paceline._dp.replicate import tensors_of


class InnerBackwards:
    """Tracks the backwards inside one forward whose replicas run in order.

    They give gradients to the module's own parameters.  A forward that then sets
    ``p.grad = None`` does so on its copies; the module keeps those gradients.

    Attributes
    ----------
    were_seen : bool
        Whether a replica that has copies ran one.
    """

    def __init__(self, parts: list[Module]) -> None:
        self._parts = parts
        self._trained: list[torch.Tensor] | None = None
        self._grads: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self.were_seen = False

    def __enter__(self) -> None:
        """Note that a replica's forward begins."""
        if self._trained is None:
            found = tensors_of(self._parts).values()
            self._trained = [t for t in found if t.requires_grad and t.is_leaf]
        self._grads = [tensor.grad for tensor in self._trained]
        self._versions = [-1 if g is None else g._version for g in self._grads]

    def __exit__(self, *_: object) -> None:
        """Remove gradients if replica 0 left none; warn if that is a guess."""
        trained, had_grads = self._trained or [], any(v >= 0 for v in self._versions)
        n_backwards = 0  # as far as parameters show them
        for tensor, before, version in zip(
            trained, self._grads, self._versions, strict=True
        ):
            grad = tensor.grad
            n_new = 1 if grad is not before else 0
            if grad is not None and grad is before:
                n_new = grad._version - version
            n_backwards = max(n_backwards, n_new)
        self._grads = []
        self.were_seen |= n_backwards > 0
        if not n_backwards or (had_grads and n_backwards == 1):
            return
        if not had_grads:
            for tensor in trained:
                tensor.grad = None
        warnings.warn(
            "the forward of DataParallel runs backward passes: in a replica, "
            "p.grad = None has no effect, because parameters are copies and gradients "
            "go to the module itself. If replica 0 leaves no gradients, those of the "
            "others are dropped; if it leaves some, all are added. Use "
            "torch.autograd.grad in forward instead",
            stacklevel=2,
        )
