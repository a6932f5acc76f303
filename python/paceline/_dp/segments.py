"""Which tensors of a model travel together, and where they lie on each device.

A segment is one block of memory on each device: tensors of one dtype and kind, with the
strides that they have in the model, at multiples of 64 bytes.

Replicas get parts of the blocks.  If anything else still holds a part of a block (a
graph that saved it, a user), the block is never written again: the holder keeps it, and
the segment gets a new one.

Each part has its own storage, which torch does not resize: a forward that would grow a
tensor over the next one gets torch's error.
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
from paceline._dp.replicate import Entries, has_more_behind
from paceline._dp.transfers import is_native

if TYPE_CHECKING:
    from paceline import _native

SEGMENT_BYTES = 1 << 20
"""The least size, and that of the first segment: its gradients come last in a backward,
so no work overlaps their transfer.  Each further one has up to four times as much."""
_FEW, _FEW_BYTES = 6, 16 << 20
"""A model has this few segments while none is larger: each one costs time."""
_MANY, _MOST_BYTES = 64, 32 << 20
"""A large model has this many segments while none is larger."""
COMPARED_BYTES = 1 << 20
"""Comparing takes as long as sending this over a link: less is always sent."""
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
        Initial shape and strides of each: it may have others during a backward.
    byte_offsets : list of int
        The place of each in the block.
    dtype : torch.dtype
        The dtype of all tensors.
    is_parameter : bool
        Whether they are parameters; else they are buffers.
    is_trained : bool
        Whether their gradients come back.
    blocks, slots : by member; None, and [], for member 0
    sums : list of _native.GradientSum
        Sums that no backward uses at present.
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
        self.byte_offsets.append(self.n_elems * self.width)
        self.n_elems += -(-tensor.numel() // step) * step

    @property
    def n_bytes(self) -> int:
        """The size of the block."""
        return self.n_elems * self.width

    def stamp(self) -> list[tuple[int, int]]:
        """Return values that change when the model's tensors are written to."""
        return [(t._version, t.data_ptr()) for t in self.tensors]

    # ---- blocks ---------------------------------------------------------------------

    def new_block(self, member: int) -> torch.Tensor:
        """Return memory on a member's device."""
        device = self._group.devices[member]
        return torch.empty(self.n_elems, dtype=self.dtype, device=device)

    def make_writable(self, member: int, keeps_values: bool) -> torch.Tensor | None:
        """Ensure that nothing else holds the block; return the held one it replaced.

        With `keeps_values`, the new block has the values of the old one.
        """
        before, n_holders = self.blocks[member], self._n_holders[member]
        if before is not None and self._count_holders(member) == n_holders:
            return None
        with torch.inference_mode(False), torch.no_grad():
            block = self.new_block(member)
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
        """Return the places of the tensors in a block, each with its own storage.

        A storage reaches to the next one: small buffers of observers may grow a bit.
        """
        storage, parts = block.untyped_storage(), []
        ends = [*self.byte_offsets[1:], self.n_bytes]
        places = zip(self.forms, self.byte_offsets, ends, strict=True)
        for form, begin, end in places:
            part = storage[begin:end]
            empty = torch.empty(0, dtype=self.dtype, device=block.device)
            parts.append(empty.set_(part, 0, *form))
        return parts

    def view(self, block: torch.Tensor, i: int) -> torch.Tensor:
        """Return the place of a tensor in a block, which begins its storage."""
        return block.as_strided(*self.forms[i], self.byte_offsets[i] // self.width)

    # ---- what members have ----------------------------------------------------------

    def record(self, member: int, stamp: list[Any]) -> None:
        """Note that a member's block holds the model's values of a stamp."""
        self._had[member] = stamp, [slot._version for slot in self.slots[member]]

    def seems_to_have(self, member: int, stamp: list[Any]) -> bool:
        """Tell whether neither side was written to since, as far as the host sees."""
        counts = [slot._version for slot in self.slots[member]]
        return bool(self._had[member] == (stamp, counts))

    def travelling(
        self, members: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[int], int, list[torch.Tensor | None]]:
        """Return what the native side needs to send the segment to some members."""
        blocks = [b if k in members else None for k, b in enumerate(self.blocks)]
        return self.tensors, self.byte_offsets, self.n_bytes, blocks

    # ---- gradients ------------------------------------------------------------------

    def parts(self) -> list[list[int]]:
        """Return the tensors in groups, by their numbers: one group has no hooks."""
        parts: dict[int, list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            parts.setdefault(i if has_more_behind(tensor) else -1, []).append(i)
        return list(parts.values())

    def take_sum(self) -> _native.GradientSum:
        """Return a sum of gradients for one backward."""
        try:
            return self.sums.pop()
        except IndexError:
            return self._group.native.gradient_sum(  # type: ignore[no-any-return]
                1, self.slots[1], self.byte_offsets, self.n_bytes
            )


class HeldBlocks:
    """Blocks that segments gave up because something else held them.

    The holder may be a replica in a reference cycle, which only the garbage collector
    frees.  So the collector is called before such blocks fill a device.
    """

    def __init__(self) -> None:
        self._blocks: list[StorageWeakRef] = []
        self._most_copies = 2

    def add(self, block: torch.Tensor) -> None:
        """Note a block."""
        self._blocks.append(StorageWeakRef(block.untyped_storage()))  # type: ignore[no-untyped-call]

    def limit(self, n_blocks: int) -> None:
        """Free unreachable blocks, if there are many copies of a model.

        Parameters
        ----------
        n_blocks : int
            The number of blocks of one copy.
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
        The maximum size of a segment; a larger tensor gets its own segment.
    segments : list of Segment
    others : list of torch.Tensor
        Sparse tensors, tensors of subclasses, tensors without elements (a forward may
        resize them), and the like.
    tensors : list of torch.Tensor
        Those of all segments in turn, then the others.
    is_kept : bool
        Whether it may be kept: it holds no graph, as parameters do that
        ``functional_call`` put into the model.
    """

    def __init__(self, parts: list[Module], entries: Entries, group: Group) -> None:
        self.segments: list[Segment] = []
        self.others: list[torch.Tensor] = []
        self._group = group
        travelling: list[tuple[torch.Tensor, bool]] = []
        self._tables = [p for p in parts if isinstance(p, (Embedding, EmbeddingBag))]
        sparse = {id(of._parameters.get("weight")) for of in self._tables if of.sparse}
        parameters = {id(p) for of in entries.dicts()[::2] for p in of.values()}
        summed = parameters - sparse
        for key, tensor in entries.by_id().items():
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
            if len(segment.tensors) == 1:  # a block of exactly its size
                segment.n_elems = segment.tensors[0].numel()
        placed = [tensor for segment in self.segments for tensor in segment.tensors]
        self._ids, self.tensors = entries.ids(), placed + self.others
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
        is_alone = n_bytes > self.segment_bytes
        segment, limit = (None, 0) if is_alone else opened.get(key, (None, 0))
        if segment is None or segment.n_bytes + n_bytes > limit:
            segment = Segment(*key, self._group)
            if not is_alone:
                opened[key] = segment, self._limit(is_trained)
            self.segments.append(segment)
        segment.add(tensor)

    def _limit(self, is_trained: bool) -> int:
        """Return the maximum size of the next segment."""
        if not is_trained:
            return self.segment_bytes
        n_before = sum(segment.is_trained for segment in self.segments)
        return min(self.segment_bytes, SEGMENT_BYTES << 2 * n_before)

    @property
    def room_bytes(self) -> int:
        """The size of a member's memory to add up gradients: all rows of a segment."""
        most = max((s.n_bytes for s in self.segments if s.is_trained), default=0)
        return min(most * (len(self._group) - 1), 2 * _MOST_BYTES)

    def fits(self, entries: Entries) -> bool:
        """Tell whether the model still has the tensors of this layout.

        A buffer that a forward has replaced takes the place of the old one.
        """
        if self._ids != entries.ids() and not self._take_buffers(entries):
            return False
        return self._forms == self._forms_now()

    def _take_buffers(self, entries: Entries) -> bool:
        """Put buffers in the places of old ones; tell whether nothing else differs."""
        ids = entries.ids()
        if len(self._ids) != len(ids):
            return False
        pairs = set(zip(self._ids, ids, strict=True))
        changed = {before: now for before, now in pairs if before != now}
        buffers = {
            id(b): b
            for of in entries.dicts()[1::2]
            for b in of.values()
            if b is not None
        }
        segments = [segment for segment in self.segments if not segment.is_parameter]
        places = {id(tensor) for segment in segments for tensor in segment.tensors}
        if (
            not len(pairs) == len(set(self._ids)) == len(set(ids))  # one for one
            or not changed.keys() <= places
            or not buffers.keys() >= set(changed.values())
        ):
            return False
        moved = {before: buffers[now] for before, now in changed.items()}
        if not all(map(can_travel, moved.values())):
            return False
        for tensors in (self.tensors, *(segment.tensors for segment in segments)):
            tensors[:] = [moved.get(id(tensor), tensor) for tensor in tensors]
        self._ids = ids
        return True

    def _forms_now(self) -> list[Any]:
        """Return the properties of these tensors that may change."""
        return [*map(_form, self.tensors), *(table.sparse for table in self._tables)]


def _segment_bytes(n_bytes: int) -> int:
    """Return the maximum size of a segment, in a model of `n_bytes`."""
    few, many = (-(-n_bytes // n // _ALIGNMENT) * _ALIGNMENT for n in (_FEW, _MANY))
    return max(SEGMENT_BYTES, min(few, _FEW_BYTES), min(many, _MOST_BYTES))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    lazy = tensor.is_conj(), tensor.is_neg()
    return tensor.shape, strides, tensor.dtype, lazy, tensor.requires_grad
