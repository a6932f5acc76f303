"""What each device has of a model, kept from forward to forward.

A forward sends what was written to since the last one.  Of what is written through
``.data``, by an average of weights or an adapter that is merged, the host cannot see
that it has changed: so the devices compare what looks the same, and fetch what is not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from paceline import _native
from paceline._compat import torch_core, torch_graph
from paceline._dp import segments as segments_
from paceline._dp.copies import copies_of
from paceline._dp.gradients import Gradients
from paceline._dp.group import N_SLOTS, Group, Streams
from paceline._dp.inner_backwards import InnerBackwards
from paceline._dp.replicate import as_original, replicas_of, tensors_of
from paceline._dp.segments import HeldBlocks, Layout, Segment, Travelling, ids_of
from paceline._dp.shells import Shells
from paceline._dp.transfers import at_member, copy_by_torch, is_by_torch, move

_log = logging.getLogger("paceline")


class ModelCopies:
    """A model's parameters and buffers on the devices of its replicas.

    Attributes
    ----------
    inner_backwards : InnerBackwards
        Of the forward for which replicas were made last.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layout: Layout | None = None
        self._held = HeldBlocks()
        self._leaves: list[_Leaves] = []
        self._shells = Shells()
        self.inner_backwards = InnerBackwards([])

    def replicas(
        self, parts: list[Module], n_replicas: int, streams: Streams
    ) -> list[Module]:
        """Return the module, and replicas of it on their devices, for one forward."""
        self._leaves = []
        if n_replicas < 2:
            return [parts[0]]
        self.inner_backwards = InnerBackwards(parts)
        by_torch = is_by_torch()
        if self._group.is_cpu:
            tensors, ids = list(tensors_of(parts).values()), ids_of(parts)
            members = range(1, n_replicas)
            of_replicas = [copies_of(tensors, self.inner_backwards) for _ in members]
            for k, own in zip(members, of_replicas, strict=True):
                self._leaves.append(_Leaves(k, tensors, own))
        else:
            layout = self._layout_of(parts, by_torch)
            tensors, ids = layout.tensors, layout.ids
            of_replicas = self._brought_up_to_date(
                layout, n_replicas, streams, by_torch=by_torch
            )
        bring = [partial(self._brought, streams, k) for k in range(1, n_replicas)]
        if not by_torch:
            made = self._shells.replicas(parts, tensors, ids, of_replicas, bring)
            if made is not None:
                return [parts[0], *made]
        keys = list(map(id, tensors))
        by_id = [dict(zip(keys, own, strict=True)) for own in of_replicas]
        return replicas_of(parts, by_id, bring)

    def _brought_up_to_date(
        self, layout: Layout, n_replicas: int, streams: Streams, *, by_torch: bool
    ) -> list[list[torch.Tensor]]:
        """Return what each further replica has on its device, in the layout's order."""
        if by_torch:
            of_replicas: list[list[torch.Tensor]] = [[] for _ in range(1, n_replicas)]
            moved = layout.tensors
        else:
            self._group.settle()  # of a backward that has failed
            if torch.is_grad_enabled() and n_replicas > 2:
                self._group.make_rooms(layout.room_bytes)
            self._send(layout, n_replicas, streams)
            of_replicas = self._views(layout, n_replicas, streams)
            moved = layout.others
        for k, own in enumerate(of_replicas, 1):
            copies = [_moved(self._group, streams, tensor, k) for tensor in moved]
            for copy in copies:
                if copy.grad_fn is not None:
                    copy.register_hook(self.inner_backwards.see)  # type: ignore[no-untyped-call]
            self._leaves.append(_Leaves(k, moved, copies))
            own += copies
        if not layout.is_kept:
            self._layout = None
        return of_replicas

    def _layout_of(self, parts: list[Module], by_torch: bool) -> Layout:
        if by_torch:
            return Layout(parts, self._group)
        if self._layout is None or not self._layout.fits(parts):
            self._layout = Layout(parts, self._group)
            _log.info(_memory_of(self._layout, self._group))
        return self._layout

    def finish(self, streams: Streams, outputs: Sequence[Any]) -> None:
        """Have the model get what a forward has done to replicas, once it has run.

        Parameters and buffers without a graph are leaves of a replica's own: a backward
        within the forward gave it the gradients.  If the forward made one require them,
        or recorded a graph although the caller does not, the backward to come does.
        """
        leaves, self._leaves = self._leaves, []
        will_come = torch.is_grad_enabled() or any(map(_has_graph, outputs))
        late: list[_Leaf] = []
        for of in leaves:
            for original, copy in zip(of.originals, of.copies, strict=True):
                if not copy.is_leaf:
                    continue
                leaf = _Leaf(of.member, original, copy)
                if copy.grad is not None:
                    _accumulate(self._group, streams, leaf)
                if will_come and copy.requires_grad:
                    late.append(leaf)
        for leaf in late:
            # It gets the copy as its argument: what it held would never be freed.
            where = leaf.member, leaf.original
            hook = partial(_accumulate_later, self._group, streams, *where)
            leaf.copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Remove what a forward has set, of replicas that nothing else refers to."""
        self._shells.finish()

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
            n_bytes = sum(segment.n_bytes for segment in compared)
            if n_bytes < segments_.COMPARED_BYTES or not self._group.can_compare:
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

    def _views(
        self, layout: Layout, n_replicas: int, streams: Streams
    ) -> list[list[torch.Tensor]]:
        """Return what each further replica has of all segments, in their order."""
        trained = [segment for segment in layout.segments if segment.is_trained]
        is_recorded = torch.is_grad_enabled()
        arguments = self._group, streams, trained, n_replicas
        gradients = Gradients(*arguments, self.inner_backwards)
        n_recorded = 0
        views: list[list[torch.Tensor]] = [[] for _ in range(1, n_replicas)]
        for segment in layout.segments:
            made: Sequence[Sequence[torch.Tensor]]
            is_plain = segment.is_plain()
            if is_recorded and segment.is_trained:
                made = gradients.slots(n_recorded)
                n_recorded += 1
                made = [_as_originals(segment, tensors, is_plain) for tensors in made]
            else:
                made = [_leaves_of(segment, k, is_plain) for k in range(1, n_replicas)]
                originals = list(segment.tensors)
                for k, tensors in enumerate(made, 1):
                    self._leaves.append(_Leaves(k, originals, tensors))
            for of_replica, tensors in zip(views, made, strict=True):
                of_replica += tensors
        return views


def _as_originals(
    segment: Segment, tensors: Sequence[torch.Tensor], is_plain: bool
) -> Sequence[torch.Tensor]:
    """Return tensors of a graph as parameters of the classes that the model's are."""
    if not is_plain:
        return list(map(as_original, tensors, segment.tensors))
    for tensor in tensors:
        tensor.__class__ = Parameter
    return tensors


