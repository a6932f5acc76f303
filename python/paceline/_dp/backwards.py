"""Backwards of CPU replicas in parallel, on a Python without a GIL.

A backward on the CPU has one thread, no matter how many replicas have run.  So the
graphs of replicas 1, 2, ... are kept apart from the one that the caller sees::

    loss --> outputs --> replica 0's graph ----------------------------> parameters
                     --> _Outputs --> _Inputs --> copies of replicas --> parameters

    thread k             replica k's graph, from its outputs to its copies

``_Outputs`` runs first: it has thread k begin a backward of replica k's graph.  The
caller's thread goes on with replica 0.  ``_Inputs`` runs last: it waits for the threads
and returns their gradients.  If they have a graph (``create_graph=True``), that graph
leads through replica k's, and is kept apart too.

A graph stays where it is if it leads to anything but copies and inputs, such as a
parameter of another model, if it has a ``torch.autograd.Function``, or if its outputs
depend on different parameters.  What else a replica's forward keeps of its graph cannot
be used in a backward with its outputs: torch raises an error.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_core, torch_graph
from paceline._dp import threads
from paceline._dp.replicate import CONSTANTS
from paceline._dp.thread_state import State, sees_operations

Gradients = Sequence[torch.Tensor | None]


class _Graph:
    """One replica's graph, from its outputs to where it ends.

    It ends at `own_ends`; in the graph that the caller sees, these are the `ends`.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        ends: Sequence[torch.Tensor],
        own_ends: Sequence[torch.Tensor],
        pool: threads.ThreadPool,
    ) -> None:
        self.n_outputs = len(outputs)
        self._outputs, self._own_ends = map(torch_graph.edges, (outputs, own_ends))
        self._ends, self._owners = ends, own_ends
        self._pool = pool
        self.is_shared = False  # with a graph of gradients: no backward may free it

    def backward(self, grads: Gradients, is_kept: bool, is_recorded: bool) -> Gradients:
        """Return the gradients of the ends."""
        pairs = zip(self._outputs, grads, strict=True)
        given = [(edge, grad) for edge, grad in pairs if grad is not None]
        if not given:
            return [None] * len(self._own_ends)
        outputs, present = zip(*given, strict=True)
        own = list(map(_leaf_of, present)) if is_recorded else present
        self.is_shared |= is_recorded
        is_kept |= self.is_shared
        found: Gradients = torch.autograd.grad(
            outputs,
            self._own_ends,
            own,
            retain_graph=is_kept,
            create_graph=is_recorded,
            allow_unused=True,
        )
        if is_recorded:
            ends, own_ends = [*self._ends, *present], [*self._owners, *own]
            return _apart(found, ends, own_ends, self._pool)
        if not is_kept:
            self._ends = self._owners = ()  # no later backward can be recorded
        return found


def _leaf_of(grad: torch.Tensor) -> torch.Tensor:
    """Return the end that stands for a gradient in the graph of others."""
    return grad.detach().requires_grad_(grad.requires_grad)


def _apart(
    found: Gradients,
    ends: Sequence[torch.Tensor],
    own_ends: Sequence[torch.Tensor],
    pool: threads.ThreadPool,
) -> Gradients:
    """Return the same gradients, with their graph apart."""
    pairs = [pair for pair in zip(ends, own_ends, strict=True) if pair[1].requires_grad]
    with_graph = [grad for grad in found if grad is not None and grad.requires_grad]
    if not with_graph:
        return found
    ends, own_ends = zip(*pairs, strict=True)
    graph = _Graph(with_graph, ends, own_ends, pool)
    graph.is_shared = True
    made = _cut([graph], with_graph, ends, pool)
    stand_in = dict(zip(map(id, with_graph), made, strict=True))
    return [stand_in.get(id(grad), grad) for grad in found]


class _Backwards:
    """The backwards through some replicas' graphs, by the number of the outer one."""

    def __init__(self, graphs: Sequence[_Graph], pool: threads.ThreadPool) -> None:
        self._graphs = graphs
        self._pool = pool
        self._running: dict[int, list[Future[Gradients]]] = {}

    def begin(self, grads: Gradients) -> None:
        """Begin that of each replica, with the gradients of all outputs."""
        given, state = iter(grads), State()
        way = torch_graph.keeps_graph(), torch.is_grad_enabled()
        runs = [
            partial(graph.backward, [next(given) for _ in range(graph.n_outputs)], *way)
            for graph in self._graphs
        ]
        futures: list[Future[Gradients]] = [Future() for _ in runs]
        self._running[torch_graph.current_task()] = futures
        present = [grad for grad in grads if grad is not None]
        is_batched = any(map(torch_graph.is_batched, present))
        if is_batched and torch.is_grad_enabled():
            raise NotImplementedError(
                "a batch of gradients (is_grads_batched, vectorize) cannot be computed "
                "with create_graph=True through CPU replicas without a GIL: compute "
                "them one by one, or use the module without DataParallel"
            )
        if is_batched or sees_operations():
            for future, run in zip(futures, runs, strict=True):
                _fulfil(future, run)
            return
        share = threads.share_cores(len(runs) + 1)
        torch_core.at_end_of_backward(_CoresBack())
        self._pool.start(
            [
                partial(state.run, contextvars.copy_context(), share, call)
                for call in map(partial, [_fulfil] * len(runs), futures, runs)
            ]
        )

    def end(self) -> list[torch.Tensor | None]:
        """Return the gradients of all ends; raise the error of a backward."""
        futures = self._running.pop(torch_graph.current_task(), [])
        try:
            return [grad for future in futures for grad in future.result()]
        finally:
            threads.take_cores_back()


