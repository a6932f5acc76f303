"""What a replica on the CPU has of a model: copies, and the way of their gradients.

Copies of what is trained are made in the graph, so that gradients reach the module by
autograd itself.  All plain parameters are places in one block, which is kept from call
to call: to allocate and fill fresh memory takes longer than to copy a model into memory
that is there.  A block of which anything else still holds a place (what a graph has
saved, what a user keeps) is never written again: it is theirs, and the replica has a
fresh one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import Parameter

from paceline._compat import torch_core, torch_graph, torch_modes
from paceline._dp.replicate import as_original, has_hooks

_ALIGNMENT = 64


class Memory:
    """Memory of the copies of one replica, for one call at a time."""

    def __init__(self) -> None:
        self._form: list[Any] = []
        self._block: torch.Tensor | None = None
        self._n_holders = 0
        self._places: list[torch.Tensor] = []

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of strided tensors; each has a count of versions of its own."""
        form = [(t.dtype, t.shape, t.stride()) for t in tensors]
        with torch.no_grad():
            if self._is_held() or form != self._form:
                self._block = self._make(tensors)
                self._n_holders = torch_core.count_holders(self._block)
                self._form = form
            if tensors:
                torch_core.copy_all(self._places, list(tensors))
            return [place.detach() for place in self._places]

    def _is_held(self) -> bool:
        if self._block is None:
            return True
        return torch_core.count_holders(self._block) != self._n_holders

    def _make(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a block with places for copies of these."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        block = torch.empty(sum(rooms), dtype=torch.uint8, device="cpu")
        begins = accumulate(rooms, initial=0)
        self._places = [
            _place(block[begin : begin + size], tensor)
            for begin, size, tensor in zip(begins, sizes, tensors, strict=False)
        ]
        return block


def _place(room: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return memory as a tensor of another's form, with a count of its own."""
    place = room.view(tensor.dtype)
    if torch_core.is_dense(tensor):
        begin = place.storage_offset()
        return place.as_strided(tensor.shape, tensor.stride(), begin).data
    return place.view(tensor.shape).data


# ---- in the graph -------------------------------------------------------------------


def copies_of(
    tensors: dict[int, torch.Tensor], is_recorded: bool, memory: Memory
) -> tuple[dict[int, torch.Tensor], InnerBackwards | None]:
    """Return copies, in the graph of those that are trained, and what watches it."""
    if torch_graph.is_transformed():
        return {key: tensor.clone() for key, tensor in tensors.items()}, None
    # One node runs all that is behind it: hooks, and graphs of earlier forwards, must
    # not run for a tensor that no replica has used.
    plain = {
        key: tensor
        for key, tensor in tensors.items()
        if type(tensor) is Parameter
        and tensor.layout is torch.strided
        and tensor.is_leaf
        and not has_hooks(tensor)
    }
    copies: dict[int, torch.Tensor] = {}
    if not torch_modes.count_dispatch_modes():
        copies = dict(zip(plain, memory.copies(list(plain.values())), strict=True))
    trained = {k: t for k, t in tensors.items() if is_recorded and t.requires_grad}
    watch = InnerBackwards(list(trained.values())) if trained else None
    together = [key for key in trained if key in copies]
    if together:
        leaves = [copies[key] for key in together]
        made = _Copies.apply(watch, leaves, *map(trained.get, together))  # type: ignore[no-untyped-call]
        copies |= zip(together, made, strict=True)
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
    """Copies of parameters, made before; gradients go to the parameters."""

    @staticmethod
    def forward(
        ctx: Any,
        watch: InnerBackwards,
        copies: list[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.watch, ctx.tensors = watch, tensors
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.watch.see()
        # Hooks that were set since the forward are called with zeros, as by torch.
        return (
            None,
            None,
            *(
                torch.zeros_like(tensor) if grad is None and has_hooks(tensor) else grad
                for tensor, grad in zip(ctx.tensors, grads, strict=True)
            ),
        )
