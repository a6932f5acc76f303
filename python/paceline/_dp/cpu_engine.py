"""Replicas on the CPU: one after another, on the caller's thread.

torch's own threads use every core already, so nothing is gained by replicas side by
side, and nothing of a program has to know of threads.

::

    caller    scatter | replica 0 | 1 | ... | n-1 | gather
                      the module    shells with copies, made before replica 0 runs

Replica 0 is the module itself.  Each further one has copies of all parameters and
buffers: what it writes is lost with it, as with torch's class.  Copies of what is
trained are made in the graph, so that gradients reach the module by autograd itself.
Copies without a graph are leaves: if a replica gives one a gradient, it is moved to the
module's own tensor (:func:`_hand_over`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module, Parameter

from paceline import _native
from paceline._compat import torch_graph, torch_modes
from paceline._dp import rng
from paceline._dp.errors import as_of_replica
from paceline._dp.nesting import InsideReplica, is_inside_replica
from paceline._dp.replicate import (
    as_original,
    check_structure,
    parts_of,
    replicas_of,
    structure_of,
    tensors_of,
)

Chunk = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one replica."""
_CPU = torch.device("cpu")
_OWN = "_paceline_own"
"""The attribute by which a replica has its `_Own` until it is called."""


class _Own(NamedTuple):
    """What a replica has in place of the module's.

    `leaves` are pairs of the module's tensors and the replica's copies without a graph.
    `lists` are lists of classes that hold parts of the module (class, name, list), with
    the replica's parts in their place.
    """

    leaves: list[tuple[torch.Tensor, torch.Tensor]]
    lists: list[tuple[type, str, list[Any]]]


class CpuEngine:
    """Runs the replicas of a :class:`paceline.DataParallel` on the CPU."""

    lock: AbstractContextManager[Any] = nullcontext()

    def place(self, scattered: _native.Scattered) -> list[Chunk]:
        """Return the arguments of each replica."""
        leaves = [scattered.leaves(k) for k in range(len(scattered.sizes))]
        if torch.is_grad_enabled():
            separate = _copied if torch_graph.is_transformed() else _with_own_version
            for each in leaves[1:]:
                each[:] = map(separate, each, leaves[0])
        return [scattered.tree.unflatten(each) for each in leaves]

    def replicas(self, module: Module, n_replicas: int) -> list[Module]:
        """Return the module, and further replicas of it, for one forward."""
        parts = parts_of(module)
        tensors = tensors_of(parts)
        _check_devices(tensors)
        is_recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_recorded):
            copies = [_copies_of(tensors, is_recorded) for _ in range(n_replicas - 1)]
        replicas = replicas_of(parts, copies, [_as_it_is] * len(copies))
        lists = _lists_of_classes(parts)
        for replica, held in zip(replicas[1:], copies, strict=True):
            leaves = [
                (tensors[key], copy) for key, copy in held.items() if copy.is_leaf
            ]
            replica.__dict__[_OWN] = _Own(leaves, _for_replica(lists, parts, replica))
        return replicas

    def apply(
        self,
        module: Module,
        replicas: Sequence[Module],
        inputs: Sequence[Any],
        kwargs: Sequence[Any],
    ) -> list[Any]:
        """Return what each replica returns; the first error is raised."""
        calls = [
            partial(_call, k, replica, args, named)
            for k, (replica, args, named) in enumerate(
                zip(replicas, inputs, kwargs, strict=True)
            )
        ]
        if is_inside_replica():
            return [call() for call in calls]
        parts = parts_of(module)
        structure = structure_of(parts)
        if len(calls) > 1:
            watch = _Originals(parts, len(calls)).watch
            calls = [partial(watch, k, call) for k, call in enumerate(calls)]
        with InsideReplica():
            if torch_modes.count_dispatch_modes():  # they would see the generator's
                outputs = [call() for call in calls]
            else:
                outputs = rng.run_in_order(calls)[0]
        check_structure(parts, structure)
        return outputs

    def join(
        self,
        outputs: Sequence[Any],
        sizes: tuple[int, ...] | None,
        dim: int,
        output: torch.device,
    ) -> Any:
        """Return the output for the whole batch."""
        return _native.gather(list(outputs), sizes or (), dim)

    def bring(self, output: Any, where: torch.device) -> Any:
        """Return the output of one replica, on a device."""
        return output


