"""The two nodes that stand for other processes' replicas in the caller's graph.

::

    inputs, parameters -> Collect -> handle -> Launch -> the others' outputs
            |                                                    |
            +--> replica 0 --------------------------------------+--> gather -> loss

Replica 0 is the caller's own module, in the ordinary graph.  Autograd runs, of the
nodes that are ready, the one made last: in backward `Launch` comes first and posts the
gradients of the outputs, then the graph of replica 0 runs while the others work, and
`Collect`, made before all that, comes last.  That order is for speed alone.

How a parameter's gradients meet: where nothing can see the difference, the others' are
added to ``.grad`` when backward ends (a *tail*), which is cheap.  Where something can
(hooks on parameters, ``autograd.grad``, ``backward(inputs=...)``), `Collect` waits for
them and returns them to autograd, which adds them to replica 0's.

A backward that is recorded itself (``create_graph=True``) makes another pair of these
nodes, round the gradients: see ``_higher.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline import _strays, _torch, _torch_graph

if TYPE_CHECKING:
    from paceline._higher import Recording
    from paceline._process import ProcessEngine

SECOND_BACKWARD = (
    "Trying to backward through the graph a second time (or directly access saved "
    "tensors after they have already been freed). Saved intermediate values of the "
    "graph are freed when you call .backward() or autograd.grad(). Specify "
    "retain_graph=True if you need to backward through the graph a second time or if "
    "you need to access saved tensors after calling backward."
)

Given = tuple[torch.Tensor | None, ...]


class Call:
    """One forward through the replicas, and what its backward has to know.

    Attributes
    ----------
    number : int
        By which the replicas know it.
    n_inputs : list of int
        How many of each replica's inputs require a gradient.
    places : list of sequences of int
        Which of the outputs of `Launch` are each replica's.
    slots : list of int
        Of the parameters that `Collect` was given.
    outputs : list of torch.Tensor
        For `Launch` to return.
    spent : set of int
        Outputs whose backward has run and kept no graph: each may have its own.
    is_held : bool
        Whether the replicas keep a graph of it.
    is_in_ddp : bool
        Whether torch's DistributedDataParallel ran the forward: its hooks are hidden.
    is_tailed : bool
        Whether the gradients of parameters are added when its backward ends.
    gradients : Gradients or None
        What they have answered, until `Collect` takes it.
    error : Exception or None
        Of a replica, until `Collect` raises it; nobody's where another has come first.
    recording : Recording or None
        Of the backward that they run, where it is recorded itself.
    batch : tuple or None
        Gradients of outputs that are vmap's, many in one: for `Collect` to go through.
    """

    __slots__ = (
        "batch",
        "engine",
        "error",
        "gradients",
        "is_held",
        "is_in_ddp",
        "is_tailed",
        "n_inputs",
        "number",
        "outputs",
        "places",
        "recording",
        "slots",
        "spent",
    )

    def __init__(self, engine: ProcessEngine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.n_inputs: list[int] = []
        self.places: list[Sequence[int]] = []
        self.slots: list[int] = []
        self.outputs: list[torch.Tensor] = []
        self.spent: set[int] = set()
        self.is_held = False
        self.is_tailed = False
        self.is_in_ddp = _torch.is_in_torch_ddp()
        self.gradients: Gradients | None = None
        self.error: Exception | None = None
        self.recording: Recording | None = None
        self.batch: Given | None = None

    def launch(self, gradients: Given, node: Any) -> None:
        """Have the replicas begin the backward of this call; `node` is `Launch`'s."""
        wanted = {i for i, gradient in enumerate(gradients) if gradient is not None}
        if not self.is_held or not self.spent.isdisjoint(wanted):
            raise RuntimeError(SECOND_BACKWARD)
        if not _torch.keeps_graph():
            self.spent |= wanted
            self.is_held = len(self.spent) < len(gradients)
        if any(g is not None and _torch_graph.is_batched(g) for g in gradients):
            self.batch = gradients
        elif torch.is_grad_enabled():
            self.post(gradients, node.next_functions[0][0])
        else:
            self.post(gradients, None)

    def post(self, gradients: Given, collect: Any, *, may_tail: bool = True) -> None:
        """Post one gradient of each output; `Collect`'s node serves to record it."""
        recording: Recording | None = None
        if torch.is_grad_enabled():
            from paceline._higher import Recording

            recording = Recording(self, gradients, collect)
        self.engine.launch(self, gradients, recording, may_tail)
        if recording is not None:
            recording.expect()

    def collect(self, collect: Any) -> list[torch.Tensor | None]:
        """Return the gradients of what `Collect` was given."""
        if self.batch is not None:
            from paceline._higher import collect_batch

            batch, self.batch = self.batch, None
            return collect_batch(self, batch, collect)
        if self.is_tailed and not any(self.n_inputs):
            return [None] * len(self.slots)  # they come when this backward ends
        return self.take()

    def take(self) -> list[torch.Tensor | None]:
        """Wait for the replicas, and return the gradients."""
        self.engine.settle()
        error, self.error = self.error, None
        if error is not None:
            raise error
        gradients, self.gradients = self.gradients, None
        recording, self.recording = self.recording, None
        if gradients is None:
            raise RuntimeError(
                "the replicas' part of this backward is missing: an error has ended it"
            )
        of_slots: list[torch.Tensor | None] = [None] * len(self.slots)
        if not self.is_tailed:
            of_slots = [gradients.of_slots[slot] for slot in self.slots]
            given = set(self.slots)
            if any(
                gradient is not None and slot not in given
                for slot, gradient in enumerate(gradients.of_slots)
            ):
                raise RuntimeError(
                    "a replica has a gradient of a parameter with hooks that its "
                    'forward did not show: wrap by engine="thread"'
                )
            for slot, stray in gradients.strays:
                at = self.slots.index(slot)
                before = of_slots[at]
                of_slots[at] = stray if before is None else before + stray
        values = gradients.of_inputs + of_slots
        return values if recording is None else recording.finish(values)

    def __del__(self) -> None:
        if getattr(self, "is_held", False):  # Ctrl-C may come before it is made
            self.engine.dropped.append(self.number)


class Gradients:
    """What the replicas have answered to a backward."""

    __slots__ = ("of_inputs", "of_slots", "strays")

    def __init__(self) -> None:
        self.of_inputs: list[torch.Tensor | None] = []
        self.of_slots: list[torch.Tensor | None] = []
        self.strays: _strays.Strays = []


class Collect(torch.autograd.Function):
    """Comes first in forward, last in backward."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, token: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        n_inputs = sum(call.n_inputs)
        if n_inputs:  # a backward that is recorded will have to name them
            ctx.save_for_backward(*tensors[:n_inputs])
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *ignored: Any) -> Any:
        return (None, None, *ctx.call.collect(ctx))


class Launch(torch.autograd.Function):
    """Comes last in forward, first in backward."""

    @staticmethod
    def forward(ctx: Any, call: Call, handle: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs, call.outputs = call.outputs, []
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.launch(gradients, ctx)
        return None, torch.zeros(())


class Tail:
    """Waits in the engine for the end of a backward; dropped uncalled, it failed."""

    __slots__ = ("_engine",)

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine: ProcessEngine | None = engine

    def __call__(self) -> None:
        if self._engine is not None:
            self._engine.add_tail()  # Ctrl-C in it: as if it had not been called
            self._engine = None

    def __del__(self) -> None:
        engine = getattr(self, "_engine", None)  # Ctrl-C may come before it is made
        if engine is not None:
            engine.forget_tail()
