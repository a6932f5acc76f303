"""Gradients of replicas: packed on each device, and added up for the module's.

In training each segment has two kinds of nodes in the graph::

    parameters --> _Segment --> _Replica of member k --> replica k's tensors

``_Replica`` packs the gradients of one member into a block.  With the last member's
block the sum begins, on streams of its own, and backward goes on.  ``_Segment`` runs at
the end of backward: it has member 0's stream wait for the sum, and returns it.  Replica
0 is the module itself, so autograd adds what comes from the others to its gradients.

Only None goes from ``_Replica`` to ``_Segment`` through the graph: for a tensor,
autograd would have member 0's stream wait at once for what member k's does.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline._compat import torch_graph
from paceline._dp.group import Group, Streams
from paceline._dp.inner_backwards import InnerBackwards
from paceline._dp.replicate import unused_gradient
from paceline._dp.segments import Segment


class _Row(NamedTuple):
    """What one member's backward gives of a segment.

    `used` says of which tensors there is a gradient; `aside` are those that no block
    can hold (sparse ones).
    """

    block: torch.Tensor
    used: list[bool]
    aside: dict[int, torch.Tensor]


class Arrival:
    """The gradients of one segment in one backward.

    Attributes
    ----------
    rows : dict
        By member.
    is_plain : bool
        They have no graph, and are none of vmap's.
    total : torch.Tensor or None
        On member 0, what they are added up in.
    is_begun, is_collected : bool
    """

    def __init__(
        self, segment: Segment, streams: Streams, total: torch.Tensor | None
    ) -> None:
        self.segment = segment
        self.streams = streams
        self.total = total
        self.rows: dict[int, _Row] = {}
        self.is_plain = True
        self.is_begun = False
        self.is_collected = False
        self.sum = segment.take_sum()

    def release(self) -> None:
        """Let go of memory, once all streams wait for those that used it."""
        self.sum.clear()
        if self.is_collected:
            self.segment.give_sum(self.sum)


class _Backward:
    """One pass of autograd through the nodes of a forward.

    Attributes
    ----------
    n_rows : list of int
        How many members will come, by segment.
    totals : list of torch.Tensor or None
        Memory for the sums.
    arrivals : dict of Arrival
        By segment.
    waiting : set of int
        Segments that are not collected yet.
    """

    def __init__(self, n_rows: list[int]) -> None:
        self.n_rows = n_rows
        self.totals: list[torch.Tensor | None] = [None] * len(n_rows)
        self.arrivals: dict[int, Arrival] = {}
        self.waiting = {i for i, n in enumerate(n_rows) if n}


class Gradients:
    """What the nodes of one forward share.

    A checkpoint runs a backward of its own through them in the middle of another one:
    so all is kept by backward.
    """

    def __init__(
        self,
        group: Group,
        streams: Streams,
        segments: Sequence[Segment],
        n: int,
        inner: InnerBackwards,
    ) -> None:
        self.group = group
        self.inner = inner
        self.streams = streams
        self._segments = segments
        self._n_replicas = n
        self._nodes: list[list[weakref.ref[Any]]] = [[] for _ in segments]
        self._backwards: dict[int, _Backward] = {}
        self._lock = threading.Lock()

    # ---- the graph ------------------------------------------------------------------

    def slots(self, i: int) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of a segment by further replica, in the graph."""
        n_tokens = self._n_replicas - 1
        tokens = _Segment.apply(self, i, n_tokens, *self._segments[i].tensors)  # type: ignore[no-untyped-call]
        # Those that were registered first come last.
        torch_graph.set_turn(tokens[0].grad_fn, i)
        made = []
        for member, token in enumerate(tokens, 1):
            tensors = _Replica.apply(token, self, i, member)  # type: ignore[no-untyped-call]
            node = tensors[0].grad_fn
            torch_graph.set_turn(node, torch_graph.AT_ONCE)
            self._nodes[i].append(weakref.ref(node))
            made.append(tensors)
        return made

    def slots_of(self, i: int, member: int) -> list[torch.Tensor]:
        """Return where a member has the tensors of a segment."""
        return self._segments[i].slots[member]

    # ---- one member's ---------------------------------------------------------------

    def take(self, i: int, member: int, grads: Sequence[Any]) -> None:
        """Pack a member's gradients, some of them None; add up if all have come."""
        self.inner.see()
        backward, arrival = self._arrival(i)
        aside: dict[int, torch.Tensor] = {}
        dense = [_dense(aside, j, grad) for j, grad in enumerate(grads)]
        is_plain = not (torch.is_grad_enabled() or any(map(_is_batched, dense)))
        pack = self._pack if is_plain else self._pack_by_torch
        block = pack(arrival, member, dense)
        with self._lock:
            arrival.is_plain &= is_plain
            used = [grad is not None for grad in grads]
            arrival.rows[member] = _Row(block, used, aside)
            are_all = len(arrival.rows) == backward.n_rows[i]
        if are_all and arrival.is_plain:
            self._begin(arrival)

    def _arrival(self, i: int) -> tuple[_Backward, Arrival]:
        """Return what there is of a segment in this thread's backward."""
        task = torch_graph.current_task()
        with self._lock:
            if task not in self._backwards:
                self._backwards[task] = self._opened()
            backward = self._backwards[task]
            if i not in backward.arrivals:
                total, backward.totals[i] = backward.totals[i], None
                arrival = Arrival(self._segments[i], self.streams, total)
                backward.arrivals[i] = arrival
            return backward, backward.arrivals[i]

    def _opened(self) -> _Backward:
        """Return a backward that begins.

        Memory for its sums is allocated now, for all: what streams have used it for
        comes before the fence, and so no sum waits for the rest of backward.
        """
        backward = _Backward([sum(map(_will_run, nodes)) for nodes in self._nodes])
        if not torch.is_grad_enabled():
            for i in backward.waiting:
                backward.totals[i] = self._new_total(self._segments[i])
            self.group.native.fence(self.streams.numbers)
        return backward

    def _new_total(self, segment: Segment) -> torch.Tensor:
        device = self.group.devices[0]
        return torch.empty(segment.n_elems, dtype=segment.dtype, device=device)

    def _pack(
        self, arrival: Arrival, member: int, grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return one block of a member's gradients."""
        segment, device = arrival.segment, self.group.devices[member]
        block = torch.empty(segment.n_elems, dtype=segment.dtype, device=device)
        arguments = self.streams.numbers[member], member
        others = arrival.sum.pack(*arguments, grads, block)
        if others:
            for i in others:
                place = torch.empty_like(segment.slots[member][i])
                grads[i] = place.copy_(grads[i])  # type: ignore[arg-type]
            arrival.sum.pack(*arguments, grads, block)
        return block

    def _pack_by_torch(
        self, arrival: Arrival, member: int, grads: list[torch.Tensor | None]
    ) -> torch.Tensor:
        """Return the same, in the graph."""
        segment, device = arrival.segment, self.group.devices[member]
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

    def _begin(self, arrival: Arrival) -> None:
        """Have the rows added up, behind what packs them and nothing else."""
        if arrival.total is None:  # more has come than autograd had said
            arrival.total = self._new_total(arrival.segment)
            self.group.native.fence(self.streams.numbers)
        arrival.is_begun = True
        arrival.sum.begin(self.group.rooms, arrival.total)
        self.group.hold(arrival)  # its rows hold the memory until then

    def collect(self, i: int) -> list[torch.Tensor | None]:
        """Return the sum of the gradients of members 1, 2, ..., for each tensor."""
        backward, arrival = self._arrival(i)
        rows = [row for _, row in sorted(arrival.rows.items())]
        is_used = [any(of) for of in zip(*(row.used for row in rows), strict=True)]
        if arrival.is_plain:
            if not arrival.is_begun:
                self._begin(arrival)
            arrival.sum.end(self.streams.numbers[0])
            sums = self._parts(arrival, is_used)
        else:
            sums = self._add_by_torch(arrival.segment, rows, is_used)
        for j in {j for row in rows for j in row.aside}:
            self._add_aside(sums, j, rows)
        arrival.is_collected = True
        self._close(i, backward)
        return sums

    def _close(self, i: int, backward: _Backward) -> None:
        """Note that a segment is collected; with the last one streams wait for sums."""
        with self._lock:
            backward.waiting.discard(i)
            backward.arrivals.pop(i)
            is_over = not backward.waiting and not backward.arrivals
            if is_over:
                self._backwards.pop(torch_graph.current_task())
        if is_over:
            self.group.settle()

    def _parts(
        self, arrival: Arrival, is_used: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        segment, total = arrival.segment, arrival.total
        assert total is not None
        # A count of versions for each: what is done to one does not concern others.
        return [
            view.data if used else unused_gradient(tensor)
            for tensor, view, used in zip(
                segment.tensors, segment.views(total), is_used, strict=True
            )
        ]

    def _add_aside(
        self, sums: list[torch.Tensor | None], j: int, rows: Sequence[_Row]
    ) -> None:
        """Add sparse gradients to what dense ones there are."""
        grads = [row.aside[j] for row in rows if j in row.aside]
        sparse = grads[0].to(self.group.devices[0])
        for grad in grads[1:]:
            sparse = sparse + grad.to(self.group.devices[0])
        has_dense = any(row.used[j] and j not in row.aside for row in rows)
        sums[j] = sums[j] + sparse if has_dense else sparse  # type: ignore[operator]

    def _add_by_torch(
        self, segment: Segment, rows: Sequence[_Row], is_used: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the sums, in the graph."""
        device = self.group.devices[0]
        total = rows[0].block.to(device)
        for row in rows[1:]:
            total = total + row.block.to(device)
        sums: list[torch.Tensor | None] = []
        for i, offset in enumerate(segment.offsets):
            flat = total.narrow(0, offset, segment.forms[i].n_elems)
            sums.append(segment.shaped(i, flat) if is_used[i] else None)
        return sums


def _will_run(node: weakref.ref[Any]) -> bool:
    """Tell whether the backward that runs will come to a node, if it still exists."""
    found = node()
    return found is not None and torch_graph.will_run(found)


def _is_batched(grad: torch.Tensor | None) -> bool:
    return grad is not None and torch_graph.is_batched(grad)


def _dense(aside: dict[int, torch.Tensor], j: int, grad: Any) -> torch.Tensor | None:
    """Return a gradient whose memory says all of it; put a sparse one aside."""
    if grad is None:
        return None
    if grad.layout is torch.strided:
        return grad.resolve_conj().resolve_neg()  # type: ignore[no-any-return]
    aside[j] = grad
    return None


class _Segment(torch.autograd.Function):
    """Trained parameters of the model.

    What it returns is on member 0: so backward takes its stream for the node's.
    """

    @staticmethod
    def forward(
        ctx: Any, of: Gradients, i: int, n_tokens: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.i = of, i
        # One for each replica: compiled autograd would add up what comes to one.
        device = of.group.devices[0]
        return tuple(torch.empty(0, device=device) for _ in range(n_tokens))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with ctx.of.group.on(ctx.of.streams):
            return None, None, None, *ctx.of.collect(ctx.i)


class _Replica(torch.autograd.Function):
    """What a replica has in place of a segment's parameters."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, of: Gradients, i: int, member: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.i, ctx.member = of, i, member
        return tuple(map(torch.Tensor.detach, of.slots_of(i, member)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.of.group.on(ctx.of.streams):
            ctx.of.take(ctx.i, ctx.member, grads)
        return None, None, None, None
