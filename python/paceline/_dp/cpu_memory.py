"""Memory of a replica's copies on the CPU, kept from call to call.

To allocate and fill fresh memory takes longer than to copy a model into memory that is
there.  All copies of a replica are places in one block.  A block of which anything else
still holds a place (what a graph has saved, what a user keeps) is never written again:
it is theirs, and the replica has a fresh one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from paceline._compat import torch_core

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
                torch._foreach_copy_(self._places, list(tensors))
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
