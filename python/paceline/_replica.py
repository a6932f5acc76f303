"""A replica: what a worker process does with the requests of :mod:`._protocol`."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import Any

import torch

from paceline import _draws, _native, _protocol, _strays, _torch, _travel
from paceline._threads import inside

Answer = tuple[int, bytes, list[Any]]

LEAST_TAPPED_BYTES = 1 << 16
"""Gradients of this size leave backward one by one, while they are in the cache, and
their memory serves the next; smaller ones leave together at its end, without hooks."""


class Replica:
    """One module over the caller's parameters, and the graphs of its forwards."""

    def __init__(self) -> None:
        self._module: Any = None
        self._graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._tree: _native.Tree | None = None
        self._told: _native.Tree | None = None  # the output's, as the caller knows it
        self._modes: _protocol.Modes | None = None
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
            return self._backward(words, tensors)
        if kind == _protocol.MODEL:
            self._build(pickle.loads(words))
            return kind, b"", []
        raise ValueError(f"kind is {kind}: this version of paceline does not know it")

    # ---- the model -------------------------------------------------------------------

    def _build(self, model: _protocol.Model) -> None:
        self._graphs.clear()
        self._told = None
        self._generators = _draws.OtherGenerators()
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
        module, owners = _travel.loads(model.skeleton, tensors)
        self._module = module
        self._modules = list(module.modules())
        tensors.update((("module", i), part) for i, part in enumerate(self._modules))
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
        for call in news.get("dropped", ()):
            self._graphs.pop(call, None)
        if "modes" in news:
            self._modes = news["modes"]
            self._modes.adopt()
        if "trainable" in news:
            for parameter, wants in zip(self._grown, news["trainable"], strict=True):
                parameter.requires_grad_(bool(wants))
        if "attributes" in news:
            changes = _travel.loads(news["attributes"], self._known)
            for index, name, value in changes:
                vars(self._modules[index])[name] = value

    # ---- forward ---------------------------------------------------------------------

    def _call(self, bits: int, args: Any, kwargs: Any) -> Any:
        """Run the module as the caller's thread would."""
        assert self._modes is not None
        is_autocast, dtype, caches = self._modes.autocast
        torch.set_grad_enabled(bool(bits & _protocol.GRAD))
        if not is_autocast and not bits & _protocol.INFERENCE:
            return self._module(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if bits & _protocol.INFERENCE:
                stack.enter_context(torch.inference_mode())
            if is_autocast:
                stack.enter_context(
                    torch.autocast("cpu", dtype=dtype, cache_enabled=caches)
                )
            return self._module(*args, **kwargs)

    def _forward(self, words: bytes, tensors: list[Any], flags: bytes) -> Answer:
        call, seed, salt, bits = _protocol.FORWARD_WORDS.unpack_from(words)
        if bits & _protocol.NEWS:
            told = pickle.loads(words[_protocol.FORWARD_WORDS.size :])
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
            used = _mask_of_used(outputs, self._grown)
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

    def _backward(self, words: bytes, gradients: list[Any]) -> Answer:
        call, bits = _protocol.BACKWARD_WORDS.unpack_from(words)
        if call not in self._graphs:
            raise RuntimeError(
                "the module has changed since this forward, or its workers were "
                "started anew: run the forward again before backward"
            )
        outputs, inputs = self._graphs[call]
        keep_graph = bool(bits & _protocol.KEEP_GRAPH)
        if not bits & _protocol.ACCUMULATE:
            self._slots.open()
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        try:
            _torch.run_backward(
                [output for output, _ in pairs],
                [gradient for _, gradient in pairs],
                keep_graph,
            )
        except BaseException:
            self._slots.sweep()  # what has come so far belongs to no step
            self._slots.strays()
            for leaf in inputs:
                leaf.grad = None
            raise
        finally:
            if not keep_graph:
                del self._graphs[call]
        of_inputs = [leaf.grad for leaf in inputs]
        for leaf in inputs:
            leaf.grad = None
        mask, has_strays = self._slots.sweep()
        told, parts = _strays.pack(self._slots.strays() if has_strays else [])
        return _protocol.BACKWARD, mask + told, of_inputs + parts


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
_PYTHON_NODE: Any = torch.autograd.function.BackwardCFunction


def _mask_of_used(
    outputs: list[torch.Tensor], parameters: list[torch.nn.Parameter]
) -> bytes:
    """Return a byte a parameter: whether the graph of `outputs` reaches it."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes = [output.grad_fn for output in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, _PYTHON_NODE):
            # It may run a graph of its own, which is not to be seen from here.
            return bytes([1]) * len(parameters)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        nodes += [following for following, _ in node.next_functions]
    return bytes(id(p) in found for p in parameters)
