"""Copies of a model on each device, kept from forward to forward.

A forward sends the tensors written to since the last one.  The host cannot see a write
through ``.data``, by an average of weights or a merged adapter.  So the devices compare
segments that look unchanged, and fetch those that differ.

A replica's forward waits for all segments.  If each look-up of a parameter waited for
its own, a parameter could be used in a stream that had waited before the look-up, and
`torch.Stream.__enter__` is a method of C that nothing can watch::

    side.wait_stream(torch.accelerator.current_stream())
    weight = self.weight  # the present stream would wait, `side` would not
    with side: ...
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from paceline._compat import torch_core, torch_graph, torch_modes
from paceline._dp import segments as segments_
from paceline._dp.gradients import Gradients, InnerBackwards
from paceline._dp.group import N_SLOTS, Group, Streams
from paceline._dp.replicate import Entries, as_original, replica_of
from paceline._dp.segments import HeldBlocks, Layout, Segment
from paceline._dp.shells import Shells
from paceline._dp.transfers import at_member, is_by_torch, move

_log = logging.getLogger("paceline")


class ModelCopies:
    """A model's parameters and buffers on the devices of its replicas.

    Attributes
    ----------
    inner_backwards : InnerBackwards
        The backwards inside the last forward for which replicas were made.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._layout: Layout | None = None
        self._held = HeldBlocks()
        # A replica, tensors of the model, and its copies of them, some of them leaves.
        self._leaves: list[
            tuple[int, Sequence[torch.Tensor], Sequence[torch.Tensor]]
        ] = []
        self._shells = Shells()
        self.inner_backwards = InnerBackwards([])

    def replicas(
        self, parts: list[Module], entries: Entries, n_replicas: int, streams: Streams
    ) -> list[Module]:
        """Return the module, and replicas of it on their devices, for one forward."""
        self._leaves = []
        if n_replicas < 2:
            return [parts[0]]
        self.inner_backwards = InnerBackwards(parts)
        by_torch = is_by_torch()
        tensors, of_replicas = self._brought_up_to_date(
            parts, entries, n_replicas, streams, by_torch=by_torch
        )
        bring = [partial(self._brought, streams, k) for k in range(1, n_replicas)]
        made = None
        if not by_torch:
            made = self._shells.replicas(parts, entries, tensors, of_replicas, bring)
        if made is None:
            keys = list(map(id, tensors))
            by_id = [dict(zip(keys, own, strict=True)) for own in of_replicas]
            made = list(map(partial(replica_of, parts, entries.dicts()), by_id, bring))
        return [parts[0], *made]

    def _brought_up_to_date(
        self,
        parts: list[Module],
        entries: Entries,
        n_replicas: int,
        streams: Streams,
        *,
        by_torch: bool,
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """Return the model's tensors, and each further replica's copies."""
        of_replicas: list[list[torch.Tensor]] = [[] for _ in range(1, n_replicas)]
        if by_torch or self._group.is_cpu:
            # On the CPU, keeping blocks of memory gains nothing.
            tensors = moved = list(entries.by_id().values())
        else:
            layout = self._layout_of(parts, entries)
            tensors, moved = layout.tensors, layout.others
            self._group.settle()  # left by a failed backward
            if torch.is_grad_enabled() and n_replicas > 2:
                self._group.make_rooms(layout.room_bytes)
            self._send(layout, n_replicas, streams)
            of_replicas = self._views(layout, n_replicas, streams)
            if not layout.is_kept:
                self._layout = None
        for k, own in enumerate(of_replicas, 1):
            copies = _moved(streams, moved, k)
            torch_graph.call_in_backward(copies, self.inner_backwards.hooks)
            self._leaves.append((k, moved, copies))
            own += copies
        return tensors, of_replicas

    def _layout_of(self, parts: list[Module], entries: Entries) -> Layout:
        if self._layout is None or not self._layout.fits(entries):
            self._layout = Layout(parts, entries, self._group)
            _log.info(_memory_of(self._layout, self._group))
        return self._layout

    def finish(self, streams: Streams, outputs: Sequence[Any]) -> None:
        """Give the model the gradients of replicas' leaves, after a forward has run.

        Parameters and buffers without a graph are separate leaves in a replica.  A
        backward within the forward has given them gradients.  If the forward set
        requires_grad on one, or recorded a graph although the caller does not, the next
        backward gives gradients too.
        """
        leaves, self._leaves = self._leaves, []
        self.inner_backwards.hooks.clear()
        will_come = torch.is_grad_enabled() or any(
            map(torch_core.tensors_with_graph, outputs)
        )
        late, pairs = [], []
        for member, originals, copies in leaves:
            for original, copy in zip(originals, copies, strict=True):
                if not copy.is_leaf:
                    continue
                if copy.grad is not None:
                    _accumulate(streams, member, original, copy)
                if will_come and copy.requires_grad:
                    accumulate = partial(_accumulate, streams, member, original)
                    late.append((copy, partial(_accumulate_later, accumulate)))
                    pairs.append((original, copy))
        for copy, hook in late:
            copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        if pairs:
            torch_core.hook_outputs(outputs[0], partial(_refuse_to_return, pairs))

    def release(self) -> None:
        """Remove what a forward has set, in replicas that nothing else holds."""
        self._shells.finish()

    # ---- to the devices -------------------------------------------------------------

    def _brought(self, streams: Streams, k: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of an attribute (a table kept by forward) for replica k.

        A tensor kept on another replica's GPU cannot be used on this one.
        """
        source = self._group.member_of(tensor, k)
        if source is None:
            return tensor
        return at_member(streams, (source, k), tensor)

    def _send(self, layout: Layout, n_replicas: int, streams: Streams) -> None:
        members = range(1, n_replicas)
        try:
            compared: list[Segment] = []
            sent: list[Segment] = []
            stamps = [segment.stamp() for segment in layout.segments]
            for segment, stamp in zip(layout.segments, stamps, strict=True):
                looks_same = all(segment.seems_to_have(k, stamp) for k in members)
                (compared if looks_same else sent).append(segment)
            n_bytes = sum(segment.n_bytes for segment in compared)
            if n_bytes < segments_.COMPARED_BYTES:
                sent, compared = sent + compared, []
            readers = [k for k in members if k in self._group.readers]
            others = [k for k in members if k not in readers]
            self._held.limit(len(layout.segments) * len(members))
            numbers, ring = streams.numbers, self._group.ring(layout.segment_bytes)
            ways = (sent, members, False), (compared, others, False)
            for segments, to, is_compared in (*ways, (compared, readers, True)):
                if not segments or not to:
                    continue
                for segment in segments:
                    for k in to:
                        held = segment.make_writable(k, keeps_values=is_compared)
                        if held is not None:
                            self._held.add(held)
                travelling = [segment.travelling(to) for segment in segments]
                sums = self._group.sums(len(segments)) if is_compared else None
                self._group.native.broadcast(numbers, ring, travelling, sums)
            for segment, stamp in zip(layout.segments, stamps, strict=True):
                for k in members:
                    segment.record(k, stamp)
        except BaseException:
            self._layout = None  # what arrived is unknown
            raise

    # ---- in the replicas ------------------------------------------------------------

    def _views(
        self, layout: Layout, n_replicas: int, streams: Streams
    ) -> list[list[torch.Tensor]]:
        """Return each further replica's copies of all segments, in order."""
        trained = [segment for segment in layout.segments if segment.is_trained]
        is_recorded = torch.is_grad_enabled()
        gradients = Gradients(streams, trained, n_replicas, self.inner_backwards)
        numbers = itertools.count()
        views: list[list[torch.Tensor]] = [[] for _ in range(1, n_replicas)]
        for segment in layout.segments:
            originals = list(segment.tensors)
            if is_recorded and segment.is_trained:
                slots = gradients.slots(next(numbers))
                made = [list(map(as_original, own, originals)) for own in slots]
            else:
                made = [_leaves_of(segment, k) for k in range(1, n_replicas)]
                self._leaves += [(k, originals, own) for k, own in enumerate(made, 1)]
            for of_replica, own in zip(views, made, strict=True):
                of_replica += own
        return views


def _leaves_of(segment: Segment, k: int) -> list[torch.Tensor]:
    """Return a replica's copies of a segment, as leaves without a graph.

    They are new tensors, since a reference to a slot would not count as a holder.
    """
    with torch_modes.without_inference():
        detached = [slot.detach() for slot in segment.slots[k]]
        return list(map(as_original, detached, segment.tensors))


def _accumulate(
    streams: Streams, member: int, original: torch.Tensor, copy: torch.Tensor
) -> None:
    """Add the gradient of a replica's own tensor to the model's tensor."""
    with torch.enable_grad(), streams.on():  # it may have a graph, by create_graph
        grad: Any = copy.grad
        copy.grad = None
        if not streams.group.is_cpu:
            (grad,) = move(streams, (member, 0), [grad])
        before = original.grad
        if before is None:
            original.grad = grad
        elif before.requires_grad or grad.requires_grad or before.is_sparse:
            original.grad = before + grad
        else:
            before.add_(grad)


def _accumulate_later(
    accumulate: Callable[[torch.Tensor], None], copy: torch.Tensor
) -> None:
    """Accumulate at the end of the backward, after device 0's thread has.

    The copy is an argument, because a hook that held its tensor would make a cycle.
    """

    def later() -> None:
        if copy.grad is not None:
            accumulate(copy)

    torch_core.at_end_of_backward(later)


def _refuse_to_return(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], _: torch.Tensor
) -> None:
    """Raise if a backward asks for gradients that only ``.grad`` gets from replicas."""
    for original, copy in pairs:
        is_added = torch_core.accumulates(torch_core.accumulation_node(copy))
        if original.is_leaf:
            node = torch_core.accumulation_node(original)
            if is_added or not torch_graph.will_run(node):
                continue
        raise RuntimeError(
            "the forward of DataParallel turned gradients on by itself (enable_grad, "
            "requires_grad_): only backward() without inputs= gives gradients to its "
            "parameters. For torch.autograd.grad, call the DataParallel with gradients "
            "on and with parameters that require them"
        )


def _memory_of(layout: Layout, group: Group) -> str:
    """Describe the memory of a model on each device, without activations."""
    devices = [str(device) for device in group.devices]
    model = sum(segment.n_bytes for segment in layout.segments) / 2**20
    passing = layout.segment_bytes / 2**20
    room = layout.room_bytes / 2**20 if len(group) > 2 else 0.0
    return (
        f"DataParallel on {', '.join(devices)}: {model:.1f} MiB of parameters and "
        f"buffers on each, in {len(layout.segments)} segments; up to "
        f"{N_SLOTS * passing:.1f} MiB on {devices[0]} for parameters in transit, and "
        f"{room:.1f} MiB on each other to add up gradients, which each holds once "
        "more until backward ends; outputs are joined on one device: compute the "
        "loss in forward to keep them small"
    )


def _moved(
    streams: Streams, tensors: Sequence[torch.Tensor], member: int
) -> list[torch.Tensor]:
    """Return copies of tensors outside segments, on a member's device."""
    way, is_recorded = (0, member), torch.is_grad_enabled()
    if torch_graph.is_transformed():
        return move(streams, way, tensors)
    with torch_modes.without_inference(), torch_modes.grad_mode(is_recorded):
        given = [t if is_recorded and t.requires_grad else t.detach() for t in tensors]
        copies = move(streams, way, given)
        if not is_recorded:
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.requires_grad_(tensor.requires_grad)
        return list(map(as_original, copies, tensors))
