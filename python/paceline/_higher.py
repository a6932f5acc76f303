"""Gradients of higher order: a backward of the replicas that is recorded itself.

::

    first order    inputs, parameters -> Collect -> Launch -> outputs
    second         gradients of outputs, inputs, parameters -> Collect' -> Launch' ->
                   gradients of inputs, sums of the gradients of parameters

With ``create_graph=True``, `Launch` posts the gradients of a call's outputs as ever,
and each replica runs its backward with a graph.  That graph is one more call: the
replica keeps it by a number, and in the caller's graph another pair of the same two
nodes stands for it.  So orders do not differ: a backward through `Launch'` is an
ordinary backward, or recorded again, and no forward is run a second time.  In a replica
the graphs of both calls share nodes: those free nothing before both calls are dropped.

`Collect'` is best made before replica 0's backward, since autograd runs the nodes made
last first: in the next backward replica 0 then works while the others do.  What their
graphs will reach is only known afterwards, so it is foretold by the last such backward;
where that was wrong, `Collect'` is made anew.

The request, after :data:`_protocol.BACKWARD_WORDS`: :data:`WORDS`; a byte for each slot
and each input, whether its gradient is wanted; numbers of calls that are dropped.  The
answer, between the mask of slots and what strays are: a byte a slot, whether its
gradient has a graph; a byte for each slot, flagged gradient of an output, and input,
whether that graph reaches it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import torch

from paceline import _protocol, _torch_graph

if TYPE_CHECKING:
    from paceline._graph import Call, Given

    Answers = list[tuple[bytes, list[Any], bytes]]

WORDS = struct.Struct("<QI")
"""The number of the call that is recorded, and how many inputs the last one had."""
MOST_FORETOLD = 64


# ---- the caller's side ---------------------------------------------------------------


class Recording:
    """A backward that is recorded, from `Launch` until `Collect`.

    Parameters
    ----------
    call : Call
        Whose backward it is.
    gradients : tuple of torch.Tensor or None
        Of its outputs.
    collect : torch.autograd.graph.Node
        The node of its `Collect`.
    """

    __slots__ = (
        "_call",
        "_dropped",
        "_foretold",
        "_grown_inputs",
        "_grown_slots",
        "_handle",
        "_of",
        "_parameters",
        "_roots",
        "_used",
        "_wanted_inputs",
        "_wanted_slots",
    )

    def __init__(self, call: Call, gradients: Given, collect: Any) -> None:
        engine = call.engine
        edges = [edge for edge, _ in collect.next_functions[1:]]  # the token's is first
        n_inputs = sum(call.n_inputs)
        inputs = iter(collect.saved_tensors) if n_inputs else iter(())
        wanted = [_torch_graph.will_run(edge) for edge in edges]
        self._of = call
        self._call = engine.new_call()
        self._call.is_in_ddp = call.is_in_ddp
        self._dropped: list[int] = []
        self._parameters = {
            slot: edge.variable
            for slot, edge in zip(call.slots, edges[n_inputs:], strict=True)
        }
        self._roots: list[list[torch.Tensor]] = []
        self._wanted_inputs: list[bytes] = []
        begin = 0
        for places, n in zip(call.places, call.n_inputs, strict=True):
            given = [gradients[i] for i in places]
            growing = [g for g in given if g is not None and g.requires_grad]
            self._roots.append(growing + [next(inputs) for _ in range(n)])
            self._wanted_inputs.append(bytes(wanted[begin : begin + n]))
            begin += n
        # A slot that Collect was not given should have no gradient; else it is told.
        wanted_slots = bytearray(b"\1" * engine.n_slots)
        for slot, is_wanted in zip(call.slots, wanted[n_inputs:], strict=True):
            wanted_slots[slot] = is_wanted
        self._wanted_slots = bytes(wanted_slots)
        self._foretold: tuple[bytes, ...] | None = None
        self._handle: torch.Tensor | None = None
        self._used: tuple[bytes, ...] = ()
        self._grown_inputs: list[bytes] = []
        self._grown_slots: list[bytes] = []

    # ---- what is asked, and answered -------------------------------------------------

    def words(self, k: int, number: int, bits: int) -> bytes:
        """Return the words of the request to one replica."""
        self._call.is_held = True  # from now on: the answer may never be taken
        wanted = self._wanted_inputs[k]
        if k == 0:
            self._dropped = list(self._call.engine.dropped)
        return (
            _protocol.BACKWARD_WORDS.pack(number, bits | _protocol.RECORD)
            + WORDS.pack(self._call.number, len(wanted))
            + self._wanted_slots
            + wanted
            + struct.pack(f"<{len(self._dropped)}Q", *self._dropped)
        )

    def read(self, answers: Answers) -> Answers:
        """Note what the replicas say of their graphs; return what is left."""
        n_slots = len(self._wanted_slots)
        left: Answers = []
        used = []
        for (words, parts, flags), roots, wanted in zip(
            answers, self._roots, self._wanted_inputs, strict=True
        ):
            begin, end = 2 * n_slots, 3 * n_slots + len(roots)
            self._grown_slots.append(words[n_slots:begin])
            self._grown_inputs.append(flags[: len(wanted)])
            used.append(words[begin:end])
            left.append((words[:n_slots] + words[end:], parts, flags))
        self._used = tuple(used)
        engine = self._call.engine
        if len(answers) == engine.n_replicas - 1:  # else the next forward tells all
            del engine.dropped[: len(self._dropped)]
        return left

    # ---- the nodes -------------------------------------------------------------------

    @property
    def _kind(self) -> tuple[Any, ...]:
        """By which recordings are taken to be alike."""
        sizes = tuple(len(roots) for roots in self._roots)
        return sizes, tuple(self._of.slots), self._wanted_slots, *self._wanted_inputs

    def expect(self) -> None:
        """Make `Collect` for what the replicas' graphs reached the last time."""
        self._foretold = self._call.engine.foretold.get(self._kind)
        if self._foretold is not None and any(map(any, self._foretold)):
            self._handle = self._collect(self._foretold)

    def _collect(self, used: tuple[bytes, ...]) -> torch.Tensor:
        from paceline._graph import Collect

        call, n_slots = self._call, len(self._wanted_slots)
        parts = [
            [
                root
                for root, is_used in zip(roots, one[n_slots:], strict=True)
                if is_used
            ]
            for roots, one in zip(self._roots, used, strict=True)
        ]
        call.n_inputs = [len(part) for part in parts]
        call.slots = [slot for slot in self._of.slots if any(one[slot] for one in used)]
        handle: torch.Tensor = Collect.apply(  # type: ignore[no-untyped-call]
            call,
            call.engine.token,
            *[root for part in parts for root in part],
            *[self._parameters[slot] for slot in call.slots],
        )
        return handle

    def finish(self, values: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients that the replicas have answered, with their graph."""
        from paceline._graph import Launch

        engine, call = self._call.engine, self._call
        if self._used != self._foretold:
            if len(engine.foretold) >= MOST_FORETOLD:
                engine.foretold.clear()
            engine.foretold[self._kind] = self._used
        at = self._lay_out_outputs()
        if not at:
            call.is_held = False
            return values
        if self._handle is None or self._used != self._foretold:
            self._handle = self._collect(self._used)
        for i in at:
            value = values[i]
            assert value is not None
            call.outputs.append(value)
        outputs = Launch.apply(call, self._handle)  # type: ignore[no-untyped-call]
        for i, output in zip(at, outputs, strict=True):
            values[i] = output
        return values

    def _lay_out_outputs(self) -> list[int]:
        """Say which of `Launch`'s outputs are each replica's; return which they are.

        A parameter's is a sum over replicas, whose gradient is the gradient of each.
        """
        at: list[int] = []
        begin = 0
        for grown in self._grown_inputs:
            indices = [begin + i for i, is_grown in enumerate(grown) if is_grown]
            self._call.places.append(list(range(len(at), len(at) + len(indices))))
            at += indices
            begin += len(grown)
        for i, slot in enumerate(self._of.slots):
            owners = [k for k, grown in enumerate(self._grown_slots) if grown[slot]]
            for k in owners:
                places = self._call.places[k]
                assert isinstance(places, list)
                places.append(len(at))
            if owners:
                at.append(begin + i)
        return at


def collect_batch(call: Call, gradients: Given, collect: Any) -> list[Any]:
    """Run one backward for each of the many that gradients of vmap stand for."""
    is_held, call.is_held = call.is_held, True
    try:
        values = _go_through(call, gradients, collect)
    finally:
        call.is_held = is_held
        if not is_held:
            call.engine.dropped.append(call.number)
    return values


def _go_through(call: Call, gradients: Given, collect: Any) -> list[Any]:
    if not any(g is not None and _torch_graph.is_batched(g) for g in gradients):
        call.post(gradients, collect, may_tail=False)
        return call.take()
    batch = _torch_graph.Batch(gradients)
    rows = [_go_through(call, row, collect) for row in batch.rows()]
    return [batch.join(column) for column in zip(*rows, strict=True)]


# ---- a replica's side ----------------------------------------------------------------


class Asked:
    """A request for a backward that is recorded, as `Recording.words` has put it."""

    __slots__ = (
        "dropped",
        "n_inputs",
        "number",
        "wanted_inputs",
        "wanted_slots",
    )

    def __init__(self, words: bytes, n_slots: int) -> None:
        at = _protocol.BACKWARD_WORDS.size
        self.number, self.n_inputs = WORDS.unpack_from(words, at)
        at += WORDS.size
        self.wanted_slots = words[at : at + n_slots]
        at += n_slots
        self.wanted_inputs = words[at : at + self.n_inputs]
        left = words[at + self.n_inputs :]
        self.dropped = struct.unpack(f"<{len(left) // 8}Q", left)


class Recorded:
    """A backward that has run with a graph: the gradients, and what they depend on.

    Those of parameters are left in ``.grad``.

    Attributes
    ----------
    outputs, inputs : list of torch.Tensor
        Of the graph: the gradients that have one, and the leaves it reaches which are
        no parameters.
    of_inputs : list of torch.Tensor or None
        Gradients of the last graph's inputs.
    words : bytes
        For the answer.
    """

    __slots__ = ("inputs", "of_inputs", "outputs", "words")

    def __init__(
        self,
        asked: Asked,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        growing: list[torch.Tensor],
        inputs: list[torch.Tensor],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        of_inputs, of_slots = _run(asked, pairs, inputs, parameters)
        grown = bytes(g is not None and g.requires_grad for g in of_slots)
        self.outputs = [
            g for g in of_inputs + of_slots if g is not None and g.requires_grad
        ]
        for parameter, gradient in zip(parameters, of_slots, strict=True):
            if gradient is not None:
                parameter.grad = gradient.detach().resolve_conj().resolve_neg()
        roots = growing + inputs
        used = _torch_graph.mask_of_used(self.outputs, [*parameters, *roots])
        self.inputs = [
            root
            for root, is_used in zip(roots, used[len(parameters) :], strict=True)
            if is_used
        ]
        absent = asked.n_inputs - len(inputs)  # all or none: no part in that graph
        self.of_inputs = of_inputs + [None] * absent
        self.words = grown + used + bytes(absent)


Gradients = list[torch.Tensor | None]


def _run(
    asked: Asked,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    inputs: list[torch.Tensor],
    parameters: list[torch.nn.Parameter],
) -> tuple[Gradients, Gradients]:
    """Return the gradients that are wanted, of inputs and of parameters."""
    leaves = [*inputs, *parameters]
    wanted = asked.wanted_inputs[: len(inputs)] + asked.wanted_slots
    at = [i for i, leaf in enumerate(leaves) if wanted[i] and leaf.requires_grad]
    found: Gradients = [None] * len(leaves)
    if pairs and at:
        outputs, gradients = zip(*pairs, strict=True)
        some = torch.autograd.grad(
            outputs,
            [leaves[i] for i in at],
            gradients,
            create_graph=True,
            allow_unused=True,
        )
        for i, gradient in zip(at, some, strict=True):
            found[i] = gradient
    return found[: len(inputs)], found[len(inputs) :]