# ---- what a replica has -------------------------------------------------------------


def _copies_of(
    tensors: dict[int, torch.Tensor], is_recorded: bool
) -> dict[int, torch.Tensor]:
    """Return copies, in the graph of those that are trained."""
    if torch_graph.is_transformed():
        return {key: tensor.clone() for key, tensor in tensors.items()}
    copies = {}
    for key, tensor in tensors.items():
        is_trained = is_recorded and tensor.requires_grad
        copy = tensor.clone() if is_trained else tensor.detach().clone()
        if is_trained and type(tensor) is Parameter and not tensor.__dict__:
            copy.__class__ = Parameter  # as as_original() does, in less time
            copies[key] = copy
        else:
            copies[key] = as_original(copy, tensor)
    return copies


# ---- one replica --------------------------------------------------------------------


def _call(k: int, replica: Module, args: Any, named: Any) -> Any:
    """Return what replica `k` returns; raise its error with its number."""
    args = args if isinstance(args, (list, tuple)) else (args,)
    own: _Own = replica.__dict__.pop(_OWN, _Own([], []))
    were_trained = [copy.requires_grad for _, copy in own.leaves]
    try:
        with _set(own.lists):
            output = replica(*args, **(named or {}))
    except Exception as error:
        failure = as_of_replica(error, k, _CPU)
    else:
        _hand_over(own, were_trained, output)
        return output
    try:
        raise failure
    finally:
        del failure  # its traceback leads to this frame


def _hand_over(own: _Own, were_trained: list[bool], output: Any) -> None:
    """Move gradients of a replica's own leaves to the module, now and in backward.

    A leaf gets gradients if the forward made it require them, or if the forward
    recorded a graph although the caller does not.
    """
    is_recorded = torch.is_grad_enabled()
    will_come: bool | None = None
    for (original, copy), was_trained in zip(own.leaves, were_trained, strict=True):
        if not (copy.requires_grad and copy.is_leaf):
            continue
        if copy.grad is not None:
            _accumulate(original, copy)
        if was_trained and not is_recorded:
            if will_come is None:
                will_come = _has_graph(output)
            if not will_come:
                continue
        hook = partial(_accumulate, original)
        copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _accumulate(original: torch.Tensor, copy: torch.Tensor) -> None:
    """Add the gradient of a copy to that of the module's own tensor."""
    grad, copy.grad = copy.grad, None
    before = original.grad
    if grad is None or before is None:
        original.grad = before if grad is None else grad
    elif before.requires_grad or grad.requires_grad or before.layout != torch.strided:
        original.grad = before + grad
    else:
        before.add_(grad)


def _has_graph(output: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad
        for leaf in _native.flatten(output)[1]
    )


def _lists_of_classes(parts: list[Module]) -> list[tuple[type, str, list[Any]]]:
    """Return lists of the parts' classes that hold parts, as a registry of layers does.

    snntorch resets the hidden states of all layers by one.
    """
    kinds = {kind for of in set(map(type, parts)) for kind in of.__mro__}
    own_kinds = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    ids = set(map(id, parts))
    return [
        (kind, name, value)
        for kind in own_kinds
        for name, value in vars(kind).items()
        if type(value) is list and not ids.isdisjoint(map(id, value))
    ]


def _for_replica(
    lists: list[tuple[type, str, list[Any]]], parts: list[Module], replica: Module
) -> list[tuple[type, str, list[Any]]]:
    """Return the same lists with a replica's parts in place of the module's."""
    if not lists:
        return []
    pairs = zip(parts, parts_of(replica), strict=True)
    stand_in = {id(part): own for part, own in pairs}
    return [
        (kind, name, [stand_in.get(id(entry), entry) for entry in value])
        for kind, name, value in lists
    ]


@contextmanager
def _set(lists: list[tuple[type, str, list[Any]]]) -> Iterator[None]:
    """Have classes hold these lists, for a while."""
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in lists]
    try:
        for kind, name, value in lists:
            setattr(kind, name, value)
        yield
    finally:
        for kind, name, value in before:
            setattr(kind, name, value)


