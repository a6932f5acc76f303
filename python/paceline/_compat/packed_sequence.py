"""The parts of scatter and gather that are written in Python.

C walks the nested containers (``csrc/python/dp/tree.c``).  This file has the marker for
values that must not be split, the copy of a container's other attributes, and the split
and join of packed sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")


class Replicated(Generic[T]):
    """Marks a value that each replica receives whole."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"replicate({self.value!r})"


def copy_attributes(value: Any, made: Any, children: Sequence[str] | None) -> None:
    """Copy a container's attributes to another one, except the children.

    Copies slots and ``default_factory`` too, but not the value of a
    ``cached_property``, which was computed from the children.
    """
    others = set(children or ())
    for base in type(made).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, cached_property):
                others.add(name)
            elif type(member) is MemberDescriptorType:
                with suppress(AttributeError):  # not set, or read-only
                    member.__set__(made, member.__get__(value))
    own = getattr(value, "__dict__", {})
    if own is value:  # a dict that is its own attributes
        object.__setattr__(made, "__dict__", made)
    elif own:
        vars(made).update((k, v) for k, v in own.items() if k not in others)


def layout_of(tensor: torch.Tensor) -> tuple[bool, tuple[int, ...] | None]:
    """Tell whether a tensor can be split by rows, and its shape; None if nested."""
    if tensor.is_nested:
        return False, None
    return tensor.layout is torch.strided, tuple(tensor.shape)


def repeats_row(leaf: Any, dim: int) -> bool:
    """Tell whether a tensor is one number, repeated along a dimension.

    Only numbers on a GPU that are not expanded make the host wait for the GPU.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.numel() != leaf.shape[dim]:
        return False
    return leaf.stride(dim) == 0 or bool((leaf == leaf.narrow(dim, 0, 1)).all())


def packed_rows(packed: PackedSequence) -> int:
    """Return how many sequences are packed."""
    sizes = packed.batch_sizes
    return int(sizes[0]) if sizes.numel() else 0


def _places(batch_sizes: torch.Tensor) -> list[tuple[int, int]]:
    """Return (start in ``data``, number of sequences) for each time step."""
    places = []
    start = 0
    for n in batch_sizes.tolist():
        places.append((start, n))
        start += n
    return places


def _rows(packed: PackedSequence) -> list[int]:
    """Return each packed sequence's index in the batch, in packed order.

    The host waits for the GPU if the sorted indices are there.
    """
    if packed.sorted_indices is None:
        return list(range(packed_rows(packed)))
    rows: list[int] = packed.sorted_indices.tolist()
    return rows


def _sent(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Return integers on a device; from pinned memory, so that the host goes on."""
    is_gpu = device.type == "cuda"
    made = torch.tensor(numbers, dtype=torch.int64, pin_memory=is_gpu)
    return made.to(device, non_blocking=True)


def _pack(
    data: torch.Tensor, steps: list[list[int]], rows: list[int] | None
) -> PackedSequence:
    """Pack the entries ``steps`` of ``data``; ``rows`` as :func:`_rows` gives them."""
    entries = [entry for step in steps for entry in step]
    where = _sent(entries, data.device)
    sizes = torch.tensor([len(step) for step in steps], dtype=torch.int64)
    order = None if rows is None else _sent(rows, data.device)
    # PackedSequence computes the unsorted indices itself.
    return PackedSequence(data.index_select(0, where), sizes, order)


def split_packed(packed: PackedSequence, sizes: Sequence[int]) -> list[PackedSequence]:
    """Split a packed sequence by the rows of its batch; autograd tracks the parts."""
    rows = _rows(packed)
    places = _places(packed.batch_sizes)
    parts = []
    first = 0
    for size in sizes:
        mine = [i for i, row in enumerate(rows) if first <= row < first + size]
        steps = [[start + i for i in mine if i < n] for start, n in places]
        order = None
        if packed.sorted_indices is not None:
            order = [rows[i] - first for i in mine]
        parts.append(_pack(packed.data, [step for step in steps if step], order))
        first += size
    return parts


def join_packed(parts: Sequence[PackedSequence]) -> PackedSequence:
    """Join packed sequences into one, with their batches one after another.

    It has no sorted indices if none of the parts has them and the whole is already
    sorted by length.
    """
    sequences: list[tuple[int, list[int]]] = []  # (row, entries) of each sequence
    n_entries = 0
    n_rows = 0
    for part in parts:
        places = _places(part.batch_sizes)
        for i, row in enumerate(_rows(part)):
            entries = [n_entries + start + i for start, n in places if i < n]
            sequences.append((n_rows + row, entries))
        n_entries += part.data.shape[0]
        n_rows += packed_rows(part)
    sequences.sort()
    ordered = sorted(sequences, key=lambda sequence: -len(sequence[1]))
    is_marked = any(part.sorted_indices is not None for part in parts)
    longest = len(ordered[0][1]) if ordered else 0
    steps = [
        [entries[t] for _, entries in ordered if t < len(entries)]
        for t in range(longest)
    ]
    rows = [row for row, _ in ordered] if is_marked or ordered != sequences else None
    return _pack(torch.cat([part.data for part in parts]), steps, rows)


def join_arrays(arrays: Sequence[np.ndarray[Any, Any]], dim: int) -> Any:
    """Join arrays, those without dimensions to a vector; masked ones stay masked."""
    import numpy as np

    arrays = [np.atleast_1d(array) for array in arrays]
    if any(isinstance(array, np.ma.MaskedArray) for array in arrays):
        return np.ma.concatenate(arrays, axis=dim)  # type: ignore[no-untyped-call]
    return np.concatenate(arrays, axis=dim)
