"""What a replica on the CPU has of a model: copies, and the way of their gradients.

Copies of what is trained are made in the graph, so that gradients reach the module by
autograd itself.
"""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch.nn import Parameter

from paceline._compat import torch_graph
from paceline._dp.replicate import as_original, has_hooks


def copies_of(
    tensors: dict[int, torch.Tensor], is_recorded: bool
) -> tuple[dict[int, torch.Tensor], InnerBackwards | None]:
    """Return copies, in the graph of those that are trained, and what watches it."""
    if torch_graph.is_transformed():
        return {key: tensor.clone() for key, tensor in tensors.items()}, None
    trained = {k: t for k, t in tensors.items() if is_recorded and t.requires_grad}
    watch = InnerBackwards(list(trained.values())) if trained else None
    # One node runs all that is behind it: hooks, and graphs of earlier forwards, must
    # not run for a tensor that no replica has used.
    together = {k: t for k, t in trained.items() if t.is_leaf and not has_hooks(t)}
    copies: dict[int, torch.Tensor] = {}
    if together:
        made = _Copies.apply(watch, *together.values())  # type: ignore[no-untyped-call]
        copies = dict(zip(together, made, strict=True))
    for key, tensor in tensors.items():
        copy = copies.get(key)
        if copy is None and key in trained:
            copy = tensor.clone()
            copy.register_hook(watch.see)  # type: ignore[no-untyped-call,union-attr]
        elif copy is None:
            copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        if key in trained and type(tensor) is Parameter and not tensor.__dict__:
            copy.__class__ = Parameter  # as as_original() does, in less time
            copies[key] = copy
        else:
            copies[key] = as_original(copy, tensor)
    return copies, watch


class InnerBackwards:
    """Backward passes through a replica's copies while the replica's forward runs.

    They give gradients to the module's own parameters.  A forward that sets ``p.grad``
    to None afterwards does so to its copies, and leaves them.
    """

    def __init__(self, originals: list[torch.Tensor]) -> None:
        self._originals = originals
        self._thread: int | None = None
        self._n_seen = 0
        self._has_grads = False

    def begin(self) -> None:
        """Note that the forward begins, on this thread."""
        self._thread = threading.get_ident()

    def see(self, *_: Any) -> None:
        """Note a backward, before it gives the parameters gradients."""
        if self._thread == threading.get_ident():
            if not self._n_seen:
                grads = (t.grad for t in self._originals if t.is_leaf)
                self._has_grads = any(grad is not None for grad in grads)
            self._n_seen += 1

    def end(self) -> None:
        """Leave no gradients where replica 0 left none; warn if that is a guess."""
        self._thread = None
        if not self._n_seen or (self._has_grads and self._n_seen == 1):
            return
        if not self._has_grads:
            for tensor in self._originals:
                if tensor.is_leaf:
                    tensor.grad = None
        warnings.warn(
            "the forward of DataParallel runs backward passes: in a replica p.grad = "
            "None has no effect, as parameters are copies and gradients go to those of "
            "the module itself. If replica 0 leaves no gradient, none is left by the "
            "others; if it leaves some, all of the others' are added. Use "
            "torch.autograd.grad in forward",
            stacklevel=2,
        )


class _Copies(torch.autograd.Function):
    """Copies of parameters; gradients go to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, watch: InnerBackwards, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.watch, ctx.tensors = watch, tensors
        return tuple([tensor.detach().clone() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.see()
        # Hooks that were set since the forward are called with zeros, as by torch.
        return (
            None,
            *(
                torch.zeros_like(tensor) if grad is None and has_hooks(tensor) else grad
                for tensor, grad in zip(ctx.tensors, grads, strict=True)
            ),
        )
