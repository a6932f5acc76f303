"""A replica: what a worker process does with the requests of ``messages.py``."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import struct
import sys
from typing import Any

import torch

from paceline import _native
from paceline._compat import odd_tensors, torch_core, torch_graph, torch_ops
from paceline._dp.process import imports, messages, pickling, snapshot, snapshot_load
from paceline._replicas import rng
from paceline._replicas.errors import UnsupportedModelError
from paceline._replicas.nesting import InsideReplica

Answer = tuple[int, bytes, list[Any]]
_Gradients = list[torch.Tensor | None]

LEAST_HOOKED_BYTES = 1 << 16
"""Gradients of this size leave backward one by one, while they are in the cache, and
their memory serves the next; smaller ones leave together at its end, without hooks."""


class Replica:
    """One module over the caller's parameters, and the graphs of its forwards."""

    def __init__(self) -> None:
        self._module: Any = None
        self._known: dict[Any, Any] = {}
        self._graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._sharing: set[int] = set()  # graphs that share nodes with others
        self._tree: _native.Tree | None = None
        self._tree_sent: _native.Tree | None = None  # the output's
        self._modes: messages.Modes | None = None
        self._n_received = 0  # the number of the last update
        self._generators = rng.OtherGenerators()
        self._is_inside = contextlib.ExitStack()  # wrappers in the module call plainly
        self._is_inside.enter_context(InsideReplica())

    def handle(
        self, kind: int, payload: bytes, tensors: list[Any], flags: bytes
    ) -> Answer:
        """Do what is asked for; return the answer's kind, payload and tensors."""
        if kind == messages.FORWARD:
            return self._forward(payload, tensors, flags)
        if kind == messages.BACKWARD:
            return self._backward(payload, tensors, flags)
        if kind == messages.MODEL:
            return kind, pickle.dumps(self._build(pickle.loads(payload))), []
        raise ValueError(f"kind is {kind}: this version of paceline does not know it")

    # ---- the model -------------------------------------------------------------------

    def _build(self, model: messages.Model) -> dict[imports.Entry, Any]:
        self._tree_sent = None
        self._n_received = 0
        self._generators = rng.OtherGenerators()
        if sys.path != model.path:
            sys.path[:] = model.path
            importlib.invalidate_caches()
        for file in model.libraries:
            with contextlib.suppress(OSError):  # whoever needs it will say so
                torch_ops.load_library(file)
        if not model.keeps_memory:
            self._map_memory(model)
        # Replicas write their buffers: the caller's values are restored by copying.
        for i, place in enumerate(self._buffer_places):
            self._known["buffer", i] = place.clone()
        parts = snapshot_load.load_skeleton(model.skeleton, self._known)
        self._module = parts[0]
        owners = list(snapshot.owners_of_buffers(self._module))
        self._buffers = _native.SharedTensors(owners, self._buffer_places)
        for parameter, (_, _, what) in zip(
            self._parameters, model.parameters, strict=True
        ):
            parameter.requires_grad_(what.requires_grad)
            vars(parameter).clear()
            vars(parameter).update(what.attributes)
        self._placed.record_versions()
        return imports.digests_of(model.imported)

    def _map_memory(self, model: messages.Model) -> None:
        """Make parameters and slots anew; graphs of earlier forwards end here."""
        self._graphs.clear()
        self._sharing.clear()
        # What a module writes into a parameter in place must not reach the caller's.
        self._memory = [_map(*each, copy_on_write=True) for each in model.memory]
        replica_memory = _map(*model.memory[model.replica_memory])
        self._parameters = [
            pickling.rebuild(what, place.view_in(self._memory[at]))
            for at, place, what in model.parameters
        ]
        self._placed = _native.SharedTensors(
            list[torch.Tensor](self._parameters), [*self._parameters]
        )
        self._known = {("parameter", i): p for i, p in enumerate(self._parameters)}
        self._buffer_places = [place.view_in(replica_memory) for place in model.buffers]
        self._with_slot = [self._parameters[i] for i, _ in model.gradients]
        slots = [place.view_in(replica_memory) for _, place in model.gradients]
        self._slots = _native.ReplicaGrads([*self._with_slot], [slots])
        hooks = self._slots.hooks(LEAST_HOOKED_BYTES)
        for parameter, hook in zip(self._with_slot, hooks, strict=True):
            if hook is not None:
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _apply(self, update: dict[str, Any]) -> None:
        """Take over what has changed since the last forward."""
        if update["number"] <= self._n_received:
            return  # sent again after an error
        for graph in update.get("dropped", ()):
            self._drop(graph)
        if "modes" in update:
            self._modes = update["modes"]
            self._modes.adopt()
        if "trainable" in update:
            for parameter, wants in zip(
                self._with_slot, update["trainable"], strict=True
            ):
                parameter.requires_grad_(bool(wants))
        if "attributes" in update:
            snapshot_load.load_attributes(update["attributes"], self._known)
        self._n_received = update["number"]

    # ---- what a forward writes -------------------------------------------------------

    def _hashes(self) -> list[tuple[int, int]]:
        """Return what shows whether parameters are written, or become other tensors."""
        return [
            (id(p), _native.tensor_hash(p.detach())) for p in self._module.parameters()
        ]

    def _written(self, before: list[tuple[int, int]] | None) -> list[int]:
        """Return the parameters that the forward has written."""
        written = set(self._placed.written())
        if before is not None and (after := self._hashes()) != before:
            numbers = {id(p): i for i, p in enumerate(self._parameters)}
            written |= {numbers.get(at, 0) for at, _ in set(before) ^ set(after)}
        if written:
            self._placed.record_versions()
            for memory in self._memory:
                memory.reload()
        return sorted(written)

    # ---- forward ---------------------------------------------------------------------

    def _call(self, bits: int, args: Any, kwargs: Any) -> Any:
        """Run the module as the caller's thread would."""
        assert self._modes is not None
        is_autocast, dtype, caches = self._modes.autocast
        torch.set_grad_enabled(bool(bits & messages.GRAD))
        device = self._modes.device
        if not is_autocast and not device and not bits & messages.INFERENCE:
            return self._module(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if bits & messages.INFERENCE:
                stack.enter_context(torch.inference_mode())
            if device:
                stack.enter_context(torch.device(device))
            if is_autocast:
                stack.enter_context(
                    torch.autocast("cpu", dtype=dtype, cache_enabled=caches)
                )
            return self._module(*args, **kwargs)

    def _call_alone(self, bits: int, args: Any, kwargs: Any) -> Any:
        """Run the module, and raise where parameters get gradients by that."""
        self._slots.shut(True)  # what comes in a forward is no backward's of the caller
        try:
            output = self._call(bits, args, kwargs)
        finally:
            has_gradients = bool(self._slots.fallbacks())
            self._slots.shut(False)
        if has_gradients:
            raise RuntimeError(
                "the forward runs a backward itself, and the gradients of parameters "
                "would be lost in this process"
            )
        self._check_unhooked()
        return output

    def _check_unhooked(self) -> None:
        """Raise where the forward has put hooks on parameters: they see some rows."""
        hooked = [p for p in self._with_slot if p._backward_hooks]
        for parameter in hooked:
            parameter._backward_hooks = None
        if hooked:
            raise RuntimeError(
                "the forward puts a hook on a parameter: put it there before the "
                "forward, where it sees the gradient of the whole batch"
            )

    def _forward(self, payload: bytes, tensors: list[Any], flags: bytes) -> Answer:
        graph, seed, salt, bits = messages.FORWARD_HEADER.unpack_from(payload)
        if bits & messages.UPDATE:
            pickled = payload[messages.FORWARD_HEADER.size :]
            changes = pickling.loads(pickled, self._known)
            self._tree = changes.get("tree", self._tree)
            for update in changes.get("updates", ()):
                self._apply(update)
        self._buffers.restore(bool(self._graphs))
        torch.default_generator.manual_seed(seed ^ _stirred_by(tensors))
        training = self._module.training
        self._generators.seed(training, salt)
        inputs = _make_leaves(tensors, flags)
        assert self._tree is not None
        args, kwargs = self._tree.unflatten(tensors)
        before = self._hashes() if bits & messages.TRIAL else None
        output = self._call_alone(bits, args, kwargs)
        self._generators.record(training)
        if written := self._written(before):
            return messages.WRITTEN, pickle.dumps(written), []
        tree, leaves = _native.flatten(output)
        outputs = [
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if outputs and bits & messages.TRACKED:
            self._graphs[graph] = outputs, inputs
        described = b""
        is_known = self._tree_sent is not None and tree == self._tree_sent
        if bits & messages.WANTS_TREE or not is_known:
            described = self._describe(tree)
            self._tree_sent = tree
        used = b""
        if bits & messages.WANTS_USED:
            used = torch_graph.mask_of_used(outputs, self._with_slot)
        return messages.FORWARD, used + described, leaves

    @staticmethod
    def _describe(tree: _native.Tree) -> bytes:
        try:
            return pickling.dumps(tree, {}, has_classes=True)
        except UnsupportedModelError as error:
            raise TypeError(
                "the output holds what cannot be sent to the caller's process: "
                f"{error}; return tensors, numbers and containers, or wrap by "
                'engine="thread"'
            ) from error

    # ---- backward --------------------------------------------------------------------

    def _drop(self, graph: int) -> None:
        self._graphs.pop(graph, None)
        self._sharing.discard(graph)

    def _ends_of(self, graph: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and the inputs of a graph."""
        if graph not in self._graphs:
            raise RuntimeError(
                "the module has changed since this forward, or its workers were "
                "started anew: run the forward again before backward"
            )
        return self._graphs[graph]

    def _backward(self, header: bytes, gradients: list[Any], flags: bytes) -> Answer:
        graph, bits = messages.BACKWARD_HEADER.unpack_from(header)
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        if gradients:  # else no output of this replica requires one
            outputs, inputs = self._ends_of(graph)
        keep_graph = bool(bits & messages.KEEP_GRAPH)
        if not bits & messages.ACCUMULATE:
            self._slots.open()
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        masks = b""
        try:
            if bits & messages.DOUBLE:
                self._sharing.add(graph)
                differentiable = _flagged(gradients, flags)
                masks, of_inputs = self._run_double(
                    header, pairs, differentiable, inputs
                )
            else:
                torch_core.run_backward(
                    [output for output, _ in pairs],
                    [gradient for _, gradient in pairs],
                    keep_graph or graph in self._sharing,
                )
                of_inputs = [leaf.grad for leaf in inputs]
        except BaseException:
            self._slots.sweep()  # what has come so far belongs to no step
            self._slots.fallbacks()
            raise
        finally:
            for leaf in inputs:
                leaf.grad = None
            if not keep_graph:
                self._drop(graph)
        used, has_fallbacks = self._slots.sweep()
        fallbacks = self._slots.fallbacks() if has_fallbacks else []
        described, parts = odd_tensors.pack(fallbacks)
        return messages.BACKWARD, used + masks + described, of_inputs + parts

    def _run_double(
        self,
        header: bytes,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        gradients: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> tuple[bytes, list[Any]]:
        """Run a backward whose own graph is kept, as one more."""
        request = _DoubleRequest(header, len(self._with_slot))
        for graph in request.dropped:
            self._drop(graph)
        double = _DoubleBackward(request, pairs, gradients, inputs, self._with_slot)
        if double.outputs:
            self._graphs[request.number] = double.outputs, double.inputs
            self._sharing.add(request.number)
        return double.masks, double.of_inputs


class _DoubleRequest:
    """A request for a double backward, as `DoubleBackward.header` has put it."""

    def __init__(self, header: bytes, n_slots: int) -> None:
        at = messages.BACKWARD_HEADER.size
        self.number, self.n_inputs = messages.DOUBLE_HEADER.unpack_from(header, at)
        at += messages.DOUBLE_HEADER.size
        self.wanted_slots = header[at : at + n_slots]
        at += n_slots
        self.wanted_inputs = header[at : at + self.n_inputs]
        left = header[at + self.n_inputs :]
        self.dropped = struct.unpack(f"<{len(left) // 8}Q", left)


class _DoubleBackward:
    """A backward run with a graph: the gradients, and what they depend on.

    Those of parameters are left in ``.grad``, those of the last graph's inputs in
    `of_inputs`; `masks` is for the answer.  `outputs` are the gradients that have a
    graph, `inputs` the leaves it reaches which are no parameters.
    """

    def __init__(
        self,
        request: _DoubleRequest,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        gradients: list[torch.Tensor],
        inputs: list[torch.Tensor],
        parameters: list[torch.nn.Parameter],
    ) -> None:
        of_inputs, of_slots = _run_with_graph(request, pairs, inputs, parameters)
        has_graph = bytes(g is not None and g.requires_grad for g in of_slots)
        self.outputs = [
            g for g in of_inputs + of_slots if g is not None and g.requires_grad
        ]
        for parameter, gradient in zip(parameters, of_slots, strict=True):
            if gradient is not None:
                parameter.grad = gradient.detach().resolve_conj().resolve_neg()
        roots = gradients + inputs
        used = torch_graph.mask_of_used(self.outputs, [*parameters, *roots])
        self.inputs = [
            root
            for root, is_used in zip(roots, used[len(parameters) :], strict=True)
            if is_used
        ]
        absent = request.n_inputs - len(inputs)  # all or none: no part in that graph
        self.of_inputs = of_inputs + [None] * absent
        self.masks = has_graph + used + bytes(absent)


def _run_with_graph(
    request: _DoubleRequest,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    inputs: list[torch.Tensor],
    parameters: list[torch.nn.Parameter],
) -> tuple[_Gradients, _Gradients]:
    """Return the gradients that are wanted, of inputs and of parameters."""
    leaves = [*inputs, *parameters]
    wanted = request.wanted_inputs[: len(inputs)] + request.wanted_slots
    at = [i for i, leaf in enumerate(leaves) if wanted[i] and leaf.requires_grad]
    found: _Gradients = [None] * len(leaves)
    if pairs and at:
        outputs, gradients = zip(*pairs, strict=True)
        wanted_gradients = torch.autograd.grad(
            outputs,
            [leaves[i] for i in at],
            gradients,
            create_graph=True,
            allow_unused=True,
        )
        for i, gradient in zip(at, wanted_gradients, strict=True):
            found[i] = gradient
    return found[: len(inputs)], found[len(inputs) :]


def _map(fd: int, n_bytes: int, copy_on_write: bool = False) -> _native.SharedMemory:
    """Map shared memory of the caller's process."""
    with open(f"/proc/{os.getppid()}/fd/{fd}", "r+b", 0) as memory:
        return _native.SharedMemory(n_bytes, memory.fileno(), copy_on_write)


def _make_leaves(tensors: list[Any], flags: bytes) -> list[torch.Tensor]:
    """Have the flagged tensors require a gradient; return where it will be found.

    A module may write to its input in place, which a leaf would not allow.
    """
    leaves = []
    for i, wants in enumerate(flags):
        if wants:
            leaf = tensors[i].requires_grad_(True)
            leaves.append(leaf)
            with torch.enable_grad():
                tensors[i] = leaf.clone()
    return leaves


def _flagged(tensors: list[Any], flags: bytes) -> list[torch.Tensor]:
    """Have the flagged tensors require a gradient, and return them."""
    return [
        tensor.requires_grad_(True)
        for tensor, wants in zip(tensors, flags, strict=True)
        if wants
    ]


def _stirred_by(tensors: list[Any]) -> int:
    """Return a number that follows from the inputs.

    Where replica 0 draws nothing, its generator stands still, and with it the seeds:
    other inputs make other numbers all the same, and a repeated forward the same ones.
    """
    for tensor in tensors:
        if type(tensor) is torch.Tensor and tensor.dtype in _STIRRING:
            return _native.tensor_hash(tensor, _STIRRING_BYTES) >> 1
    return 0


_STIRRING_BYTES = 8192
_STIRRING = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64}
)
