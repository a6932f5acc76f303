"""Who else holds the memory of tensors: torch counts it, without a public name.

A storage is counted by each tensor on it, and once by its own Python object.  Tensors
are Python's, or saved by autograd's graphs, which keep the values that they need
wherever a parameter goes on: only Python's, and arrays, which hold one, are aliases.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch


def _uses_of(storage: Any) -> int:
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


@functools.cache
def _uses_without_tensors() -> int:
    return _uses_of(torch.empty(1).untyped_storage()) - 1


def aliased(
    tensors: Sequence[torch.Tensor], known: Iterable[torch.Tensor] = ()
) -> int | None:
    """Return the index of the first tensor whose memory another one shares, or None.

    The tensors are strided, each of them once; `known` are others that may share.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    numbers = [storage._cdata for storage in storages]
    held: dict[int, int] = {}
    for number in numbers:
        held[number] = held.get(number, 0) + 1
    suspect = {
        storage._cdata
        for storage in storages
        if _uses_of(storage) - _uses_without_tensors() > held[storage._cdata]
    }
    if not suspect:
        return None
    own = set(map(id, (*tensors, *known)))
    shared = {
        number
        for other in gc.get_objects()
        if issubclass(type(other), torch.Tensor)
        and id(other) not in own
        and (number := number_of(other)) in suspect
    }
    return next((i for i, number in enumerate(numbers) if number in shared), None)


def number_of(tensor: torch.Tensor) -> int | None:
    """Return what two tensors over one memory have in common; None: it has none."""
    try:
        number: int = tensor.untyped_storage()._cdata
        return number
    except Exception:
        return None  # sparse, fake, lazy, or of a subclass that has none
