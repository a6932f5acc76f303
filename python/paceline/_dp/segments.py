"""Which tensors of a model travel together, and where they lie on each device.

A segment is one block of memory a device: tensors of one dtype and kind, each with the
strides that it has in the model, at multiples of 64 bytes.

What replicas are given are parts of the blocks.  A block of which anything else still
holds a part (what a graph has saved, what a user keeps) is never written again: it is
theirs, and the segment has a fresh one.

Each part has a storage of its own, which torch does not resize: a forward that would
have a tensor grow over the one behind it gets torch's error.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Embedding, EmbeddingBag, Module

from paceline._compat import torch_core
from paceline._dp.group import Group
from paceline._dp.replicate import has_more_behind, tensors_of
from paceline._dp.transfers import is_native

if TYPE_CHECKING:
    from paceline import _native

SEGMENT_BYTES = 1 << 20
"""The least, and what the first has, whose gradients come last in a backward: nothing
is left to do while they travel.  Each further one has up to four times as much."""
_FEW, _FEW_BYTES = 6, 16 << 20
"""A model has so few but for the first, where they are no larger: each costs time."""
_MANY, _MOST_BYTES = 64, 32 << 20
"""A large model has so many, where they are no larger."""
COMPARED_BYTES = 1 << 20
"""To compare takes as long as this takes on a link: less is sent, whatever it is."""
_ALIGNMENT = 64
_SUMMED = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.complex64, torch.complex128)
)


def can_travel(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor can be part of a segment."""
    return (
        is_native(tensor)
        and torch_core.is_dense(tensor)
        and tensor.numel() > 0
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


class Segment:
    """Tensors that travel together.

    Attributes
    ----------
    tensors : list of torch.Tensor
        The model's own.
    forms : list of (torch.Size, tuple of int)
        Shape and strides of each at first: a backward may come when it has others.
    offsets, byte_offsets : list of int
        Of each, in elements of the block, and in bytes.
    dtype : torch.dtype
        Of all of them.
    is_parameter : bool
        They are parameters; the others are buffers.
    is_trained : bool
        Their gradients come back.
    blocks, slots : by member; None, and [], for member 0
    sums : list of _native.GradientSum
        What adds up gradients, where no backward uses it.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        is_parameter: bool,
        is_trained: bool,
        group: Group,
    ) -> None:
        self.dtype = dtype
        self._group = group
        self.width = dtype.itemsize
        self.is_parameter = is_parameter
        self.is_trained = is_trained
        self.forms: list[tuple[torch.Size, tuple[int, ...]]] = []
        self.tensors: list[torch.Tensor] = []
        self.offsets: list[int] = []
        self.byte_offsets: list[int] = []
        self.n_elems = 0
        self.blocks: list[torch.Tensor | None] = [None] * len(group)
        self.slots: list[list[torch.Tensor]] = [[] for _ in range(len(group))]
        self._storages: list[list[int]] = [[] for _ in range(len(group))]
        self.sums: list[_native.GradientSum] = []
        self._n_holders = [0] * len(group)
        self._had: list[Any] = [None] * len(group)

    def add(self, tensor: torch.Tensor) -> None:
        """Give a tensor a place at the end."""
        step = max(1, _ALIGNMENT // self.width)
        self.tensors.append(tensor)
        self.forms.append((tensor.shape, tensor.stride()))
        self.offsets.append(self.n_elems)
        self.byte_offsets.append(self.n_elems * self.width)
        self.n_elems += -(-tensor.numel() // step) * step

    @property
    def n_bytes(self) -> int:
        """Of the block."""
        return self.n_elems * self.width

    def stamp(self) -> list[tuple[int, int]]:
        """Return what changes where somebody writes to the model's tensors."""
        return [(t._version, t.data_ptr()) for t in self.tensors]

    # ---- blocks ---------------------------------------------------------------------

    def make_writable(self, member: int, keeps_values: bool) -> torch.Tensor | None:
        """Have a block that nothing else holds; return the one that something held.

        With `keeps_values`, the fresh one has the values of the other.
        """
        before, n_holders = self.blocks[member], self._n_holders[member]
        if before is not None and self._count_holders(member) == n_holders:
            return None
        with torch.inference_mode(False), torch.no_grad():
            device = self._group.devices[member]
            block = torch.empty(self.n_elems, dtype=self.dtype, device=device)
            if before is not None and keeps_values:
                block.copy_(before)
            self.blocks[member] = block
            self.slots[member] = self._parts(block)
        self._storages[member] = list(map(torch_core.storage_of, self.slots[member]))
        self._n_holders[member] = self._count_holders(member)
        return before

    def _count_holders(self, member: int) -> int:
        return torch_core.count_holders(self._storages[member])

    def _parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the places of the tensors in a block, each a storage by itself.

        It reaches to the next one: a small buffer, as observers have, may grow a bit.
        """
        storage, parts = block.untyped_storage(), []
        ends = [*self.byte_offsets[1:], self.n_bytes]
        places = zip(self.forms, self.byte_offsets, ends, strict=True)
        for form, begin, end in places:
            part = storage[begin:end]
            empty = torch.empty(0, dtype=self.dtype, device=block.device)
            parts.append(empty.set_(part, 0, *form))
        return parts

    def views(self, block: torch.Tensor) -> list[torch.Tensor]:
        """Return the places of the tensors in a block."""
        return [
            block.as_strided(*form, offset + block.storage_offset())
            for form, offset in zip(self.forms, self.offsets, strict=True)
        ]

    # ---- what members have ----------------------------------------------------------

    def record(self, member: int, stamp: list[Any]) -> None:
        """Note that a member's block holds what the model had at a stamp."""
        self._had[member] = stamp, [slot._version for slot in self.slots[member]]

    def seems_to_have(self, member: int, stamp: list[Any]) -> bool:
        """Tell whether neither side was written to since, as far as the host sees."""
        counts = [slot._version for slot in self.slots[member]]
        return bool(self._had[member] == (stamp, counts))

    def travelling(
        self, members: range
    ) -> tuple[list[torch.Tensor], list[int], int, list[torch.Tensor | None]]:
        """Return what the native side has to know to send it to some members."""
        blocks = [b if k in members else None for k, b in enumerate(self.blocks)]
        return self.tensors, self.byte_offsets, self.n_bytes, blocks

    # ---- gradients ------------------------------------------------------------------

    def take_sum(self) -> _native.GradientSum:
        """Return what adds up gradients, for one backward."""
        try:
            return self.sums.pop()
        except IndexError:
            return self._group.native.gradient_sum(  # type: ignore[no-any-return]
                1, self.slots[1], self.byte_offsets, self.n_bytes
            )


class HeldBlocks:
    """Blocks that segments have given up since something else held them.

    It may be a replica that leads to itself, which the garbage collector alone frees:
    before such ones fill a device, it is called.
    """

    def __init__(self) -> None:
        self._blocks: list[StorageWeakRef] = []
        self._most_copies = 2

    def add(self, block: torch.Tensor) -> None:
        """Take note of a block."""
        self._blocks.append(StorageWeakRef(block.untyped_storage()))  # type: ignore[no-untyped-call]

    def limit(self, n_blocks: int) -> None:
        """Free those that nobody can reach, where they are many copies of a model.

        Parameters
        ----------
        n_blocks : int
            Of one copy.
        """
        for generation in (1, 2):
            if self._count() <= self._most_copies * n_blocks:
                return
            gc.collect(generation)
        if self._count() > self._most_copies * n_blocks:
            self._most_copies *= 2  # they are in use

    def _count(self) -> int:
        self._blocks = [
            block
            for block in self._blocks
            if not block.expired()  # type: ignore[no-untyped-call]
        ]
        return len(self._blocks)


class Layout:
    """The segments of a model, and the tensors that travel by themselves.

    Attributes
    ----------
    segment_bytes : int
        What a segment has at the most; a larger tensor is one of its own.
    segments : list of Segment
    others : list of torch.Tensor
        Sparse ones, those of classes of their own, those without elements (a forward
        may resize them), and such.
    tensors : list of torch.Tensor
        Those of all segments in turn, then the others.
    ids : list of int
        What stands at each place, part by part: its parameters, then its buffers.
    is_kept : bool
        It does not hold on to a graph, as by parameters that ``functional_call`` put
        there.
    """

    def __init__(self, parts: list[Module], group: Group) -> None:
        self.segments: list[Segment] = []
        self.others: list[torch.Tensor] = []
        self._group = group
        travelling: list[tuple[torch.Tensor, bool]] = []
        self._tables = [p for p in parts if isinstance(p, (Embedding, EmbeddingBag))]
        sparse = {id(of._parameters.get("weight")) for of in self._tables if of.sparse}
        parameters = {id(p) for part in parts for p in part._parameters.values()}
        summed = parameters - sparse
        for key, tensor in tensors_of(parts).items():
            is_summed = tensor.dtype in _SUMMED and key in summed
            if can_travel(tensor) and (is_summed or not tensor.requires_grad):
                travelling.append((tensor, key in parameters))
            else:
                self.others.append(tensor)
        self.segment_bytes = _segment_bytes(sum(t.nbytes for t, _ in travelling))
        opened: dict[Any, tuple[Segment, int]] = {}
        for tensor, is_parameter in travelling:
            self._place(tensor, is_parameter, opened)
        for segment in self.segments:
            if len(segment.tensors) == 1:  # a block of its very size
                segment.n_elems = segment.tensors[0].numel()
        placed = [tensor for segment in self.segments for tensor in segment.tensors]
        self.ids, self.tensors = ids_of(parts), placed + self.others
        self.is_kept = all(tensor.is_leaf for tensor in self.tensors)
        self._forms = self._forms_now()

    def _place(
        self,
        tensor: torch.Tensor,
        is_parameter: bool,
        opened: dict[Any, tuple[Segment, int]],
    ) -> None:
        is_trained = tensor.requires_grad
        n_bytes = tensor.nbytes + _ALIGNMENT
        key = tensor.dtype, is_parameter, is_trained
        is_alone = n_bytes > self.segment_bytes or (
            is_trained and has_more_behind(tensor)
        )
        segment, limit = (None, 0) if is_alone else opened.get(key, (None, 0))
        if segment is None or segment.n_bytes + n_bytes > limit:
            segment = Segment(*key, self._group)
            if not is_alone:
                opened[key] = segment, self._limit(is_trained)
            self.segments.append(segment)
        segment.add(tensor)

    def _limit(self, is_trained: bool) -> int:
        """Return what the next segment may have at the most."""
        if not is_trained:
            return self.segment_bytes
        n_before = sum(segment.is_trained for segment in self.segments)
        return min(self.segment_bytes, SEGMENT_BYTES << 2 * n_before)

    @property
    def room_bytes(self) -> int:
        """What a member adds up gradients in: all rows of a segment."""
        most = max((s.n_bytes for s in self.segments if s.is_trained), default=0)
        return min(most * (len(self._group) - 1), 2 * _MOST_BYTES)

    def fits(self, parts: Sequence[Module]) -> bool:
        """Tell whether the model still has the tensors that this was made of.

        A buffer that a forward has made anew takes the place of the one before.
        """
        ids = ids_of(parts)
        if self.ids != ids and not self._take_buffers(parts, ids):
            return False
        return self._forms == self._forms_now()

    def _take_buffers(self, parts: Sequence[Module], ids: list[int]) -> bool:
        """Put buffers into the places of others; tell whether nothing else differs."""
        if len(self.ids) != len(ids):
            return False
        pairs = set(zip(self.ids, ids, strict=True))
        changed = {before: now for before, now in pairs if before != now}
        buffers = {
            id(b): b for p in parts for b in p._buffers.values() if b is not None
        }
        segments = [segment for segment in self.segments if not segment.is_parameter]
        places = {id(tensor) for segment in segments for tensor in segment.tensors}
        if (
            not len(pairs) == len(set(self.ids)) == len(set(ids))  # one for one
            or not changed.keys() <= places
            or not buffers.keys() >= set(changed.values())
        ):
            return False
        moved = {before: buffers[now] for before, now in changed.items()}
        if not all(map(can_travel, moved.values())):
            return False
        for tensors in (self.tensors, *(segment.tensors for segment in segments)):
            tensors[:] = [moved.get(id(tensor), tensor) for tensor in tensors]
        self.ids = ids
        return True

    def _forms_now(self) -> list[Any]:
        """Return what may change of these very tensors."""
        return [*map(_form, self.tensors), *(table.sparse for table in self._tables)]


def _segment_bytes(n_bytes: int) -> int:
    """Return what a segment of a model of so many bytes has at the most."""
    few, many = (-(-n_bytes // n // _ALIGNMENT) * _ALIGNMENT for n in (_FEW, _MANY))
    return max(SEGMENT_BYTES, min(few, _FEW_BYTES), min(many, _MOST_BYTES))


def ids_of(parts: Sequence[Module]) -> list[int]:
    """Return which tensors a model has, by the ids of all that its parts name."""
    return [
        id(tensor)
        for part in parts
        for tensors in (part._parameters, part._buffers)
        for tensor in tensors.values()
    ]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    lazy = tensor.is_conj(), tensor.is_neg()
    wants = tensor.requires_grad
    alone = wants and has_more_behind(tensor)
    return tensor.shape, strides, tensor.dtype, lazy, wants, alone
