"""What each device has of a model, kept from forward to forward; and its gradients.

A forward sends what was written to since the last one.  Of what is written through
``.data``, by an average of weights or an adapter that is merged, the host cannot see
that it has changed: so the devices compare what looks the same, and fetch what is not.

In training a segment has two kinds of nodes in the graph::

    parameters --> _Segment --> block of member k --> _Replica --> replica k's tensors

``_Replica`` gathers the gradients of one device into one block, on its stream;
``_Segment`` has these added up for member 0, in the order of members.  A node runs when
its gradients are there, so that they travel while the rest of backward runs.  Replica 0
is the module itself: autograd adds what comes from the others to its gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from paceline._compat import torch_core, torch_graph
from paceline._dp.gpus import segments as segments_
from paceline._dp.gpus.group import N_SLOTS, Group, Streams
from paceline._dp.gpus.segments import HeldBlocks, Layout, Segment, Travelling
from paceline._dp.gpus.transfers import at_member, copy_by_torch, is_by_torch, move
from paceline._dp.replicate import as_original, has_hooks, replicas_of

_log = logging.getLogger("paceline")


class Replicated:
    """A model's parameters and buffers on the devices of its replicas."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layout: Layout | None = None
        self._held = HeldBlocks()
        self._buffers: list[tuple[Segment, int, list[torch.Tensor]]] = []
        self._leaves: list[_Leaf] = []

    def replicas(
        self, parts: list[Module], n_replicas: int, streams: Streams
    ) -> list[Module]:
        """Return the module, and replicas of it on their devices, for one forward."""
        self._buffers, self._leaves = [], []
        if n_replicas < 2:
            return [parts[0]]
        copies: list[dict[int, Any]] = [{} for _ in range(n_replicas)]
        if is_by_torch():
            layout = Layout(parts, self._group)
            others = layout.others
            for segment in layout.segments:
                others = [*others, *segment.tensors]
        else:
            layout = self._layout_of(parts)
            others = layout.others
            self._send(layout, n_replicas, streams)
            for segment in layout.segments:
                self._add_copies(segment, copies, streams)
        for k in range(1, n_replicas):
            for tensor in others:
                moved = _moved(self._group, streams, tensor, k)
                copies[k][id(tensor)] = moved
                self._note_leaf(k, tensor, moved)
        if not layout.is_kept:
            self._layout = None
        bring = [partial(self._brought, streams, k) for k in range(1, n_replicas)]
        return replicas_of(parts, copies[1:], bring)

    def _layout_of(self, parts: list[Module]) -> Layout:
        if self._layout is None or not self._layout.fits(parts):
            self._layout = Layout(parts, self._group)
            _log.info(_memory_of(self._layout, self._group))
        return self._layout

    def _note_leaf(self, k: int, original: torch.Tensor, copy: torch.Tensor) -> None:
        if copy.is_leaf:
            self._leaves.append(_Leaf(k, original, copy, copy.requires_grad))

    def finish(self, replicas: Sequence[Module], streams: Streams) -> None:
        """Have the model get what a forward has done to replicas, once it has run.

        Parameters and buffers without a graph are leaves of a replica's own: a backward
        within the forward gave it the gradients.  If the forward made one require them,
        the backward to come does.

        Raises
        ------
        RuntimeError
            If a buffer has grown over another one.
        """
        leaves = [leaf for leaf in self._leaves if leaf.copy.is_leaf]
        self._leaves = []
        for leaf in leaves:
            if leaf.copy.grad is not None:
                _accumulate(self._group, streams, leaf)
        self._check_buffers(replicas)
        if torch.is_grad_enabled():
            for leaf in leaves:
                if leaf.copy.requires_grad and not leaf.wanted:
                    hook = partial(_accumulate_later, self._group, streams, leaf)
                    leaf.copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _check_buffers(self, replicas: Sequence[Module]) -> None:
        buffers, self._buffers = self._buffers, []
        for segment, k, tensors in buffers:
            i = segment.outgrown(k, tensors)
            if i is not None:
                self._layout = None  # it is not known what else lies there
                raise _outgrown(replicas[k], tensors[i], segment.forms[i].n_elems)

    # ---- there ----------------------------------------------------------------------

    def _brought(self, streams: Streams, k: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for an attribute, as of a table that forward has kept.

        What it kept on another replica's GPU cannot be used on this one.
        """
        source = self._group.member_of(tensor, k)
        if source is None:
            return tensor
        return at_member(self._group, streams, (source, k), tensor)

    def _send(self, layout: Layout, n_replicas: int, streams: Streams) -> None:
        members = range(1, n_replicas)
        try:
            compared: list[Segment] = []
            sent: list[Segment] = []
            for segment in layout.segments:
                stamp = segment.stamp()
                looks_same = [segment.record_sent(k, stamp) for k in members]
                (compared if all(looks_same) else sent).append(segment)
            if sum(segment.n_bytes for segment in compared) < segments_.COMPARED_BYTES:
                sent, compared = sent + compared, []
            self._held.limit(len(layout.segments) * len(members))
            for segments, keeps_values in ((sent, False), (compared, True)):
                for segment in segments:
                    for k in members:
                        held = segment.make_writable(self._group, k, keeps_values)
                        if held is not None:
                            self._held.add(held)
            self._bring(
                layout,
                [segment.travelling(members) for segment in sent],
                [segment.travelling(members) for segment in compared],
                streams,
            )
            for segment in layout.segments:
                for k in members:
                    segment.record_versions(k)
        except BaseException:
            self._layout = None  # nobody knows what came
            raise

    def _bring(
        self,
        layout: Layout,
        sent: list[Travelling],
        compared: list[Travelling],
        streams: Streams,
    ) -> None:
        """Have members get what has changed, and compare what looks the same."""
        group = self._group
        ring = group.ring(layout.segment_bytes)
        if sent:
            group.native.broadcast(streams.numbers, ring, sent)
        if compared:
            sums = group.sums(len(compared))
            group.native.refresh(streams.numbers, ring, compared, sums)

    # ---- in the replicas ------------------------------------------------------------

    def _add_copies(
        self, segment: Segment, copies: list[dict[int, Any]], streams: Streams
    ) -> None:
        n_replicas = len(copies)
        step: _Step | None = None
        blocks: tuple[torch.Tensor, ...] = ()
        if segment.is_trained and torch.is_grad_enabled():
            step = _Step(segment, self._group, streams)
            _, *blocks = _Segment.apply(step, n_replicas, *segment.tensors)  # type: ignore[no-untyped-call]
        for k in range(1, n_replicas):
            tensors: Sequence[torch.Tensor] = segment.slots[k]
            if step is not None:
                tensors = _Replica.apply(blocks[k - 1], step, k)  # type: ignore[no-untyped-call]
            else:  # never the slots themselves: who holds on to one is not counted
                tensors = [slot.detach() for slot in tensors]
            pairs = zip(tensors, segment.tensors, strict=True)
            tensors = [as_original(*pair) for pair in pairs]
            for original, tensor in zip(segment.tensors, tensors, strict=True):
                copies[k][id(original)] = tensor
                self._note_leaf(k, original, tensor)
            if not segment.is_parameter:
                self._buffers.append((segment, k, tensors))


class _Leaf(NamedTuple):
    """What a replica has without a graph, and whether it required a gradient."""

    member: int
    original: torch.Tensor
    copy: torch.Tensor
    wanted: bool


def _accumulate(group: Group, streams: Streams, leaf: _Leaf) -> None:
    """Add the gradient that a replica's own tensor was given to the model's."""
    with torch.enable_grad():  # it may have a graph, by create_graph
        (grad,) = move(group, streams, (leaf.member, 0), [leaf.copy.grad])
        before = leaf.original.grad
        leaf.original.grad = grad if before is None else before + grad
        leaf.copy.grad = None


def _accumulate_later(
    group: Group, streams: Streams, leaf: _Leaf, _: torch.Tensor
) -> None:
    """Do so at the end of the backward: until then device 0's thread may do so too."""

    def accumulate() -> None:
        if leaf.copy.grad is not None:
            with group.on(streams):
                _accumulate(group, streams, leaf)

    torch_core.at_end_of_backward(accumulate)


def _name_of(tensor: torch.Tensor, named: Iterable[tuple[str, torch.Tensor]]) -> str:
    return next((name for name, found in named if found is tensor), "of a part")


def _outgrown(
    replica: Module, buffer: torch.Tensor, n_elems_before: int
) -> RuntimeError:
    """Return what to raise where a forward has given a buffer more elements."""
    name = _name_of(buffer, replica.named_buffers(remove_duplicate=False))
    return RuntimeError(
        f"a replica of DataParallel made its buffer '{name}' grow from "
        f"{n_elems_before} to {buffer.numel()} elements, over what lies behind it: run "
        "one forward of the plain module before it is wrapped, or register the buffer "
        "with its final size"
    )


def _memory_of(layout: Layout, group: Group) -> str:
    """Return what a model takes on each device, beside its activations."""
    devices = [str(device) for device in group.devices]
    model = sum(segment.n_bytes for segment in layout.segments) / 2**20
    passing = layout.segment_bytes / 2**20
    return (
        f"DataParallel on {', '.join(devices)}: {model:.1f} MiB of parameters and "
        f"buffers on each, in {len(layout.segments)} segments; for what passes through "
        f"up to {N_SLOTS * passing:.1f} MiB on {devices[0]}, and in training "
        f"{passing:.1f} MiB on each other; outputs come together on one device: a loss "
        "that forward computes keeps them small"
    )


def _moved(
    group: Group, streams: Streams, tensor: torch.Tensor, member: int
) -> torch.Tensor:
    """Return a tensor that travels by itself, on a member's device."""
    if torch_graph.is_transformed():
        return copy_by_torch(group, streams, tensor, member)
    if tensor.requires_grad and torch.is_grad_enabled():
        return as_original(copy_by_torch(group, streams, tensor, member), tensor)
    with torch.inference_mode(False):
        copy = copy_by_torch(group, streams, tensor.detach(), member)
        return as_original(copy.requires_grad_(tensor.requires_grad), tensor)


# ---- gradients ----------------------------------------------------------------------


class _Step:
    """One forward's segment: what its nodes share.

    `aside` are gradients that no block can hold (sparse ones), and `used` says which
    tensors a member has a gradient of, both by backward and member: a checkpoint runs
    a backward of its own through these nodes in the middle of another one.
    """

    def __init__(self, segment: Segment, group: Group, streams: Streams) -> None:
        self.segment = segment
        self.group = group
        self.streams = streams
        self.aside: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self.used: dict[tuple[int, int], list[bool]] = {}

    # ---- one member's ---------------------------------------------------------------

    def pack(self, member: int, grads: Sequence[Any]) -> torch.Tensor:
        """Return one block of a member's gradients, of which some are None."""
        segment = self.segment
        key = torch_graph.current_task(), member
        self.used[key] = [grad is not None for grad in grads]
        slots, device = segment.slots[member], self.group.devices[member]
        dense = [self._dense(key, i, grad) for i, grad in enumerate(grads)]
        if torch.is_grad_enabled() or any(
            grad is not None and torch_graph.is_batched(grad) for grad in dense
        ):
            return self._pack_by_torch(dense, device)
        offsets = segment.byte_offsets
        make = torch.zeros if segment.has_gaps else torch.empty
        block = make(segment.n_elems, dtype=segment.dtype, device=device)
        arguments = self.streams.numbers, member
        others = self.group.native.pack(*arguments, dense, slots, offsets, block)
        if others:
            for i in others:
                dense[i] = torch.empty_like(slots[i]).copy_(dense[i])  # type: ignore[arg-type]
            self.group.native.pack(*arguments, dense, slots, offsets, block)
        return block

    def _dense(self, key: tuple[int, int], i: int, grad: Any) -> torch.Tensor | None:
        """Return a gradient whose memory says all of it; put a sparse one aside."""
        if grad is None:
            return None
        if grad.layout is torch.strided:
            return grad.resolve_conj().resolve_neg()  # type: ignore[no-any-return]
        self.aside.setdefault(key, {})[i] = grad
        return None

    def _pack_by_torch(
        self, grads: Sequence[torch.Tensor | None], device: torch.device
    ) -> torch.Tensor:
        """Return the same, in the graph."""
        segment = self.segment
        zero = torch.zeros((), dtype=segment.dtype, device=device)
        example = next((grad for grad in grads if grad is not None), zero)
        pieces = []
        ends = [*segment.offsets[1:], segment.n_elems]
        for i, (grad, end) in enumerate(zip(grads, ends, strict=True)):
            n_elems = end - segment.offsets[i]
            if grad is None:
                pieces.append(example.new_zeros(n_elems))
                continue
            flat = segment.flattened(i, grad)
            n_more = n_elems - segment.forms[i].n_elems
            pieces.append(torch.cat([flat, flat.new_zeros(n_more)]) if n_more else flat)
        return torch.cat(pieces)

    # ---- all members' ---------------------------------------------------------------

    def add(self, blocks: Sequence[Any]) -> list[torch.Tensor | None]:
        """Return the sum of the gradients of members 1, 2, ..., for each tensor."""
        rows = [(k, block) for k, block in enumerate(blocks, 1) if block is not None]
        task = torch_graph.current_task()
        used = [self.used.pop((task, k)) for k, _ in rows]
        aside = [self.aside.pop((task, k), {}) for k, _ in rows]
        is_used = [any(of) for of in zip(*used, strict=True)]
        if torch.is_grad_enabled() or any(torch_graph.is_batched(b) for _, b in rows):
            sums = self._add_by_torch(rows, is_used)
        else:
            sums = self._add_by_core(rows, is_used)
        for i in {i for found in aside for i in found}:
            self._add_aside(sums, i, [a[i] for a in aside if i in a], used, aside)
        return sums

    def _add_by_core(
        self, rows: list[tuple[int, torch.Tensor]], is_used: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        segment, device = self.segment, self.group.devices[0]
        total = torch.empty(segment.n_elems, dtype=segment.dtype, device=device)
        rooms: list[torch.Tensor | None] = [None] * len(self.group)
        if len(rows) > 1:
            rooms = self.group.rooms(segment.room_bytes)
        self.group.native.sum(self.streams.numbers, rooms, rows, total)
        # A count of versions for each: what is done to one does not concern others.
        return [
            view.data if used else self._unused(i)
            for i, (view, used) in enumerate(
                zip(segment.views(total), is_used, strict=True)
            )
        ]

    def _unused(self, i: int) -> torch.Tensor | None:
        """Return the gradient of a tensor that no replica has used.

        Hooks that were set since the forward are called with it: with zeros, as by
        torch's class, rather than with None.
        """
        tensor = self.segment.tensors[i]
        return torch.zeros_like(tensor) if has_hooks(tensor) else None

    def _add_aside(
        self,
        sums: list[torch.Tensor | None],
        i: int,
        grads: Sequence[torch.Tensor],
        used: Sequence[list[bool]],
        aside: Sequence[dict[int, torch.Tensor]],
    ) -> None:
        """Add sparse gradients to what dense ones there are."""
        sparse = grads[0].to(self.group.devices[0])
        for grad in grads[1:]:
            sparse = sparse + grad.to(self.group.devices[0])
        has_dense = any(
            of[i] and i not in found for of, found in zip(used, aside, strict=True)
        )
        sums[i] = sums[i] + sparse if has_dense else sparse  # type: ignore[operator]

    def _add_by_torch(
        self, rows: Sequence[tuple[int, torch.Tensor]], is_used: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the same, in the graph."""
        segment, device = self.segment, self.group.devices[0]
        total = rows[0][1].to(device)
        for _, block in rows[1:]:
            total = total + block.to(device)
        sums: list[torch.Tensor | None] = []
        for i, offset in enumerate(segment.offsets):
            n_elems = segment.forms[i].n_elems
            flat = total.narrow(0, offset, n_elems)
            sums.append(segment.shaped(i, flat) if is_used[i] else None)
        return sums


class _Segment(torch.autograd.Function):
    """Trained parameters of the model, and the blocks that replicas have of them.

    The first output is on member 0: so backward takes its stream for the node's.
    """

    @staticmethod
    def forward(
        ctx: Any, step: _Step, n_replicas: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step = step
        handle = torch.empty(0, device=step.group.devices[0])
        blocks = step.segment.blocks[1:n_replicas]
        return handle, *(block.detach() for block in blocks if block is not None)

    @staticmethod
    def backward(ctx: Any, _: Any, *blocks: Any) -> Any:
        with ctx.step.group.on(ctx.step.streams):
            return None, None, *ctx.step.add(blocks)


class _Replica(torch.autograd.Function):
    """A member's block, and the tensors of its replica."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, step: _Step, member: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.member = step, member
        return tuple(slot.detach() for slot in step.segment.slots[member])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.step.group.on(ctx.step.streams):
            return ctx.step.pack(ctx.member, grads), None, None
