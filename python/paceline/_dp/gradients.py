"""Gradients of replicas: packed on each device, and added to the module's.

In training each part of a segment has two kinds of nodes in the graph::

    parameters --> _Segment --> _Replica of member k --> replica k's tensors

``_Replica`` takes the gradients of one member.  Once a member has all those of a
segment, it packs them into a block.  The last member's block starts the sum, on
separate streams, while backward goes on.  ``_Segment`` runs at the end of backward: it
makes member 0's stream wait for the sum, and returns the sum.  Replica 0 is the module
itself, so autograd adds the sum to its gradients.

A parameter with hooks is a separate part: they must not run if no replica has used it.
So that its ``_Segment`` waits for the other parts, a further node runs between the two,
after all that is ready on member k's device.  If that is too early, ``_Segment`` adds
up the part's own gradients.

In the graph, ``_Replica`` passes only None to ``_Segment``: for a tensor, autograd
would make member 0's stream wait for member k's at once.
"""

from __future__ import annotations

import collections
import itertools
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
from paceline._dp.replicate import Entries, unused_gradient
from paceline._dp.segments import Segment
from paceline._dp.transfers import move


class Part:
    """Tensors of a segment, by their numbers, that share nodes in the graph."""

    def __init__(self, segment: int, places: Sequence[int]) -> None:
        self.segment = segment
        self.places = places


