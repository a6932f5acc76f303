"""Contexts of torch.distributed.autograd, which hold gradients instead of `.grad`.

Used if ``torch.distributed.rpc`` was initialised.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_core, torch_graph

_Gradients = dict[torch.Tensor, torch.Tensor]


class Contexts:
    """Tells a reducer of gradients that go to a context: ``Reducer.contexts``.

    For such gradients torch calls no hook of the parameter, but hooks of the node that
    would have added to its `.grad`.  It calls them in several of its own threads, where
    the context cannot be read, so that of the forward is used.  The reducer owns this.
    """

    def __init__(
        self, reducer: _native.Reducer, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._reducer = weakref.ref(reducer)
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}  # torch keeps a node only while it is held
        self._lock = threading.Lock()
        self._last: int | None = None  # the context of the last forward
        self._task = -1  # number of the last backward noticed; its state follows:
        self._context: int | None = None
        self._before: dict[torch.Tensor, tuple[int, int]] = {}
        self._arrived: set[int] = set()
        self._has_failed = False

    def watch(self) -> int | None:
        """Before a forward: hook the nodes; return the context of the forward."""
        if len(self._nodes) < len(self._parameters):
            self._add_hooks()
        context = torch_graph.current_context()
        if not torch_core.is_in_backward():
            self._last = context
        return context

    def _add_hooks(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if index not in self._nodes and parameter.requires_grad:
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_hook(_Hook(self, index))
                self._nodes[index] = node

    def enter(self, context: int | None) -> None:
        """Note that the current backward is that of a forward in `context`."""
        with self._lock:
            if self._is_new(context):
                self._before = _stamps(_gradients_in(context))

    def _is_new(self, context: int | None) -> bool:
        """Reset the state if the current backward is a new one; tell whether it is."""
        task = torch_graph.current_task()
        if task == self._task:
            return False
        self._task, self._context = task, context
        self._before, self._arrived = {}, set()
        self._has_failed = False
        return True

    def arrive(self, index: int) -> None:
        """Tell the reducer of a gradient, unless it goes to `.grad`.

        Errors are raised as the backward ends, since torch drops a hook's message.
        """
        reducer = self._reducer()
        if reducer is None or torch_core.accumulates(self._nodes[index]):
            return
        with self._lock:
            self._is_new(self._last)  # if no output has entered a context
            if self._has_failed:
                return
            self._arrived.add(index)
            try:
                reducer.arrive_in_context(index, self._task)
            except Exception as error:
                self._has_failed = True
                torch_core.at_end_of_backward(functools.partial(_raise, error))

    def __call__(self, task: int) -> list[ParameterInContext]:
        """Return the holders of all gradients; called when a backward ends."""
        gradients = _gradients_in(self._context)
        now, before = _stamps(gradients), self._before
        for parameter in (self._parameters[index] for index in self._arrived):
            if now.get(parameter) == before.get(parameter):
                raise RuntimeError(
                    "a backward of torch.distributed.autograd ran in another context "
                    "than the model's forward, or that ran in none: run both in one"
                )
        return [
            ParameterInContext(each, gradients.get(each)) for each in self._parameters
        ]


def watch_contexts(
    reducer: _native.Reducer, parameters: Sequence[torch.nn.Parameter]
) -> Callable[[], None] | None:
    """Return what to call as a backward begins, or None without RPC."""
    if not torch_graph.is_rpc_used():
        return None
    contexts = reducer.contexts
    if not isinstance(contexts, Contexts):
        reducer.contexts = contexts = Contexts(reducer, parameters)
    return functools.partial(contexts.enter, contexts.watch())


def _gradients_in(context: int | None) -> _Gradients:
    return {} if context is None else torch_graph.gradients_in(context)


def _stamps(gradients: _Gradients) -> dict[torch.Tensor, tuple[int, int]]:
    """Return stamps that differ once a gradient was added to."""
    return {each: (id(grad), grad._version) for each, grad in gradients.items()}


class _Hook:
    """The hook on one node; it does not own the node's owner."""

    __slots__ = ("_contexts", "_index")

    def __init__(self, contexts: Contexts, index: int) -> None:
        self._contexts = weakref.ref(contexts)
        self._index = index

    def __call__(self, _: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        contexts = self._contexts()
        if contexts is not None and gradients[0] is not None:
            contexts.arrive(self._index)


def _raise(error: Exception) -> None:
    raise error


class ParameterInContext:
    """Stands for a parameter whose gradient is in a context.

    The gradient there cannot be replaced; only its contents can change.
    """

    __slots__ = ("_grad", "_parameter")

    def __init__(
        self, parameter: torch.nn.Parameter, grad: torch.Tensor | None
    ) -> None:
        self._parameter = parameter
        self._grad = grad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient in the context."""
        return self._grad

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        if self._grad is None:
            raise RuntimeError(
                "another rank used a parameter that this rank left out (of shape "
                f"{tuple(self._parameter.shape)}), and a context of torch.distributed."
                "autograd takes no new gradient: use the parameter on every rank, for "
                "example by adding 0 * parameter.sum() to the loss"
            )
        self._grad.data = value


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(_Hook.__call__, Contexts.arrive, Contexts.enter)
