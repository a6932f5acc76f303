"""Gradients of replicas: packed on each device, and added to the module's.

In training each segment has two kinds of nodes in the graph::

    parameters --> _Segment --> _Replica of member k --> replica k's tensors

``_Replica`` packs the gradients of one member into a block.  The last member's block
starts the sum, on separate streams, while backward goes on.  ``_Segment`` runs at the
end of backward: it makes member 0's stream wait for the sum, and returns the sum.
Replica 0 is the module itself, so autograd adds the sum to its gradients.

In the graph, ``_Replica`` passes only None to ``_Segment``: for a tensor, autograd
would make member 0's stream wait for member k's at once.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from paceline._compat import torch_graph
from paceline._dp.group import Streams
from paceline._dp.replicate import tensors_of, unused_gradient
from paceline._dp.segments import Segment
from paceline._dp.transfers import move


class Arrival:
    """The gradients of one segment in one backward.

    Attributes
    ----------
    n_rows : int
        How many members will give gradients.
    blocks : dict
        The packed gradients of each member that gave some.
    used : set of int
        The tensors that have a gradient in a block.
    asides : dict
        By member, gradients that do not fit a block, by tensor: sparse ones, batches
        under vmap, or all if they have a graph.
    total : torch.Tensor or None
        Memory of member 0 for the sum of the blocks.
    is_begun : bool
    """

    def __init__(self, segment: Segment, n_rows: int) -> None:
        self.segment = segment
        self.n_rows = n_rows
        self.blocks: dict[int, torch.Tensor] = {}
        self.used: set[int] = set()
        self.asides: dict[int, dict[int, torch.Tensor]] = {}
        self.total: Any = None
        self.is_begun = False
        self.sum = segment.take_sum()
        self._users = {"collect", "settle"}
        self._lock = threading.Lock()

    def release(self, user: str) -> None:
        """Make `sum` available again, once it is collected and all streams wait."""
        with self._lock:
            if self._users == {user}:
                self.segment.sums.append(self.sum)
            self._users.discard(user)


class Gradients:
    """The state that the nodes of one forward share.

    A checkpoint runs a nested backward through them in the middle of another one: so
    the state is kept by backward.
    """

    def __init__(
        self,
        streams: Streams,
        segments: Sequence[Segment],
        n_replicas: int,
        inner: InnerBackwards,
    ) -> None:
        self.group = streams.group
        self.inner = inner
        self.streams = streams
        self.segments = segments
        self.n_replicas = n_replicas
        self._nodes: list[list[weakref.ref[Any]]] = [[] for _ in segments]
        self._backwards: dict[int, dict[int, Arrival]] = {}  # by segment: not collected
        self._lock = threading.Lock()

    # ---- the graph ------------------------------------------------------------------

    def slots(self, i: int) -> list[tuple[torch.Tensor, ...]]:
        """Return each further replica's tensors of a segment, in the graph."""
        tokens = _Segment.apply(self, i, *self.segments[i].tensors)  # type: ignore[no-untyped-call]
        # Segments that were registered first run last.
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
        """Pack a member's gradients, some of them None; the last starts the sum."""
        self.inner.see()
        arrival, block = self._arrival(i), None
        came = aside = {j: g for j, g in enumerate(grads) if g is not None}
        if not torch.is_grad_enabled():  # else gradients have graphs
            block, aside = self._pack(arrival, member, list(grads))
        with self._lock:
            if block is not None:
                arrival.blocks[member] = block
            if aside:
                arrival.asides[member] = aside
            arrival.used |= came.keys() - aside.keys()
            is_last = block is not None and len(arrival.blocks) == arrival.n_rows
        if is_last:
            self._begin(arrival)

    def _arrival(self, i: int) -> Arrival:
        """Return a segment's arrival in this thread's backward."""
        task = torch_graph.current_task()
        with self._lock:
            if task not in self._backwards:
                self._backwards[task] = self._opened()
            arrivals = self._backwards[task]
            if i not in arrivals:  # autograd did not announce it
                arrivals[i] = Arrival(self.segments[i], 0)
            return arrivals[i]

    def _opened(self) -> dict[int, Arrival]:
        """Return the arrivals to expect in a backward that begins.

        Memory for all its sums is allocated now: the fence orders earlier uses of that
        memory before the sums, so no sum waits for the rest of backward.
        """
        arrivals = {}
        for i, nodes in enumerate(self._nodes):
            left = filter(None, (node() for node in nodes))
            if n_rows := sum(map(torch_graph.will_run, left)):
                arrivals[i] = Arrival(self.segments[i], n_rows)
        if not torch.is_grad_enabled():
            self._allocate_totals(arrivals.values())
        return arrivals

    def _allocate_totals(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            arrival.total = arrival.segment.new_block(0)
        self.group.native.fence(self.streams.numbers)

    def _pack(
        self, arrival: Arrival, member: int, grads: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Return a block of gradients; move those that do not fit out of `grads`."""
        segment = arrival.segment
        block = segment.new_block(member)
        arguments = self.streams.numbers[member], member
        aside = {}
        others = arrival.sum.pack(*arguments, grads, block)
        for i in others:
            grad: Any = grads[i]
            if grad.layout is not torch.strided or torch_graph.is_batched(grad):
                aside[i], grads[i] = grad, None
            else:
                grads[i] = torch.empty_like(segment.slots[member][i]).copy_(grad)
        if others:
            arrival.sum.pack(*arguments, grads, block)
        return block, aside

    # ---- all members' ---------------------------------------------------------------

    def _begin(self, arrival: Arrival) -> None:
        """Start the sum of the rows; it waits for their packing alone."""
        if arrival.total is None:  # more came than autograd announced
            self._allocate_totals([arrival])
        arrival.sum.begin(self.group.rooms, arrival.total)
        arrival.is_begun = True
        # From now on: what is held before its sum has begun may be settled too early.
        self.group.hold(self.streams, partial(arrival.release, "settle"))

    def collect(self, i: int) -> list[torch.Tensor | None]:
        """Return the sum of the gradients of members 1, 2, ..., for each tensor."""
        arrival = self._arrival(i)
        sums: list[torch.Tensor | None] = [None] * len(arrival.segment.tensors)
        if arrival.blocks:
            if not arrival.is_begun:
                self._begin(arrival)
            arrival.sum.end(self.streams.numbers[0])
            views = arrival.segment.views(arrival.total)
            for j in arrival.used:
                # Its own version counter: a write to one does not concern the others.
                sums[j] = views[j].data
        for member, aside in sorted(arrival.asides.items()):
            moved = move(self.streams, (member, 0), [*aside.values()])
            for j, grad in zip(aside, moved, strict=True):
                sums[j] = _added(sums[j], grad)
        for j, tensor in enumerate(arrival.segment.tensors):
            if sums[j] is None:
                sums[j] = unused_gradient(tensor)
        arrival.release("collect")
        self._close(i)
        return sums

    def _close(self, i: int) -> None:
        """Note that a segment is collected; after the last, streams wait for sums."""
        with self._lock:
            task = torch_graph.current_task()
            self._backwards[task].pop(i)
            is_over = not self._backwards[task]
            if is_over:
                self._backwards.pop(task)
        if is_over:
            self.group.settle()


def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return the sum; torch adds a sparse tensor to a dense one, not the reverse."""
    if one is None:
        return other
    return other + one if one.layout is not torch.strided else one + other


class _Segment(torch.autograd.Function):
    """The trained parameters of a segment.

    Its outputs are on member 0, so backward runs this node on member 0's stream.
    """

    @staticmethod
    def forward(
        ctx: Any, of: Gradients, i: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.i = of, i
        # One for each replica: compiled autograd would add up those of a shared one.
        device = of.group.devices[0]
        return tuple(torch.empty(0, device=device) for _ in range(1, of.n_replicas))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with ctx.of.streams.on():
            return None, None, *ctx.of.collect(ctx.i)


class _Replica(torch.autograd.Function):
    """A replica's copies of a segment's parameters."""

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


# ---- backwards inside a forward -----------------------------------------------------


class InnerBackwards:
    """Tracks the backwards inside one forward whose replicas run in order.

    They give gradients to the module's own parameters.  A forward that then sets
    ``p.grad = None`` does so on its copies; the module keeps those gradients.

    Attributes
    ----------
    were_seen : bool
        Whether a replica that has copies ran one.
    hooks : dict
        Called with the gradients of copies, until the forward clears it.
    """

    def __init__(self, parts: list[Module]) -> None:
        self._parts = parts
        self._is_running = False
        self._tasks: set[int] = set()
        self._has_grads = False
        self.were_seen = False
        self.hooks: dict[int, Callable[[torch.Tensor], None]] = {0: self.see}

    def __enter__(self) -> None:
        """Note that a replica's forward begins."""
        self._is_running = True
        self._tasks = set()

    def see(self, *_: Any) -> None:
        """Note a backward, before it gives gradients to the parameters."""
        if self._is_running:
            if not self._tasks:
                originals = self._originals()
                self._has_grads = any(p.grad is not None for p in originals)
            self._tasks.add(torch_graph.current_task())

    def _originals(self) -> list[torch.Tensor]:
        found = tensors_of(self._parts).values()
        return [tensor for tensor in found if tensor.requires_grad and tensor.is_leaf]

    def __exit__(self, *_: object) -> None:
        """Remove gradients if replica 0 left none; warn if that is a guess."""
        self._is_running = False
        self.were_seen |= bool(self._tasks)
        if not self._tasks or (self._has_grads and len(self._tasks) == 1):
            return
        if not self._has_grads:
            for tensor in self._originals():
                tensor.grad = None
        warnings.warn(
            "the forward of DataParallel runs backward passes: in a replica, "
            "p.grad = None has no effect, because parameters are copies and gradients "
            "go to the module itself. If replica 0 leaves no gradients, those of the "
            "others are dropped; if it leaves some, all are added. Use "
            "torch.autograd.grad in forward instead",
            stacklevel=2,
        )
