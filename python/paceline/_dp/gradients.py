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
from paceline._dp.group import Streams
from paceline._dp.inner_backwards import InnerBackwards
from paceline._dp.replicate import unused_gradient
from paceline._dp.segments import Segment
from paceline._dp.transfers import move


class _Row(NamedTuple):
    """What one member's backward gives of a segment.

    `packed` says of which tensors the block has a gradient.  `aside` are those that no
    block can hold: sparse ones, or all of them (with a graph, or of vmap's).
    """

    block: torch.Tensor | None
    packed: list[bool]
    aside: dict[int, torch.Tensor]


class Arrival:
    """The gradients of one segment in one backward.

    Attributes
    ----------
    rows : dict
        By member.
    n_rows : int
        How many members will come.
    total : torch.Tensor or None
        On member 0, what they are added up in.
    is_begun, is_collected : bool
    """

    def __init__(self, segment: Segment, streams: Streams, n_rows: int) -> None:
        self.segment = segment
        self.streams = streams
        self.n_rows = n_rows
        self.total: torch.Tensor | None = None
        self.rows: dict[int, _Row] = {}
        self.is_begun = False
        self.is_collected = False
        self.sum = segment.take_sum()

    def release(self) -> None:
        """Give back what added up, once all streams wait for it."""
        if self.is_collected:
            self.segment.sums.append(self.sum)


class Gradients:
    """What the nodes of one forward share.

    A checkpoint runs a backward of its own through them in the middle of another one:
    so all is kept by backward.
    """

    def __init__(
        self,
        streams: Streams,
        segments: Sequence[Segment],
        n: int,
        inner: InnerBackwards,
    ) -> None:
        self.group = streams.group
        self.inner = inner
        self.streams = streams
        self.segments = segments
        self._n_replicas = n
        self._nodes: list[list[weakref.ref[Any]]] = [[] for _ in segments]
        self._backwards: dict[int, dict[int, Arrival]] = {}  # by segment: not collected
        self._lock = threading.Lock()

    # ---- the graph ------------------------------------------------------------------

    def slots(self, i: int) -> list[tuple[torch.Tensor, ...]]:
        """Return the tensors of a segment by further replica, in the graph."""
        n_tokens = self._n_replicas - 1
        tokens = _Segment.apply(self, i, n_tokens, *self.segments[i].tensors)  # type: ignore[no-untyped-call]
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

    # ---- one member's ---------------------------------------------------------------

    def take(self, i: int, member: int, grads: Sequence[Any]) -> None:
        """Pack a member's gradients, some of them None; add up if all have come."""
        self.inner.see()
        arrival = self._arrival(i)
        is_plain = not (
            torch.is_grad_enabled()
            or any(torch_graph.is_batched(grad) for grad in grads if grad is not None)
        )
        dense = [_dense(grad) if is_plain else None for grad in grads]
        pairs = enumerate(zip(grads, dense, strict=True))
        aside = {j: g for j, (g, d) in pairs if g is not None and d is None}
        packed = [grad is not None for grad in dense]
        block = self._pack(arrival, member, dense) if is_plain else None
        with self._lock:
            arrival.rows[member] = _Row(block, packed, aside)
            rows = list(arrival.rows.values())
        if len(rows) == arrival.n_rows and all(r.block is not None for r in rows):
            self._begin(arrival)

    def _arrival(self, i: int) -> Arrival:
        """Return what there is of a segment in this thread's backward."""
        task = torch_graph.current_task()
        with self._lock:
            if task not in self._backwards:
                self._backwards[task] = self._opened()
            arrivals = self._backwards[task]
            if i not in arrivals:  # autograd had not said that it would come
                arrivals[i] = Arrival(self.segments[i], self.streams, 0)
            return arrivals[i]

    def _opened(self) -> dict[int, Arrival]:
        """Return what is to come in a backward that begins.

        Memory for its sums is allocated now, for all: what streams have used it for
        comes before the fence, and so no sum waits for the rest of backward.
        """
        counts = [sum(map(_will_run, nodes)) for nodes in self._nodes]
        arrivals = {
            i: Arrival(segment, self.streams, n)
            for i, (segment, n) in enumerate(zip(self.segments, counts, strict=True))
            if n
        }
        if not torch.is_grad_enabled():
            for arrival in arrivals.values():
                arrival.total = self._new_total(arrival.segment)
            self.group.native.fence(self.streams.numbers)
        return arrivals

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

    # ---- all members' ---------------------------------------------------------------

    def _begin(self, arrival: Arrival) -> None:
        """Have the rows added up, behind what packs them and nothing else."""
        if arrival.total is None:  # more has come than autograd had said
            arrival.total = self._new_total(arrival.segment)
            self.group.native.fence(self.streams.numbers)
        arrival.is_begun = True
        self.group.hold(arrival.streams, arrival.release)
        arrival.sum.begin(self.group.rooms, arrival.total)

    def collect(self, i: int) -> list[torch.Tensor | None]:
        """Return the sum of the gradients of members 1, 2, ..., for each tensor."""
        arrival = self._arrival(i)
        sums: list[torch.Tensor | None] = [None] * len(arrival.segment.tensors)
        if any(row.block is not None for row in arrival.rows.values()):
            if not arrival.is_begun:
                self._begin(arrival)
            arrival.sum.end(self.streams.numbers[0])
            sums = _parts(arrival)
        for member, row in sorted(arrival.rows.items()):
            if not row.aside:
                continue
            moved = move(self.streams, (member, 0), [*row.aside.values()])
            for j, grad in zip(row.aside, moved, strict=True):
                sums[j] = _added(sums[j], grad)
        for j, tensor in enumerate(arrival.segment.tensors):
            if sums[j] is None:
                sums[j] = unused_gradient(tensor)
        arrival.is_collected = True
        self._close(i)
        return sums

    def _close(self, i: int) -> None:
        """Note that a segment is collected; with the last one streams wait for sums."""
        with self._lock:
            task = torch_graph.current_task()
            self._backwards[task].pop(i)
            is_over = not self._backwards[task]
            if is_over:
                self._backwards.pop(task)
        if is_over:
            self.group.settle()


def _parts(arrival: Arrival) -> list[torch.Tensor | None]:
    """Return the sum of the rows' blocks, by tensor."""
    assert arrival.total is not None
    views = arrival.segment.views(arrival.total)
    used = map(any, zip(*(row.packed for row in arrival.rows.values()), strict=True))
    # A count of versions for each: what is done to one does not concern others.
    return [v.data if is_used else None for v, is_used in zip(views, used, strict=True)]


def _will_run(node: weakref.ref[Any]) -> bool:
    """Tell whether the backward that runs will come to a node, if it still exists."""
    found = node()
    return found is not None and torch_graph.will_run(found)


def _dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return a gradient whose memory says all of it; None for a sparse one."""
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.resolve_conj().resolve_neg()


def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return the sum; torch adds a sparse tensor to a dense one, not the reverse."""
    if one is None:
        return other
    return other + one if one.layout is not torch.strided else one + other


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
        with ctx.of.streams.on():
            return None, None, None, *ctx.of.collect(ctx.i)


class _Replica(torch.autograd.Function):
    """What a replica has in place of a segment's parameters."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, of: Gradients, i: int, member: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.i, ctx.member = of, i, member
        return tuple(map(torch.Tensor.detach, of.segments[i].slots[member]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with ctx.of.streams.on():
            ctx.of.take(ctx.i, ctx.member, grads)
        return None, None, None, None