class _CoresBack:
    """A callback of the engine: if a backward fails, it is dropped without a call."""

    def __call__(self) -> None: ...

    def __del__(self) -> None:
        threads.take_cores_back()


def _fulfil(future: Future[Gradients], run: Callable[[], Gradients]) -> None:
    try:
        future.set_result(run())
    except BaseException as error:
        future.set_exception(error)


def with_graphs_apart(
    outputs: Sequence[Any],
    ends: Sequence[Sequence[torch.Tensor]],
    pool: threads.ThreadPool,
) -> Sequence[Any]:
    """Return outputs of replicas; those of replicas 1, 2, ... have their graphs apart.

    Parameters
    ----------
    outputs : sequence
        The output of each replica.
    ends : sequence of sequence of torch.Tensor
        The tensors in a graph that each replica was given.
    pool : threads.ThreadPool
        Runs their backwards.
    """
    opened, graphs, all_ends = [], [], []
    for output, given in zip(outputs[1:], ends[1:], strict=True):
        tree, leaves = _native.flatten(output)
        own = [i for i, leaf in enumerate(leaves) if _is_recorded(leaf)]
        tensors = [leaves[i] for i in own]
        by_node = {end.grad_fn: end for end in given}  # two parts may have one tensor
        reached = [torch_graph.ends_of(tensor, by_node.keys()) for tensor in tensors]
        # Else a loss of some outputs would call hooks of what only others have used.
        are_alike = all(found == reached[0] is not None for found in reached)
        if not (are_alike and _has_only(output, set(map(id, leaves)))):
            return outputs
        nodes = set().union(*filter(None, reached[:1]))
        used = [end for node, end in by_node.items() if node in nodes]
        opened.append((tree, list(leaves), own))
        graphs.append(_Graph(tensors, used, used, pool))
        all_ends += used
    tensors = [leaves[i] for _, leaves, own in opened for i in own]
    if not tensors:
        return outputs
    made = _cut(graphs, tensors, all_ends, pool)
    shown = [outputs[0]]
    for tree, leaves, own in opened:
        for i in own:
            leaves[i] = next(made)
        shown.append(tree.unflatten(leaves))
    return shown


def _cut(
    graphs: Sequence[_Graph],
    outputs: Sequence[torch.Tensor],
    ends: Sequence[torch.Tensor],
    pool: threads.ThreadPool,
) -> Iterator[torch.Tensor]:
    """Yield stand-ins for the outputs of these graphs."""
    backwards = _Backwards(graphs, pool)
    token = _Inputs.apply(backwards, *ends)  # type: ignore[no-untyped-call]
    made = _Outputs.apply(backwards, token, *[t.detach() for t in outputs])  # type: ignore[no-untyped-call]
    torch_graph.set_turn(token.grad_fn, 0)
    torch_graph.set_turn(made[0].grad_fn, torch_graph.AT_ONCE)
    return iter(made)


def _is_recorded(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _has_only(value: Any, leaves: set[int]) -> bool:
    """Tell whether an output holds nothing but these leaves and constants."""
    if isinstance(value, (dict, list, tuple)):
        entries = value.values() if isinstance(value, dict) else value
        return all(_has_only(entry, leaves) for entry in entries)
    return id(value) in leaves or type(value) in CONSTANTS


class _Outputs(torch.autograd.Function):
    """The outputs of replicas 1, 2, ...: its backward begins theirs."""

    @staticmethod
    def forward(
        ctx: Any, backwards: _Backwards, _: torch.Tensor, *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.backwards = backwards
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.backwards.begin(grads)
        return (None,) * (2 + len(grads))


class _Inputs(torch.autograd.Function):
    """What replicas 1, 2, ... were given: its backward waits for theirs."""

    @staticmethod
    def forward(ctx: Any, backwards: _Backwards, *_: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.backwards = backwards
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.backwards.end()
