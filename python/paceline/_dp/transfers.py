"""Arguments to the devices of replicas, and their outputs back: in the graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from paceline import _gpu, _native
from paceline._compat import packed_sequence, torch_core, torch_graph, torch_modes
from paceline._dp.group import Group, Streams

NATIVE = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
    + (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    + (torch.complex64, torch.complex128)
)
"""The types of elements that the native side copies; torch copies all others."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def is_native(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is nothing but memory, of which the native side knows."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and tensor.dtype in NATIVE
        and not tensor.is_nested
    )


def is_by_torch() -> bool:
    """Tell whether torch has to make copies: it may make more of them than that."""
    return (
        torch_graph.is_transformed()
        or torch_modes.is_tracing()
        or bool(torch_modes.count_dispatch_modes())
    )


# ---- copies -------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Tensors of one member, copied to another one."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        streams: Streams,
        way: tuple[int, int],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.arguments = group, streams, way
        return tuple(_copied(group, streams, way, tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, streams, (source, target) = ctx.arguments
        with group.on(streams):
            back = move(group, streams, (target, source), grads)
        return None, None, None, *back


def _copied(
    group: Group,
    streams: Streams,
    way: tuple[int, int],
    tensors: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Return copies on another member, which know of no graph."""
    device = group.devices[way[1]]
    whole = [_as_block(tensor.detach()) for tensor in tensors]
    places = [torch.empty_like(tensor, device=device) for tensor in whole]
    _copy_all(group, streams, way, whole, places)
    return places


def _copy_all(
    group: Group,
    streams: Streams,
    way: tuple[int, int],
    blocks: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
) -> None:
    """Copy blocks to places: the same layout, but for dimensions of one entry."""
    flat = [
        (block.view(-1), place.view(-1))
        if block.is_contiguous() and place.is_contiguous()
        else (block, place)
        for block, place in zip(blocks, places, strict=True)
    ]
    source, target = way
    given, taken = [block for block, _ in flat], [place for _, place in flat]
    group.native.copy(streams.numbers, source, given, target, taken)


def _as_block(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values that is one block of memory."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor if torch_core.is_dense(tensor) else tensor.contiguous()


def move(
    group: Group, streams: Streams, way: tuple[int, int], tensors: Sequence[Any]
) -> list[Any]:
    """Return copies on another member, in the graph; None for None.

    Parameters
    ----------
    group : Group
    streams : Streams
        What comes before and after.
    way : tuple of int
        The members from which and to which.
    tensors : sequence of torch.Tensor or None
        Tensors of the first.
    """
    moved = list(tensors)
    wanted: dict[bool, list[int]] = {False: [], True: []}
    is_recorded = torch.is_grad_enabled()
    by_torch = is_by_torch()
    for i, tensor in enumerate(tensors):
        if tensor is None:
            continue
        if by_torch or not is_native(tensor) or torch_graph.is_batched(tensor):
            moved[i] = copy_by_torch(group, streams, tensor, way[1])
        else:
            wanted[is_recorded and tensor.requires_grad].append(i)
    for recorded, indices in wanted.items():
        if not indices:
            continue
        given = [tensors[i] for i in indices]
        if recorded:
            copies: Sequence[Any] = _Copy.apply(group, streams, way, *given)  # type: ignore[no-untyped-call]
        else:
            copies = _copied(group, streams, way, given)
        for i, copy in zip(indices, copies, strict=True):
            moved[i] = copy
    return moved


def at_member(
    group: Group, streams: Streams, way: tuple[int, int], tensor: torch.Tensor
) -> torch.Tensor:
    """Return a tensor for another member: itself, where both are on one GPU."""
    source, target = way
    if group.indices[source] == group.indices[target]:
        return tensor
    moved: torch.Tensor = move(group, streams, way, [tensor])[0]
    return moved


_LEAST_PINNED = 1 << 16


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor that is on none of the devices, on one of them.

    What is large goes through pinned memory, so that devices fetch their rows side by
    side, and the host goes on.
    """
    is_large = tensor.numel() * tensor.element_size() >= _LEAST_PINNED
    if is_large and tensor.is_cpu and is_native(tensor) and not tensor.requires_grad:
        tensor = _gpu.machine.pinned(tensor)
    return tensor.to(device, non_blocking=True)


class _CopyByTorch(torch.autograd.Function):
    """As torch's own, whose backward refuses sparse gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        streams: Streams,
        device: torch.device,
        tensor: torch.Tensor,
    ) -> torch.Tensor:
        ctx.arguments = group, streams, tensor.device
        return tensor.to(device, non_blocking=True, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, streams, device = ctx.arguments
        with group.on(streams):
            return None, None, None, grads[0].to(device, non_blocking=True)


def copy_by_torch(
    group: Group, streams: Streams, tensor: torch.Tensor, member: int
) -> torch.Tensor:
    """Return a copy on a member's device, in the graph."""
    device = group.devices[member]
    if is_by_torch() or not (torch.is_grad_enabled() and tensor.requires_grad):
        return tensor.to(device, non_blocking=True, copy=True)
    arguments = group, streams, device, tensor
    return _CopyByTorch.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]


# ---- arguments ----------------------------------------------------------------------


def to_member(
    group: Group, streams: Streams, scattered: _native.Scattered, member: int
) -> Any:
    """Return a replica's arguments, with tensors on its device.

    Arrays stay what they are, and so does what lies on its device.
    """
    leaves = scattered.leaves(member)
    if group.is_cpu:
        if member > 0:
            leaves = list(map(_own_leaf, leaves, scattered.leaves(0)))
        return scattered.tree.unflatten(leaves)
    placed = _placed(group, streams, leaves, member)
    for i, (leaf, tensor) in enumerate(zip(leaves, placed, strict=True)):
        if tensor is not leaf and _is_sizes(scattered.tree, i, leaf):
            placed[i] = leaf
    return scattered.tree.unflatten(placed)


def _own_leaf(leaf: Any, of_replica_0: Any) -> Any:
    """Return an input that a later replica may change in place, in the same memory.

    What is not split is copied.  Parts of a batch are views of it, and share the count
    by which autograd sees that a tensor which it has saved was changed in place.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf is of_replica_0 or leaf.requires_grad or torch_graph.is_transformed():
        return leaf.clone()
    if type(leaf) is not torch.Tensor or leaf.is_inference():
        return leaf
    return leaf.data


def _is_sizes(tree: _native.Tree, i: int, leaf: Any) -> bool:
    """Tell whether a leaf is what a PackedSequence has on the CPU, wherever it is."""
    return (
        leaf.dtype is torch.int64
        and leaf.dim() == 1
        and leaf.is_cpu
        and tree.path(i).endswith(".batch_sizes")
    )


def _placed(
    group: Group, streams: Streams, leaves: Sequence[Any], member: int
) -> list[Any]:
    placed = list(leaves)
    by_source: dict[int, list[int]] = {}
    device = group.devices[member]
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        source = group.member_of(leaf, 0)
        if source is None:
            placed[i] = _sent(leaf, device)
        elif source != member:
            by_source.setdefault(source, []).append(i)
    for source, indices in by_source.items():
        moved = move(group, streams, (source, member), [leaves[i] for i in indices])
        for i, tensor in zip(indices, moved, strict=True):
            placed[i] = tensor
    return placed


# ---- outputs ------------------------------------------------------------------------


class _Gather(torch.autograd.Function):
    """Tensors of members 0, 1, ..., each copied to its rows of one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        streams: Streams,
        target: int,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        ctx.arguments = group, streams, target
        ctx.sizes = [len(part) for part in parts]
        whole = torch.empty(
            (sum(ctx.sizes), *parts[0].shape[1:]),
            dtype=parts[0].dtype,
            device=group.devices[target],
        )
        for k, place in enumerate(torch.split(whole, ctx.sizes)):
            _copy_all(group, streams, (k, target), [parts[k].detach()], [place])
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        group, streams, target = ctx.arguments
        with group.on(streams):
            (grad,) = grads
            if grad.layout is not torch.strided:  # as of an embedding that is sparse
                grad = grad.to_dense()
            parts = [
                at_member(group, streams, (target, k), part)
                for k, part in enumerate(grad.split(ctx.sizes))
            ]
        return None, None, None, *parts


class _Joiner:
    """Makes one tensor on a device of those of replicas 0, 1, ...."""

    def __init__(self, group: Group, streams: Streams, output: torch.device) -> None:
        self._group = group
        self._streams = streams
        self._output = output

    def __call__(self, parts: Sequence[torch.Tensor], dim: int | None) -> torch.Tensor:
        """Join tensors along a dimension; those without one become a vector."""
        if dim is None:
            parts, dim = [part.reshape(1) for part in parts], 0
        if len(parts) == 1:
            return self._bring(0, parts[0])
        group = self._group
        if self._output in group.devices and self._are_rows(parts, dim):
            target = group.devices.index(self._output)
            arguments = group, self._streams, target, *parts
            gathered: torch.Tensor = _Gather.apply(*arguments)  # type: ignore[no-untyped-call]
            return gathered
        return torch.cat([self._bring(k, part) for k, part in enumerate(parts)], dim)

    def packed(self, parts: Sequence[PackedSequence]) -> PackedSequence:
        """Join packed sequences; the sizes of their steps are on the CPU, as ever."""
        return packed_sequence.join_packed(
            [
                PackedSequence(
                    self._bring(k, part.data),
                    part.batch_sizes,
                    *(
                        None if indices is None else self._bring(k, indices)
                        for indices in (part.sorted_indices, part.unsorted_indices)
                    ),
                )
                for k, part in enumerate(parts)
            ]
        )

    def _bring(self, k: int, part: torch.Tensor) -> torch.Tensor:
        return bring(self._group, self._streams, part, k, self._output)

    def _are_rows(self, parts: Sequence[torch.Tensor], dim: int) -> bool:
        """Tell whether the parts are rows of a tensor, each on its replica's device."""
        first = parts[0]
        return (
            dim in (0, -first.dim())
            and not is_by_torch()
            and all(self._group.member_of(part, k) == k for k, part in enumerate(parts))
            and all(map(is_native, parts))
            and all(p.dtype == first.dtype and p.is_contiguous() for p in parts)
            and not any(p.is_conj() or p.is_neg() for p in parts)
        )


def bring(
    group: Group, streams: Streams, tensor: torch.Tensor, k: int, output: torch.device
) -> torch.Tensor:
    """Return an output of replica k on the device where outputs are wanted."""
    member = group.member_of(tensor, k)
    if member is None or output not in group.devices:
        return tensor.to(output)
    way = member, group.devices.index(output)
    return at_member(group, streams, way, tensor)


def bring_all(group: Group, output: Any, where: torch.device) -> Any:
    """Return what replica 0 returned, with its tensors on a device."""
    streams = group.streams()
    tree, leaves = _native.flatten(output)
    placed = [
        bring(group, streams, leaf, 0, where)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    if all(map(operator.is_, placed, leaves)):
        return output
    return tree.unflatten(placed)


def gather(
    group: Group,
    outputs: Sequence[Any],
    sizes: tuple[int, ...] | None,
    dim: int,
    output: torch.device,
) -> Any:
    """Return the output for the whole batch, on a device."""
    join = _Joiner(group, group.streams(), output)
    return _native.gather(list(outputs), sizes or (), dim, join)