class Arrival:
    """The gradients of one segment in one backward.

    Attributes
    ----------
    awaited : collections.Counter
        By member, how many of its nodes have not run yet.
    parts : set of Part
        Those whose sum is not collected yet.
    n_rows : int
        How many members will give gradients.
    rows : dict
        By member, gradients that are not packed yet, by tensor.
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

    def __init__(self, segment: Segment, nodes: Sequence[tuple[Part, int]]) -> None:
        self.segment = segment
        self.awaited = collections.Counter(member for _, member in nodes)
        self.parts = {part for part, _ in nodes}
        self.n_rows = len(self.awaited)
        self.rows: dict[int, dict[int, torch.Tensor]] = {}
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

    def beside(
        self, part: Part, *, is_begun: bool
    ) -> dict[int, dict[int, torch.Tensor]]:
        """Return, by member, those of a part's gradients that the sum does not have.

        Another thread may begin the sum now, so the caller says whether it counts.
        """
        given = [*self.asides.items()]
        if not is_begun:
            used, view = self.used.intersection(part.places), self.segment.view
            blocks = self.blocks.items()
            views = [(k, {j: view(block, j) for j in used}) for k, block in blocks]
            given = [*self.rows.items(), *views, *given]  # a view is 0 if it is aside
        found: dict[int, dict[int, torch.Tensor]] = {}
        for k, grads in given:
            own = {j: grads[j] for j in part.places if j in grads}
            found.setdefault(k, {}).update(own)
        return found


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
        self._turns = itertools.count()
        # Of each segment, with their part and member.
        self._nodes: list[list[tuple[Part, int, weakref.ref[Any]]]]
        self._nodes = [[] for _ in segments]
        self._backwards: dict[int, dict[int, Arrival]] = {}  # by segment: not collected
        self._lock = threading.Lock()

    # ---- the graph ------------------------------------------------------------------

    def slots(self, i: int) -> list[list[torch.Tensor]]:
        """Return each further replica's tensors of a segment, in the graph."""
        segment = self.segments[i]
        made = [list(segment.slots[k]) for k in range(1, self.n_replicas)]
        parts = [Part(i, places) for places in segment.parts()]
        for part in parts:
            own = [segment.tensors[j] for j in part.places]
            _, *tokens = _Segment.apply(self, part, *own)  # type: ignore[no-untyped-call]
            # Parameters that were registered first get their gradients last.
            turn = next(self._turns)
            torch_graph.set_turn(tokens[0].grad_fn, turn)
            for k, token in enumerate(tokens, 1):
                if len(parts) > 1:
                    token = token.view_as(token)
                    torch_graph.set_turn(token.grad_fn, turn)
                tensors = _Replica.apply(token, self, part, k)  # type: ignore[no-untyped-call]
                node = tensors[0].grad_fn
                torch_graph.set_turn(node, torch_graph.AT_ONCE)
                self._nodes[i].append((part, k, weakref.ref(node)))
                for j, tensor in zip(part.places, tensors, strict=True):
                    made[k - 1][j] = tensor
        return made

    # ---- one member's ---------------------------------------------------------------

    def take(self, part: Part, member: int, grads: Sequence[Any]) -> None:
        """Take a member's gradients, some of them None; with the last, pack them."""
        self.inner.see()
        arrival = self._arrival(part.segment)
        pairs = zip(part.places, grads, strict=True)
        came = {j: grad for j, grad in pairs if grad is not None}
        with self._lock:
            arrival.parts.add(part)
            arrival.awaited[member] -= 1
            # They have graphs, or autograd did not announce them.
            if torch.is_grad_enabled() or member in arrival.blocks:
                arrival.asides.setdefault(member, {}).update(came)
                return
            row = arrival.rows.setdefault(member, {})
            row.update(came)
        if arrival.awaited[member] <= 0:
            with self.streams.on():
                self._pack(arrival, member, row)

    def _arrival(self, i: int) -> Arrival:
        """Return a segment's arrival in this thread's backward."""
        task = torch_graph.current_task()
        with self._lock:
            if task not in self._backwards:
                with self.streams.on():
                    self._backwards[task] = self._opened()
            arrivals = self._backwards[task]
            if i not in arrivals:  # autograd did not announce it
                arrivals[i] = Arrival(self.segments[i], [])
            return arrivals[i]

    def _opened(self) -> dict[int, Arrival]:
        """Return the arrivals to expect in a backward that begins.

        Memory for all its sums is allocated now: the fence orders earlier uses of that
        memory before the sums, so no sum waits for the rest of backward.
        """
        arrivals = {}
        for i, nodes in enumerate(self._nodes):
            held = [(part, k, node) for part, k, ref in nodes if (node := ref())]
            left = [(part, k) for part, k, node in held if torch_graph.will_run(node)]
            if left:
                arrivals[i] = Arrival(self.segments[i], left)
        if not torch.is_grad_enabled():
            self._allocate_totals(arrivals.values())
        return arrivals

    def _allocate_totals(self, arrivals: Iterable[Arrival]) -> None:
        for arrival in arrivals:
            arrival.total = arrival.segment.new_block(0)
        self.group.native.fence(self.streams.numbers)

    def _pack(
        self, arrival: Arrival, member: int, row: dict[int, torch.Tensor]
    ) -> None:
        """Pack the gradients that fit a member's block; the last one starts the sum."""
        segment = arrival.segment
        block = segment.new_block(member)
        arguments = self.streams.numbers[member], member
        grads: list[Any] = [row.get(j) for j in range(len(segment.tensors))]
        aside = {}
        others = arrival.sum.pack(*arguments, grads, block)
        for i in others:
            grad = grads[i]
            if grad.layout is not torch.strided or torch_graph.is_batched(grad):
                aside[i], grads[i] = grad, None
            else:
                grads[i] = torch.empty_like(segment.slots[member][i]).copy_(grad)
        if others:
            arrival.sum.pack(*arguments, grads, block)
        with self._lock:
            del arrival.rows[member]
            arrival.blocks[member] = block
            if aside:
                arrival.asides[member] = aside
            arrival.used |= row.keys() - aside.keys()
            is_last = len(arrival.blocks) == arrival.n_rows
        if is_last:
            self._begin(arrival)

    # ---- all members' ---------------------------------------------------------------

    def _begin(self, arrival: Arrival) -> None:
        """Start the sum of the rows; it waits for their packing alone."""
        if arrival.total is None:  # more came than autograd announced
            self._allocate_totals([arrival])
        arrival.sum.begin(self.group.rooms, arrival.total)
        arrival.is_begun = True
        # From now on: what is held before its sum has begun may be settled too early.
        self.group.hold(self.streams, partial(arrival.release, "settle"))

    def collect(self, part: Part) -> list[torch.Tensor | None]:
        """Return the sums of the gradients of members 1, 2, ..., for a part."""
        segment, arrival = self.segments[part.segment], self._arrival(part.segment)
        if arrival.blocks and not arrival.n_rows and not arrival.is_begun:
            self._begin(arrival)  # autograd did not announce it
        sums: dict[int, Any] = dict.fromkeys(part.places)
        with self._lock:
            is_begun = arrival.is_begun
            beside = arrival.beside(part, is_begun=is_begun)
        if is_begun:
            arrival.sum.end(self.streams.numbers[0])
            for j in arrival.used.intersection(part.places):
                # Its own version counter: a write to one does not concern the others.
                sums[j] = segment.view(arrival.total, j).data
        wide = torch.promote_types(segment.dtype, torch.float32)
        for member, grads in sorted(beside.items()):
            moved = move(self.streams, (member, 0), [*grads.values()])
            for j, grad in zip(grads, moved, strict=True):
                sums[j] = _added(sums[j], grad.to(wide))
        for j, total in sums.items():
            if total is None:
                sums[j] = unused_gradient(segment.tensors[j])
            else:
                sums[j] = total.to(segment.dtype)
        self._close(part)
        return [*sums.values()]

    def _close(self, part: Part) -> None:
        """Note that a part is collected; after the last, streams wait for sums."""
        task = torch_graph.current_task()
        with self._lock:
            arrivals = self._backwards[task]
            arrival = arrivals[part.segment]
            arrival.parts.discard(part)
            if arrival.parts:
                return
            del arrivals[part.segment]
            if not arrivals:
                del self._backwards[task]
        arrival.release("collect")
        if not arrivals:
            self.group.settle()


def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Return the sum; torch adds a sparse tensor to a dense one, not the reverse."""
    if one is None:
        return other
    return other + one if one.layout is not torch.strided else one + other


class _Segment(torch.autograd.Function):
    """The trained parameters of a part of a segment.

    Its first output is on member 0, so backward runs this node on member 0's stream.
    """

    @staticmethod
    def forward(
        ctx: Any, of: Gradients, part: Part, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.part = of, part
        # One for each replica: compiled autograd would add up those of a shared one.
        devices = of.group.devices[: of.n_replicas]
        return tuple(torch.empty(0, device=device) for device in devices)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        with ctx.of.streams.on():
            return None, None, *ctx.of.collect(ctx.part)


class _Replica(torch.autograd.Function):
    """A replica's copies of a part's parameters."""

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, of: Gradients, part: Part, member: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.of, ctx.part, ctx.member = of, part, member
        slots = of.segments[part.segment].slots[member]
        return tuple([slots[j].detach() for j in part.places])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.of.take(ctx.part, ctx.member, grads)
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
        self.hooks: dict[int, Callable[[Any], object]] = {0: self.see}

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
        found = Entries.of(self._parts).by_id().values()
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
