"""Moves arguments to the devices of replicas, and outputs back, in the graph."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from paceline import _gpu, _native
from paceline._compat import torch_core, torch_graph, torch_modes
from paceline._dp.group import Streams

NATIVE = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.complex64, torch.complex128)
)
"""The dtypes that the native side copies; torch copies all others."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_native(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is plain memory that the native side can copy."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in NATIVE
        and not tensor.is_nested
    )


def is_by_torch() -> bool:
    """Tell whether torch must make the copies, for transforms and modes to see them."""
    return (
        torch_graph.is_transformed()
        or torch_modes.is_tracing()
        or bool(torch_modes.count_dispatch_modes())
    )


# ---- copies -------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Copies a tensor of one member to another."""

    @staticmethod
    def forward(
        ctx: Any, streams: Streams, way: tuple[int, int], tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.streams, ctx.way = streams, way
        return _copied(streams, way, [tensor])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, target = ctx.way
        with ctx.streams.on():
            return None, None, *move(ctx.streams, (target, source), grads)


def _copied(
    streams: Streams, way: tuple[int, int], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return copies on another member, outside the graph."""
    device = streams.group.devices[way[1]]
    copies, blocks, places = [], [], []
    for tensor in tensors:
        copy = tensor.detach()
        if is_native(copy):
            blocks.append(_as_block(copy))
            copy = torch.empty_like(blocks[-1], device=device)
            places.append(copy)
        else:
            copy = copy.to(device, non_blocking=True, copy=True)
        copies.append(copy)
    if blocks:
        _copy_all(streams, way, blocks, places)
    return copies


def _copy_all(
    streams: Streams,
    way: tuple[int, int],
    blocks: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
) -> None:
    """Copy blocks to places of the same layout, except for dimensions of one entry."""
    flat = [
        (block.view(-1), place.view(-1))
        if block.is_contiguous() and place.is_contiguous()
        else (block, place)
        for block, place in zip(blocks, places, strict=True)
    ]
    source, target = way
    given, taken = [block for block, _ in flat], [place for _, place in flat]
    streams.group.native.copy(streams.numbers, source, given, target, taken)


def _as_block(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values that is one block of memory."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if torch_core.is_dense(tensor) else tensor.contiguous()


def move(streams: Streams, way: tuple[int, int], tensors: Sequence[Any]) -> list[Any]:
    """Return copies on another member, each with its own node; None for None.

    Parameters
    ----------
    streams : Streams
        The streams that order the copies.
    way : tuple of int
        The source member and the target member.
    tensors : sequence of torch.Tensor or None
        Tensors of the source member.
    """
    if streams.group.is_cpu:
        return [None if tensor is None else tensor.clone() for tensor in tensors]
    moved, device = list(tensors), streams.group.devices[way[1]]
    is_recorded, by_torch = torch.is_grad_enabled(), is_by_torch()
    together = []
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if by_torch or torch_graph.is_batched(tensor):
            moved[i] = tensor.to(device, non_blocking=True, copy=True)
        elif is_recorded and tensor.requires_grad:
            moved[i] = _Copy.apply(streams, way, tensor)  # type: ignore[no-untyped-call]
        else:
            together.append(i)
    copies = _copied(streams, way, [tensors[i] for i in together])
    for i, copy in zip(together, copies, strict=True):
        moved[i] = copy
    return moved


def at_member(
    streams: Streams, way: tuple[int, int], tensor: torch.Tensor
) -> torch.Tensor:
    """Return a tensor for another member: itself, if both are on one GPU."""
    source, target = way
    if streams.group.indices[source] == streams.group.indices[target]:
        return tensor
    moved: torch.Tensor = move(streams, way, [tensor])[0]
    return moved


_LEAST_PINNED = 1 << 16


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor from outside the group on one of its devices.

    A large tensor goes through pinned memory, so that devices fetch their rows in
    parallel, and the host goes on.
    """
    is_large = tensor.numel() * tensor.element_size() >= _LEAST_PINNED
    if is_large and tensor.is_cpu and is_native(tensor) and not tensor.requires_grad:
        tensor = _gpu.machine.pinned(tensor)
    return tensor.to(device, non_blocking=True)


# ---- arguments ----------------------------------------------------------------------


def to_member(
    streams: Streams, tree: _native.Tree, parts: Any, is_recorded: bool, member: int
) -> Any:
    """Return a replica's arguments, with tensors on its device.

    Arrays stay what they are, and so do tensors already on its GPU.  `parts` has the
    leaves by replica; `is_recorded` tells whether the caller records a graph.
    """
    leaves = parts[member]
    if streams.group.is_cpu:
        if member > 0:
            pairs = zip(leaves, parts[0], strict=True)
            leaves = [_own_leaf(leaf, first, is_recorded) for leaf, first in pairs]
        return tree.unflatten(leaves)
    return tree.unflatten(_placed(streams, tree, leaves, member))


class _Shared(torch.autograd.Function):
    """A tensor in the same memory, with its own version counter."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def _own_leaf(leaf: Any, of_replica_0: Any, is_recorded: bool) -> Any:
    """Return an input in the same memory that a later replica may change in place.

    Inputs that are not split are copied.  Parts of a batch are views, which would share
    the version counter by which autograd detects changes of saved tensors in place.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf is of_replica_0 or torch_graph.is_transformed():
        return leaf.clone()
    if leaf.requires_grad:
        return leaf.clone() if is_recorded else _Shared.apply(leaf)  # type: ignore[no-untyped-call]
    if type(leaf) is not torch.Tensor or leaf.is_inference():
        return leaf
    return leaf.data


def _travels(tree: _native.Tree, i: int, leaf: Any) -> bool:
    """Tell whether a leaf is a tensor that need not stay on the CPU.

    The sizes of a PackedSequence must.
    """
    return isinstance(leaf, torch.Tensor) and not (
        leaf.dtype is torch.int64
        and leaf.dim() == 1
        and leaf.is_cpu
        and tree.path(i).endswith(".batch_sizes")
    )


def _placed(
    streams: Streams, tree: _native.Tree, leaves: Sequence[Any], member: int
) -> list[Any]:
    placed = list(leaves)
    by_source: dict[int, list[int]] = {}
    group = streams.group
    for i, leaf in enumerate(leaves):
        if not _travels(tree, i, leaf):
            continue
        source = group.member_of(leaf, 0)
        if source is None:
            placed[i] = _sent(leaf, group.devices[member])
        elif source != member:
            by_source.setdefault(source, []).append(i)
    for source, indices in by_source.items():
        moved = move(streams, (source, member), [leaves[i] for i in indices])
        for i, tensor in zip(indices, moved, strict=True):
            placed[i] = tensor
    return placed


# ---- outputs ------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """Copies tensors of members 0, 1, ... to their rows of one tensor."""

    @staticmethod
    def forward(
        ctx: Any, streams: Streams, target: int, *parts: torch.Tensor
    ) -> torch.Tensor:
        ctx.streams, ctx.target = streams, target
        ctx.sizes = [len(part) for part in parts]
        whole = torch.empty(
            (sum(ctx.sizes), *parts[0].shape[1:]),
            dtype=parts[0].dtype,
            device=streams.group.devices[target],
        )
        for k, place in enumerate(torch.split(whole, ctx.sizes)):
            _copy_all(streams, (k, target), [parts[k].detach()], [place])
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with ctx.streams.on():
            if grad.layout is not torch.strided:  # from a sparse embedding
                grad = grad.to_dense()
            parts = [
                at_member(ctx.streams, (ctx.target, k), part)
                for k, part in enumerate(grad.split(ctx.sizes))
            ]
        return None, None, *parts


class Joiner:
    """Brings outputs of replicas to one device; a call joins their tensors."""

    def __init__(self, streams: Streams, output: torch.device) -> None:
        self._streams = streams
        self._output = output

    def __call__(self, parts: Sequence[torch.Tensor], dim: int | None) -> torch.Tensor:
        """Join tensors along a dimension; those without dimensions become a vector."""
        if dim is None:
            parts, dim = [part.reshape(1) for part in parts], 0
        if len(parts) == 1:
            return self._bring(parts[0], 0)
        devices = self._streams.group.devices
        if self._output in devices and self._are_rows(parts, dim):
            target = devices.index(self._output)
            gathered: torch.Tensor = _Gather.apply(self._streams, target, *parts)  # type: ignore[no-untyped-call]
            return gathered
        return torch.cat(list(map(self._bring, parts, itertools.count())), dim)

    def of_replica(self, output: Any, k: int) -> Any:
        """Return a value of replica k, with its tensors on the output device."""
        tree, leaves = _native.flatten(output)
        placed = [
            self._bring(leaf, k) if _travels(tree, i, leaf) else leaf
            for i, leaf in enumerate(leaves)
        ]
        are_there = all(map(operator.is_, placed, leaves))
        return output if are_there else tree.unflatten(placed)

    def _bring(self, tensor: torch.Tensor, k: int) -> torch.Tensor:
        """Return a tensor of replica k on the output device."""
        group = self._streams.group
        member = group.member_of(tensor, k)
        if member is None or self._output not in group.devices:
            return tensor.to(self._output)
        way = member, group.devices.index(self._output)
        return at_member(self._streams, way, tensor)

    def _are_rows(self, parts: Sequence[torch.Tensor], dim: int) -> bool:
        """Tell whether the parts are rows of a tensor, each on its replica's device."""
        first, member_of = parts[0], self._streams.group.member_of
        return (
            dim in (0, -first.dim())
            and not is_by_torch()
            and all(member_of(part, k) == k for k, part in enumerate(parts))
            and all(map(is_native, parts))
            and all(p.dtype == first.dtype and p.is_contiguous() for p in parts)
            and not any(p.is_conj() or p.is_neg() for p in parts)
        )
