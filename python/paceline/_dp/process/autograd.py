"""The two nodes that stand for other processes' replicas in the caller's graph.

::

    inputs, parameters -> Send -> handle -> Receive -> the others' outputs
            |                                                |
            +--> replica 0 ----------------------------------+--> gather -> loss

Replica 0 is the caller's own module, in the ordinary graph.  Autograd runs, of the
nodes that are ready, the one made last: in backward `Receive` comes first and posts the
gradients of the outputs, then the graph of replica 0 runs while the others work, and
`Send`, made before all that, comes last.  That order is for speed alone.

How a parameter's gradients meet: where nothing can see the difference, the others' are
added to ``.grad`` when backward ends (*deferred*), which is cheap.  Where something can
(hooks on parameters, ``autograd.grad``, ``backward(inputs=...)``), `Send` waits for
them and returns them to autograd, which adds them to replica 0's.

A double backward (``create_graph=True``) makes another pair of these nodes::

    first     inputs, parameters -> Send -> Receive -> outputs
    second    gradients of outputs, inputs, parameters -> Send' -> Receive' ->
              gradients of inputs, sums of the gradients of parameters

Each replica runs its backward with a graph, and keeps that by a number, as it keeps
that of a forward.  So orders do not differ: a backward through `Receive'` is an
ordinary backward, or a double one again, and no forward is run a second time.

`Send'` is best made before replica 0's backward, since autograd runs the nodes made
last first: in the next backward replica 0 then works while the others do.  What their
graphs will reach is only known afterwards, so it is expected to be what it was in the
last such backward; where that was wrong, `Send'` is made anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline._compat import odd_tensors, torch_core, torch_graph
from paceline._dp.process import messages

if TYPE_CHECKING:
    from paceline._dp.process.backward import Backward
    from paceline._workers.answers import Reply

SECOND_BACKWARD = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)
_MOST_EXPECTED = 64

Grads = tuple[torch.Tensor | None, ...]


@dataclass(eq=False)
class RemoteGraph:
    """The graph that replicas keep of one forward, or of one double backward."""

    backward: Backward
    number: int  # by which the replicas know it
    n_inputs: list[int] = field(default_factory=list)  # with gradient, of each replica
    places: list[Sequence[int]] = field(default_factory=list)
    """Which of the outputs of `Receive` are each replica's."""
    slots: list[int] = field(default_factory=list)  # of the parameters given to `Send`
    outputs: list[torch.Tensor] = field(default_factory=list)  # for `Receive` to return
    spent: set[int] = field(default_factory=set)
    """Outputs whose backward has run and kept no graph: each may have its own."""
    is_held: bool = False  # whether the replicas keep it
    is_deferred: bool = False
    """Whether the gradients of parameters are added when its backward ends."""
    is_in_ddp: bool = field(default_factory=torch_core.is_in_torch_ddp)
    """Whether torch's DistributedDataParallel ran the forward: its hooks are hidden."""
    gradients: Gradients | None = None  # what replicas answer, until `Send` takes it
    error: Exception | None = None
    """Of a replica, until `Send` raises it; nobody's where another has come first."""
    double: DoubleBackward | None = None  # what they run, where that has a graph itself
    batch: Grads | None = None  # gradients that are vmap's, many in one

    def inputs_of(self, parts: Sequence[tuple[Any, list[Any]]]) -> list[torch.Tensor]:
        """Return the inputs of replicas that require a gradient, and note how many."""
        inputs = [
            [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
            for _, leaves in parts
        ]
        self.n_inputs = [len(of_replica) for of_replica in inputs]
        return [x for of_replica in inputs for x in of_replica]

    def begin_backward(self, gradients: Grads, node: Any) -> None:
        """Have the replicas begin the backward of this graph; `node` is `Receive`'s."""
        wanted = {i for i, gradient in enumerate(gradients) if gradient is not None}
        if not self.is_held or not self.spent.isdisjoint(wanted):
            raise RuntimeError(SECOND_BACKWARD)
        if not torch_core.keeps_graph():
            self.spent |= wanted
            self.is_held = len(self.spent) < len(gradients)
        if any(g is not None and torch_graph.is_batched(g) for g in gradients):
            self.batch = gradients
        elif torch.is_grad_enabled():
            self._post(gradients, node.next_functions[0][0])
        else:
            self._post(gradients, None)

    def _post(self, gradients: Grads, send: Any, *, may_defer: bool = True) -> None:
        """Post a gradient of each output; `send` is the node that a graph needs."""
        double: DoubleBackward | None = None
        if torch.is_grad_enabled():
            double = DoubleBackward(self, gradients, send)
        self.backward.post(self, gradients, double, may_defer)
        if double is not None:
            double.expect()

    def end_backward(self, send: Any) -> list[torch.Tensor | None]:
        """Return the gradients of what `Send` was given."""
        if self.batch is not None:
            batch, self.batch = self.batch, None
            return self._run_batch(batch, send)
        if self.is_deferred and not any(self.n_inputs):
            return [None] * len(self.slots)  # they come when this backward ends
        return self._take()

    def _take(self) -> list[torch.Tensor | None]:
        """Wait for the replicas, and return the gradients."""
        self.backward.wait()
        error, self.error = self.error, None
        if error is not None:
            raise error
        gradients, self.gradients = self.gradients, None
        double, self.double = self.double, None
        if gradients is None:
            raise RuntimeError(
                "the replicas' part of this backward is missing: an error has ended it"
            )
        of_slots: list[torch.Tensor | None] = [None] * len(self.slots)
        if not self.is_deferred:
            of_slots = self._gradients_of_slots(gradients)
        values = gradients.of_inputs + of_slots
        return values if double is None else double.finish(values)

    def _gradients_of_slots(self, gradients: Gradients) -> list[torch.Tensor | None]:
        of_slots = [gradients.of_slots[slot] for slot in self.slots]
        sent = set(self.slots)
        if any(
            gradient is not None and slot not in sent
            for slot, gradient in enumerate(gradients.of_slots)
        ):
            raise RuntimeError(
                "a replica has a gradient of a parameter with hooks that its "
                'forward did not show: wrap by engine="thread"'
            )
        for slot, fallback in gradients.fallbacks:
            at = self.slots.index(slot)
            before = of_slots[at]
            of_slots[at] = fallback if before is None else before + fallback
        return of_slots

    def _run_batch(self, gradients: Grads, send: Any) -> list[Any]:
        """Run one backward for each of the many that gradients of vmap stand for."""
        is_held, self.is_held = self.is_held, True
        try:
            values = self._run_rows(gradients, send)
        finally:
            self.is_held = is_held
            if not is_held:
                self.backward.sync.dropped.append(self.number)
        return values

    def _run_rows(self, gradients: Grads, send: Any) -> list[Any]:
        if not any(g is not None and torch_graph.is_batched(g) for g in gradients):
            self._post(gradients, send, may_defer=False)
            return self._take()
        batch = torch_graph.Batch(gradients)
        rows = [self._run_rows(row, send) for row in batch.rows()]
        return [batch.join(column) for column in zip(*rows, strict=True)]

    def __del__(self) -> None:
        if self.is_held:
            self.backward.sync.dropped.append(self.number)


@dataclass
class Gradients:
    """What the replicas have answered to a backward."""

    of_inputs: list[torch.Tensor | None] = field(default_factory=list)
    of_slots: list[torch.Tensor | None] = field(default_factory=list)
    fallbacks: odd_tensors.OddTensors = field(default_factory=list)


class Send(torch.autograd.Function):
    """Comes first in forward, last in backward."""

    @staticmethod
    def forward(
        ctx: Any, graph: RemoteGraph, token: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        n_inputs = sum(graph.n_inputs)
        if n_inputs:  # a double backward will have to name them
            ctx.save_for_backward(*tensors[:n_inputs])
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *ignored: Any) -> Any:
        return (None, None, *ctx.graph.end_backward(ctx))


class Receive(torch.autograd.Function):
    """Comes last in forward, first in backward."""

    @staticmethod
    def forward(ctx: Any, graph: RemoteGraph, handle: torch.Tensor) -> Any:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        outputs, graph.outputs = graph.outputs, []
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        graph: RemoteGraph = ctx.graph
        graph.begin_backward(gradients, ctx)
        return None, torch.zeros(())


class AddDeferred:
    """Called when a backward ends; dropped uncalled, the backward has failed."""

    def __init__(self, backward: Backward) -> None:
        self._backward: Backward | None = backward

    def __call__(self) -> None:
        if self._backward is not None:
            self._backward.add_deferred()  # Ctrl-C in it: as if it had not been called
            self._backward = None

    def __del__(self) -> None:
        backward = getattr(self, "_backward", None)  # Ctrl-C may come before it is made
        if backward is not None:
            backward.forget()


class DoubleBackward:
    """A backward that has a graph itself, from `Receive` until `Send`.

    `gradients` are those of the graph's outputs; `send` is the node of its `Send`.
    """

    def __init__(self, graph: RemoteGraph, gradients: Grads, send: Any) -> None:
        edges = [edge for edge, _ in send.next_functions[1:]]  # the token's is first
        n_inputs = sum(graph.n_inputs)
        inputs = iter(send.saved_tensors) if n_inputs else iter(())
        wanted = [torch_graph.will_run(edge) for edge in edges]
        self._first = graph
        self._backward = graph.backward
        self._graph = graph.backward.new_graph()
        self._graph.is_in_ddp = graph.is_in_ddp
        self._dropped: list[int] = []
        self._parameters = {
            slot: edge.variable
            for slot, edge in zip(graph.slots, edges[n_inputs:], strict=True)
        }
        self._roots: list[list[torch.Tensor]] = []
        self._wanted_inputs: list[bytes] = []
        begin = 0
        for places, n in zip(graph.places, graph.n_inputs, strict=True):
            posted = [gradients[i] for i in places]
            roots = [g for g in posted if g is not None and g.requires_grad]
            self._roots.append(roots + [next(inputs) for _ in range(n)])
            self._wanted_inputs.append(bytes(wanted[begin : begin + n]))
            begin += n
        # A slot that Send was not given should have no gradient; else it is an error.
        n_slots = len(self._backward.sync.model.gradients.parameters)
        wanted_slots = bytearray(b"\1" * n_slots)
        for slot, is_wanted in zip(graph.slots, wanted[n_inputs:], strict=True):
            wanted_slots[slot] = is_wanted
        self._wanted_slots = bytes(wanted_slots)
        self._expected: tuple[bytes, ...] | None = None
        self._handle: torch.Tensor | None = None
        self._used: tuple[bytes, ...] = ()
        self._inputs_with_graph: list[bytes] = []
        self._slots_with_graph: list[bytes] = []

    def header(self, k: int, number: int, bits: int) -> bytes:
        """Return the header of the request to one replica."""
        self._graph.is_held = True  # from now on: the answer may never be taken
        wanted = self._wanted_inputs[k]
        if k == 0:
            self._dropped = list(self._backward.sync.dropped)
        return (
            messages.BACKWARD_HEADER.pack(number, bits | messages.DOUBLE)
            + messages.DOUBLE_HEADER.pack(self._graph.number, len(wanted))
            + self._wanted_slots
            + wanted
            + struct.pack(f"<{len(self._dropped)}Q", *self._dropped)
        )

    def read(self, answers: list[Reply]) -> list[Reply]:
        """Record what the replicas say of their graphs; return what is left."""
        n_slots = len(self._wanted_slots)
        left: list[Reply] = []
        used = []
        for (payload, tensors, flags), roots, wanted in zip(
            answers, self._roots, self._wanted_inputs, strict=True
        ):
            begin, end = 2 * n_slots, 3 * n_slots + len(roots)
            self._slots_with_graph.append(payload[n_slots:begin])
            self._inputs_with_graph.append(flags[: len(wanted)])
            used.append(payload[begin:end])
            left.append((payload[:n_slots] + payload[end:], tensors, flags))
        self._used = tuple(used)
        sync = self._backward.sync
        if len(answers) == sync.workers.n:  # else the next forward tells all
            del sync.dropped[: len(self._dropped)]
        return left

    @property
    def _kind(self) -> tuple[Any, ...]:
        """By which double backwards are taken to be alike."""
        sizes = tuple(len(roots) for roots in self._roots)
        return sizes, tuple(self._first.slots), self._wanted_slots, *self._wanted_inputs

    def expect(self) -> None:
        """Make `Send` for what the replicas' graphs reached the last time."""
        self._expected = self._backward.expected.get(self._kind)
        if self._expected is not None and any(map(any, self._expected)):
            self._handle = self._send(self._expected)

    def _send(self, used: tuple[bytes, ...]) -> torch.Tensor:
        graph, n_slots = self._graph, len(self._wanted_slots)
        parts = [
            [
                root
                for root, is_used in zip(roots, mask[n_slots:], strict=True)
                if is_used
            ]
            for roots, mask in zip(self._roots, used, strict=True)
        ]
        graph.n_inputs = [len(part) for part in parts]
        graph.slots = [i for i in self._first.slots if any(mask[i] for mask in used)]
        handle: torch.Tensor = Send.apply(  # type: ignore[no-untyped-call]
            graph,
            self._backward.token,
            *[root for part in parts for root in part],
            *[self._parameters[slot] for slot in graph.slots],
        )
        return handle

    def finish(self, values: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients that the replicas have answered, with their graph."""
        graph, expected = self._graph, self._backward.expected
        if self._used != self._expected:
            if len(expected) >= _MOST_EXPECTED:
                expected.clear()
            expected[self._kind] = self._used
        at = self._lay_out_outputs()
        if not at:
            graph.is_held = False
            return values
        if self._handle is None or self._used != self._expected:
            self._handle = self._send(self._used)
        for i in at:
            value = values[i]
            assert value is not None
            graph.outputs.append(value)
        outputs = Receive.apply(graph, self._handle)  # type: ignore[no-untyped-call]
        for i, output in zip(at, outputs, strict=True):
            values[i] = output
        return values

    def _lay_out_outputs(self) -> list[int]:
        """Say which of `Receive`'s outputs are each replica's; return which they are.

        A parameter's is a sum over replicas, whose gradient is the gradient of each.
        """
        at: list[int] = []
        begin = 0
        for has_graph in self._inputs_with_graph:
            indices = [begin + i for i, has in enumerate(has_graph) if has]
            self._graph.places.append(list(range(len(at), len(at) + len(indices))))
            at += indices
            begin += len(has_graph)
        for i, slot in enumerate(self._first.slots):
            owners = [
                k
                for k, has_graph in enumerate(self._slots_with_graph)
                if has_graph[slot]
            ]
            for k in owners:
                places = self._graph.places[k]
                assert isinstance(places, list)
                places.append(len(at))
            if owners:
                at.append(begin + i)
        return at