def _leaves_of(segment: Segment, k: int, is_plain: bool) -> list[torch.Tensor]:
    """Return what a replica has of a segment without a graph.

    These are never the slots themselves: who holds on to one of them is not counted.
    """
    slots = segment.slots[k]
    if not is_plain:
        detached = [slot.detach() for slot in slots]
        return list(map(as_original, detached, segment.tensors))
    if not segment.is_parameter:
        return [slot.detach() for slot in slots]
    with torch.inference_mode(False):
        return [Parameter(slot, segment.is_trained) for slot in slots]


class _Leaves(NamedTuple):
    """What a replica has, of which leaves are its own."""

    member: int
    originals: Sequence[torch.Tensor]
    copies: Sequence[torch.Tensor]


class _Leaf(NamedTuple):
    """One of them."""

    member: int
    original: torch.Tensor
    copy: torch.Tensor


def _accumulate(group: Group, streams: Streams, leaf: _Leaf) -> None:
    """Add the gradient that a replica's own tensor was given to the model's."""
    with torch.enable_grad():  # it may have a graph, by create_graph
        grad: Any = leaf.copy.grad
        leaf.copy.grad = None
        if not group.is_cpu:
            (grad,) = move(group, streams, (leaf.member, 0), [grad])
        before = leaf.original.grad
        if before is None:
            leaf.original.grad = grad
        elif before.requires_grad or grad.requires_grad or before.is_sparse:
            leaf.original.grad = before + grad
        else:
            before.add_(grad)


def _accumulate_later(
    group: Group,
    streams: Streams,
    member: int,
    original: torch.Tensor,
    copy: torch.Tensor,
) -> None:
    """Do so at the end of the backward: until then device 0's thread may do so too."""
    leaf = _Leaf(member, original, copy)

    def accumulate() -> None:
        if leaf.copy.grad is not None:
            with group.on(streams):
                _accumulate(group, streams, leaf)

    torch_core.at_end_of_backward(accumulate)


def _has_graph(output: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in _native.flatten(output)[1]
    )


def _memory_of(layout: Layout, group: Group) -> str:
    """Return what a model takes on each device, beside its activations."""
    devices = [str(device) for device in group.devices]
    model = sum(segment.n_bytes for segment in layout.segments) / 2**20
    passing = layout.segment_bytes / 2**20
    room = layout.room_bytes / 2**20 if len(group) > 2 else 0.0
    return (
        f"DataParallel on {', '.join(devices)}: {model:.1f} MiB of parameters and "
        f"buffers on each, in {len(layout.segments)} segments; for what passes "
        f"through up to {N_SLOTS * passing:.1f} MiB on {devices[0]}, and {room:.1f} "
        "MiB on each other to add up gradients, which are on each once more until "
        "backward ends; outputs come together on one device: a loss that forward "
        "computes keeps them small"
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
