"""What a replica on the CPU has of a model: copies, made anew in each forward.

Nothing is gained there by blocks of memory that are kept: to bring a copy up to date
costs what a new one does, and gradients need no way of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from paceline._compat import torch_graph
from paceline._dp.inner_backwards import InnerBackwards
from paceline._dp.replicate import as_original, has_more_behind, unused_gradient


def copies_of(
    tensors: Sequence[torch.Tensor], inner: InnerBackwards
) -> list[torch.Tensor]:
    """Return copies, in the graph of those that are trained."""
    if torch_graph.is_transformed():
        return [tensor.clone() for tensor in tensors]
    is_recorded = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_recorded):
        trained = [is_recorded and tensor.requires_grad for tensor in tensors]
        # One node runs all that is behind it.
        pairs = enumerate(zip(tensors, trained, strict=True))
        together = [
            i for i, (t, is_trained) in pairs if is_trained and not has_more_behind(t)
        ]
        made: Sequence[torch.Tensor] = ()
        if together:
            made = _Copies.apply(inner, *[tensors[i] for i in together])  # type: ignore[no-untyped-call]
        in_graph = dict(zip(together, made, strict=True))
        return [
            _copy_of(tensor, in_graph.get(i), is_trained, inner)
            for i, (tensor, is_trained) in enumerate(zip(tensors, trained, strict=True))
        ]


def _copy_of(
    tensor: torch.Tensor,
    copy: torch.Tensor | None,
    is_trained: bool,
    inner: InnerBackwards,
) -> torch.Tensor:
    if copy is None and is_trained:
        copy = tensor.clone()
        copy.register_hook(inner.see)  # type: ignore[no-untyped-call]
    elif copy is None:
        copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if is_trained and type(tensor) is Parameter and not tensor.__dict__:
        copy.__class__ = Parameter  # as as_original() does, in less time
        return copy
    return as_original(copy, tensor)


class _Copies(torch.autograd.Function):
    """Copies of parameters; gradients go to the parameters."""

    @staticmethod
    def forward(
        ctx: Any, inner: InnerBackwards, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inner, ctx.tensors = inner, tensors
        return tuple([tensor.detach().clone() for tensor in tensors])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inner.see()
        pairs = zip(ctx.tensors, grads, strict=True)
        return None, *(
            unused_gradient(t) if grad is None else grad for t, grad in pairs
        )