# ---- the module beside its replicas -------------------------------------------------


class _Originals:
    """What later replicas must leave alone: the module's parameters and buffers.

    A replica that reaches the module (by a weak reference, a partial, a lambda over
    ``self``) would write to it once more for its own rows.
    """

    def __init__(self, parts: list[Module], n_replicas: int) -> None:
        self._parts = parts
        self._last = n_replicas - 1
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []

    def watch(self, k: int, call: Callable[[], Any]) -> Any:
        """Return what the call of replica `k` returns, if it wrote only to its own."""
        output = call()
        if k > 0:
            self._check_written(k)
            self._check_grads()
        if k < self._last:
            self._look()
        return output

    def _look(self) -> None:
        self._tensors = tensors_of(self._parts)
        self._versions = _versions(self._tensors.values())
        self._grads = []
        if torch.is_grad_enabled():  # otherwise gradients stay with the copies
            grads = ((t, t.grad) for t in self._tensors.values() if t.is_leaf)
            self._grads = [(t, g, 0 if g is None else g._version) for t, g in grads]

    def _check_written(self, k: int) -> None:
        now = tensors_of(self._parts)
        versions = _versions(now.values())
        if now.keys() == self._tensors.keys() and versions == self._versions:
            return
        before = dict(zip(self._tensors, self._versions, strict=True))
        written = {
            key
            for key, version in zip(now, versions, strict=True)
            if before.get(key) != version
        }
        name = _name_of(self._parts[0], written)
        raise RuntimeError(
            f"replica {k} of DataParallel wrote to {name} in the module itself, not to "
            "its own copy: it reaches the module by something other than attributes, "
            "lists and dicts (a weak reference, a partial, a lambda over self, an "
            "optimizer); reach it through self in forward, or call the module without "
            "DataParallel"
        )

    def _check_grads(self) -> None:
        """Warn if ``p.grad = None`` in forward was to undo a backward inside forward.

        In a replica ``p`` is a copy, and the gradient is that of the module itself.  If
        replica 0 has left no gradient, none is left.
        """
        is_ambiguous = False
        for tensor, before, version in self._grads:
            grad = tensor.grad
            if grad is None or (grad is before and grad._version <= version + 1):
                continue
            if before is None:
                tensor.grad = None
            is_ambiguous = True
        if is_ambiguous:
            warnings.warn(
                "a forward of DataParallel runs backward passes and sets p.grad in "
                "between, which has no effect in a replica: its parameters are copies, "
                "and gradients go to those of the module itself. Gradients that "
                "replica 0 did not leave were dropped; use torch.autograd.grad in "
                "forward",
                stacklevel=2,
            )


def _name_of(module: Module, keys: set[int]) -> str:
    """Return the name of one of these tensors in a module, and its part's class."""
    for prefix, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if id(tensor) in keys:
                    path = f"{prefix}.{name}" if prefix else name
                    return f"'{path}' (of a {type(part).__name__})"
    return "a buffer, which it removed,"


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return what counts writes to each tensor; those of inference mode count none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if each.is_inference() else each._version for each in tensors]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _check_devices(tensors: dict[int, torch.Tensor]) -> None:
    """Raise torch's error if a parameter or buffer is on another device."""
    for tensor in tensors.values():
        if not tensor.is_cpu:
            raise RuntimeError(
                "module must have its parameters and buffers on device cpu "
                f"(device_ids[0]) but found one of them on device: {tensor.device}"
            )


# ---- arguments ----------------------------------------------------------------------


def _with_own_version(leaf: Any, of_replica_0: Any) -> Any:
    """Return an input of a replica that other replicas may change theirs beside.

    All parts of a batch are views of it, and share the count by which autograd sees
    that a tensor which it has saved was changed in place.
    """
    if type(leaf) is not torch.Tensor or leaf is of_replica_0 or leaf.is_inference():
        return leaf
    return leaf.clone() if leaf.requires_grad else leaf.data


def _copied(leaf: Any, of_replica_0: Any) -> Any:
    """Return the same as `_with_own_version`, with what a transform has added to it."""
    if not isinstance(leaf, torch.Tensor) or leaf is of_replica_0:
        return leaf
    return leaf.clone()
