"""Contexts of torch.distributed.autograd, which keep gradients in place of `.grad`.

Used where ``torch.distributed.rpc`` was initialised.
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

    torch calls no hook of the parameter then, but those of the node that would have
    added to its `.grad`: in threads of its own, several at once, where nobody can ask
    for the context.  It is that of the forward.  The reducer owns this object.
    """

    def __init__(
        self, reducer: _native.Reducer, parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        self._reducer = weakref.ref(reducer)
        self._parameters = parameters
        self._nodes: dict[int, Any] = {}  # torch keeps a node only while it is held
        self._lock = threading.Lock()
        self._last: int | None = None  # the context of the last forward
        self._task = -1  # the backward that was noticed last, and of that:
        self._context: int | None = None
        self._before: dict[torch.Tensor, tuple[int, int]] = {}
        self._arrived: set[int] = set()
        self._has_failed = False

    def watch(self) -> int | None:
        """Before a forward: see to its gradients, and return the context it is in."""
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
        """Note that the backward that runs now is that of a forward in `context`."""
        with self._lock:
            if self._is_new(context):
                self._before = _stamps(_gradients_in(context))

    def _is_new(self, context: int | None) -> bool:
        """Tell whether nothing was noted of the backward that runs now."""
        task = torch_graph.current_task()
        if task == self._task:
            return False
        self._task, self._context = task, context
        self._before, self._arrived = {}, set()
        self._has_failed = False
        return True

    def arrive(self, index: int) -> None:
        """Tell the reducer of a gradient, if it is not the parameter's own.

        What it raises comes at the end of the backward: of what a hook raises here
        torch keeps no message.
        """
        reducer = self._reducer()
        if reducer is None or torch_core.accumulates(self._nodes[index]):
            return
        with self._lock:
            self._is_new(self._last)  # where no output has entered one
            if self._has_failed:
                return
            self._arrived.add(index)
            try:
                reducer.arrive_in_context(index, self._task)
            except Exception as error:
                self._has_failed = True
                torch_core.at_end_of_backward(functools.partial(_raise, error))

    def __call__(self, task: int) -> list[ParameterInContext]:
        """Return what has the parameters' gradients; called when a backward ends."""
        gradients = _gradients_in(self._context)
        now, before = _stamps(gradients), self._before
        for parameter in (self._parameters[index] for index in self._arrived):
            if now.get(parameter) == before.get(parameter):
                raise RuntimeError(
                    "a backward of torch.distributed.autograd ran in another context "
                    "than the forward of the model, or that in none: run both in one"
                )
        return [
            ParameterInContext(each, gradients.get(each)) for each in self._parameters
        ]


def watch_contexts(
    reducer: _native.Reducer, parameters: Sequence[torch.nn.Parameter]
) -> Callable[[], None] | None:
    """Return what is to be called as a backward begins; None where there is no RPC."""
    if not torch_graph.is_rpc_used():
        return None
    contexts = reducer.contexts
    if not isinstance(contexts, Contexts):
        reducer.contexts = contexts = Contexts(reducer, parameters)
    return functools.partial(contexts.enter, contexts.watch())


def _gradients_in(context: int | None) -> _Gradients:
    return {} if context is None else torch_graph.gradients_in(context)


def _stamps(gradients: _Gradients) -> dict[torch.Tensor, tuple[int, int]]:
    """Return what differs once a gradient was added to."""
    return {each: (id(grad), grad._version) for each, grad in gradients.items()}


class _Hook:
    """The hook on one node; it does not own what owns the node."""

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

    Nobody can exchange the gradient there, only its contents.
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
        """The context's."""
        return self._grad

    @grad.setter
    def grad(self, value: torch.Tensor) -> None:
        if self._grad is None:
            raise RuntimeError(
                "another rank used a parameter that this one left out in a context of "
                f"torch.distributed.autograd (of shape {tuple(self._parameter.shape)}),"
                " where no gradient can be put in: use it on every rank, if by adding "
                "0 * parameter.sum() to the loss"
            )
        self._grad.data = value


# Called in backwards, which may be part of what torch.compile is given.
torch_core.skip_frames(_Hook.__call__, Contexts.arrive, Contexts.enter)
