"""A replica: what a worker process does with the requests of :mod:`._protocol`."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import sys
from typing import Any

import torch

from paceline import (
    _draws,
    _higher,
    _imports,
    _native,
    _protocol,
    _strays,
    _things,
    _torch,
    _torch_graph,
    _torch_ops,
    _travel,
)
from paceline._threads import inside

Answer = tuple[int, bytes, list[Any]]

LEAST_TAPPED_BYTES = 1 << 16
"""Gradients of this size leave backward one by one, while they are in the cache, and
their memory serves the next; smaller ones leave together at its end, without hooks."""


class Replica:
    """One module over the caller's parameters, and the graphs of its forwards."""

    def __init__(self) -> None:
        self._module: Any = None
        self._known: dict[Any, Any] = {}
        self._graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._recorded: set[int] = set()  # graphs that share nodes with others
        self._tree: _native.Tree | None = None
        self._told: _native.Tree | None = None  # the output's, as the caller knows it
        self._modes: _protocol.Modes | None = None
        self._heard = 0  # the number of the last news
        self._generators = _draws.OtherGenerators()
        self._is_inside = contextlib.ExitStack()  # wrappers in the module call plainly
        self._is_inside.enter_context(inside())

    def handle(
        self, kind: int, words: bytes, tensors: list[Any], flags: bytes
    ) -> Answer:
        """Do what the caller asks for; return the answer's kind, words and tensors."""
        if kind == _protocol.FORWARD:
            return self._forward(words, tensors, flags)
        if kind == _protocol.BACKWARD:
            return self._backward(words, tensors, flags)
        if kind == _protocol.MODEL:
            self._build(pickle.loads(words))
            return kind, b"", []
        if kind == _protocol.CODE:
            return kind, pickle.dumps(_imports.differing(pickle.loads(words))), []
        raise ValueError(f"kind is {kind}: this version of paceline does not know it")

    # ---- the model -------------------------------------------------------------------

    def _build(self, model: _protocol.Model) -> None:
        self._graphs.clear()
        self._recorded.clear()
        self._told = None
        self._heard = 0
        self._generators = _draws.OtherGenerators()
        if sys.path != model.path:
            sys.path[:] = model.path
            importlib.invalidate_caches()
        for file in model.libraries:
            with contextlib.suppress(OSError):  # whoever needs it will say so
                _torch_ops.load_library(file)
        arenas = [_map(fd, n_bytes) for fd, n_bytes in model.arenas]
        own = arenas[model.own_arena]
        parameters = [
            _travel.rebuild(what, place.view_in(arenas[at]))
            for at, place, what in model.parameters
        ]
        # Replicas write their buffers: the caller's values are restored by copying.
        places = [place.view_in(own) for place in model.buffers]
        buffers = [place.clone() for place in places]
        tensors: dict[Any, Any] = {}
        tensors.update((("parameter", i), p) for i, p in enumerate(parameters))
        tensors.update((("buffer", i), b) for i, b in enumerate(buffers))
        module, owners, held = _travel.loads(model.skeleton, tensors)
        self._module = module
        self._modules = list(module.modules())
        tensors.update((("module", i), part) for i, part in enumerate(self._modules))
        tensors.update((("held", i), thing) for i, thing in enumerate(held))
        self._known = tensors
        self._buffers = _native.Placed(owners, places)
        self._grown = [parameters[i] for i, _ in model.gradients]
        slots = [place.view_in(own) for _, place in model.gradients]
        self._slots = _native.Slots([*self._grown], [slots])
        taps = self._slots.taps(LEAST_TAPPED_BYTES)
        for parameter, tap in zip(self._grown, taps, strict=True):
            if tap is not None:
                parameter.requires_grad_(True)
                parameter.register_post_accumulate_grad_hook(tap)  # type: ignore[no-untyped-call]
        for parameter, (_, _, what) in zip(parameters, model.parameters, strict=True):
            parameter.requires_grad_(what.requires_grad)

    def _hear(self, news: dict[str, Any]) -> None:
        """Take over what has changed since the last forward."""
        if news["number"] <= self._heard:
            return  # told again after an error; its keys may be gone since
        for call in news.get("dropped", ()):
            self._drop(call)
        if "modes" in news:
            self._modes = news["modes"]
            self._modes.adopt()
        if "code" in news:
            for target, name, value in _travel.loads(news["code"], self._known):
                _imports.assign(target, name, value, self._known)
        if "trainable" in news:
            for parameter, wants in zip(self._grown, news["trainable"], strict=True):
                parameter.requires_grad_(bool(wants))
        if "attributes" in news:
            words, begin = news["attributes"]
            writes, fresh, gone = _travel.loads(words, self._known)
            for key in gone:
                self._known.pop(key, None)  # what is told twice is gone already
            self._known.update((("held", begin + i), x) for i, x in enumerate(fresh))
            for target, kind, payload in writes:
                _things.write(self._known[target], kind, payload)
        self._heard = news["number"]

    # ---- forward ---------------------------------------------------------------------

    def _call(self, bits: int, args: Any, kwargs: Any) -> Any:
        """Run the module as the caller's thread would."""
        assert self._modes is not None
        is_autocast, dtype, caches = self._modes.autocast
        torch.set_grad_enabled(bool(bits & _protocol.GRAD))
        device = self._modes.device
        if not is_autocast and not device and not bits & _protocol.INFERENCE:
            return self._module(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if bits & _protocol.INFERENCE:
                stack.enter_context(torch.inference_mode())
            if device:
                stack.enter_context(torch.device(device))
            if is_autocast:
                stack.enter_context(
                    torch.autocast("cpu", dtype=dtype, cache_enabled=caches)
                )
            return self._module(*args, **kwargs)

    def _forward(self, words: bytes, tensors: list[Any], flags: bytes) -> Answer:
        call, seed, salt, bits = _protocol.FORWARD_WORDS.unpack_from(words)
        if bits & _protocol.NEWS:
            told = _travel.loads(words[_protocol.FORWARD_WORDS.size :], self._known)
            self._tree = told.get("tree", self._tree)
            for news in told.get("news", ()):
                self._hear(news)
        self._buffers.restore(bool(self._graphs))
        torch.default_generator.manual_seed(seed ^ _stirred_by(tensors))
        training = self._module.training
        self._generators.seed(training, salt)
        inputs = _make_leaves(tensors, flags)
        assert self._tree is not None
        args, kwargs = self._tree.unflatten(tensors)
        output = self._call(bits, args, kwargs)
        self._generators.note(training)
        tree, leaves = _native.flatten(output)
        outputs = [
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if outputs and bits & _protocol.TRACKED:
            self._graphs[call] = outputs, inputs
        told = b""
        if bits & _protocol.TELL_TREE or self._told is None or tree != self._told:
            told = self._words_of(tree)
            self._told = tree
        used = b""
        if bits & _protocol.TELL_USED:
            used = _torch_graph.mask_of_used(outputs, self._grown)
        return _protocol.FORWARD, used + told, leaves

    @staticmethod
    def _words_of(tree: _native.Tree) -> bytes:
        try:
            return _travel.dumps(tree, {})
        except _travel.CannotTravelError as error:
            raise TypeError(
                "the output holds what cannot be sent to the caller's process: "
                f"{error}; return tensors, numbers and containers, or wrap by "
                'engine="thread"'
            ) from error

    # ---- backward --------------------------------------------------------------------

    def _drop(self, call: int) -> None:
        self._graphs.pop(call, None)
        self._recorded.discard(call)

    def _graph_of(self, call: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs and the inputs of a call."""
        if call not in self._graphs:
            raise RuntimeError(
                "the module has changed since this forward, or its workers were "
                "started anew: run the forward again before backward"
            )
        return self._graphs[call]

    def _backward(self, words: bytes, gradients: list[Any], flags: bytes) -> Answer:
        call, bits = _protocol.BACKWARD_WORDS.unpack_from(words)
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        if gradients:  # else no output of this replica requires one
            outputs, inputs = self._graph_of(call)
        keep_graph = bool(bits & _protocol.KEEP_GRAPH)
        if not bits & _protocol.ACCUMULATE:
            self._slots.open()
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        answer = b""
        try:
            if bits & _protocol.RECORD:
                self._recorded.add(call)
                growing = _flagged(gradients, flags)
                answer, of_inputs = self._record(words, pairs, growing, inputs)
            else:
                _torch.run_backward(
                    [output for output, _ in pairs],
                    [gradient for _, gradient in pairs],
                    keep_graph or call in self._recorded,
                )
                of_inputs = [leaf.grad for leaf in inputs]
        except BaseException:
            self._slots.sweep()  # what has come so far belongs to no step
            self._slots.strays()
            raise
        finally:
            for leaf in inputs:
                leaf.grad = None
            if not keep_graph:
                self._drop(call)
        mask, has_strays = self._slots.sweep()
        told, parts = _strays.pack(self._slots.strays() if has_strays else [])
        return _protocol.BACKWARD, mask + answer + told, of_inputs + parts

    def _record(
        self,
        words: bytes,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        growing: list[torch.Tensor],
        inputs: list[torch.Tensor],
    ) -> tuple[bytes, list[Any]]:
        """Run a backward whose own graph is kept, as one more call."""
        asked = _higher.Asked(words, len(self._grown))
        for call in asked.dropped:
            self._drop(call)
        recorded = _higher.Recorded(asked, pairs, growing, inputs, self._grown)
        if recorded.outputs:
            self._graphs[asked.number] = recorded.outputs, recorded.inputs
            self._recorded.add(asked.number)
        return recorded.words, recorded.of_inputs


def _map(fd: int, n_bytes: int) -> _native.Arena:
    """Map shared memory of the caller's process."""
    with open(f"/proc/{os.getppid()}/fd/{fd}", "r+b", 0) as memory:
        return _native.Arena(n_bytes, memory.fileno())


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
            return _native.fingerprint(tensor) >> 1
    return 0


_STIRRING = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64}
)
