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

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from paceline import _native
from paceline._compat import torch_graph, torch_modes
from paceline._dp import rng
from paceline._dp.cpu_copies import InnerBackwards, copies_of
from paceline._dp.devices import CPU
from paceline._dp.errors import as_of_replica
from paceline._dp.nesting import InsideReplica, is_inside_replica
from paceline._dp.replicate import (
    check_structure,
    parts_of,
    replicas_of,
    structure_of,
    tensors_of,
)

Chunk = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one replica."""
_OWN = "_paceline_own"
"""The attribute by which a replica has its `_Own` until it is called."""


class _Own(NamedTuple):
    """What a replica has in place of the module's.

    `leaves` are pairs of the module's tensors and the replica's copies without a graph,
    `backwards` watches those with one.
    `lists` are lists of classes that hold parts of the module (class, name, list), with
    the replica's parts in their place.
    """

    leaves: list[tuple[torch.Tensor, torch.Tensor]]
    backwards: InnerBackwards | None
    lists: list[tuple[type, str, list[Any]]]


class CpuEngine:
    """Runs the replicas of a :class:`paceline.DataParallel` on the CPU."""

    lock: AbstractContextManager[Any] = nullcontext()  # forward may wait for another

    def __init__(self) -> None:
        self._running: set[object] = set()
        self._last_begun: object = None

    def place(self, scattered: _native.Scattered) -> list[Chunk]:
        """Return the arguments of each replica."""
        leaves = [scattered.leaves(k) for k in range(len(scattered.sizes))]
        for each in leaves[1:]:
            each[:] = map(_own_leaf, each, leaves[0])
        return [scattered.tree.unflatten(each) for each in leaves]

    def replicas(self, module: Module, n_replicas: int) -> list[Module]:
        """Return the module, and further replicas of it, for one forward."""
        parts = parts_of(module)
        tensors = tensors_of(parts)
        _check_devices(tensors)
        is_recorded = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_recorded):
            made = [copies_of(tensors, is_recorded) for _ in range(n_replicas - 1)]
        copies = [of_replica for of_replica, _ in made]
        replicas = replicas_of(parts, copies, [_as_it_is] * len(copies))
        lists = _lists_of_classes(parts)
        for replica, (own, watch) in zip(replicas[1:], made, strict=True):
            leaves = [(tensors[key], copy) for key, copy in own.items() if copy.is_leaf]
            held = _Own(leaves, watch, _for_replica(lists, parts, replica))
            replica.__dict__[_OWN] = held
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
        originals = _Originals(parts)
        if len(calls) > 1:
            watch = partial(self._watch, originals, not self._running)
            calls = [partial(watch, k, call) for k, call in enumerate(calls)]
        self._running.add(originals)
        self._last_begun = originals
        try:
            with InsideReplica():
                if torch_modes.count_dispatch_modes():  # they would see the generator's
                    outputs = [call() for call in calls]
                else:
                    outputs = rng.run_in_order(calls)
        finally:
            self._running.discard(originals)
        check_structure(parts, structure)
        return outputs

    def _watch(
        self,
        originals: _Originals,
        began_alone: bool,
        k: int,
        call: Callable[[], Any],
    ) -> Any:
        """Return what the call of replica `k` returns, if it wrote only to its own."""
        output = call()
        # Otherwise what has changed may be the work of a call in another thread.
        if k > 0 and began_alone and self._last_begun is originals:
            originals.check(k)
        else:
            originals.look()
        return output

    def release(self) -> None:
        """Do nothing: replicas are made anew in each forward."""

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


# ---- one replica --------------------------------------------------------------------


def _call(k: int, replica: Module, args: Any, named: Any) -> Any:
    """Return what replica `k` returns; raise its error with its number."""
    args = args if isinstance(args, (list, tuple)) else (args,)
    own: _Own = replica.__dict__.pop(_OWN, _Own([], None, []))
    were_trained = [copy.requires_grad for _, copy in own.leaves]
    lists = _set(own.lists)
    if own.backwards is not None:
        own.backwards.begin()
    try:
        output = replica(*args, **(named or {}))
        failure = None
    except Exception as error:
        failure = as_of_replica(error, k, CPU)
    finally:
        _set(lists)
        if own.backwards is not None:
            own.backwards.end()
    if failure is None:
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
        if not copy.is_leaf:
            continue
        if copy.grad is not None:  # also of one that is frozen again
            _accumulate(original, copy)
        if not copy.requires_grad:
            continue
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


def _set(
    lists: list[tuple[type, str, list[Any]]],
) -> list[tuple[type, str, list[Any]]]:
    """Have classes hold these lists; return what they held."""
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in lists]
    for kind, name, value in lists:
        setattr(kind, name, value)
    return before


# ---- the module beside its replicas -------------------------------------------------


class _Originals:
    """What later replicas must leave alone: the module's tensors and attributes.

    A replica that reaches the module (by a lambda over ``self``, say) would write to it
    once more for its own rows.
    """

    def __init__(self, parts: list[Module]) -> None:
        self._parts = parts
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: list[int] = []
        self._attributes: list[dict[str, Any]] = []

    def look(self) -> None:
        """Note how they are now."""
        self._tensors = tensors_of(self._parts)
        self._versions = _versions(self._tensors.values())
        self._attributes = [part.__dict__.copy() for part in self._parts]

    def check(self, k: int) -> None:
        """Raise if they are not as they were before replica `k` ran."""
        tensors = tensors_of(self._parts)
        versions = _versions(tensors.values())
        if tensors.keys() != self._tensors.keys() or versions != self._versions:
            before = dict(zip(self._tensors, self._versions, strict=True))
            pairs = zip(tensors, versions, strict=True)
            written = {key for key, version in pairs if before.get(key) != version}
            name = _name_of(self._parts[0], written)
        else:
            held = zip(self._parts, self._attributes, strict=True)
            part = next((p for p, old in held if not _is_same(p.__dict__, old)), None)
            if part is None:
                return
            name = f"an attribute of a {type(part).__name__}"
        raise RuntimeError(
            f"replica {k} of DataParallel wrote to {name} in the module itself, not in "
            "its own copy: it reaches the module by something other than attributes, "
            "lists and dicts (a lambda over self, a registry, an optimizer), or "
            "another thread wrote there; reach it through self in forward, or call the "
            "module without DataParallel"
        )


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Tell whether a part holds the same objects, or equal ones."""
    try:
        return now == before
    except Exception:  # tensors and arrays do not compare to one truth
        return False


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


def _own_leaf(leaf: Any, of_replica_0: Any) -> Any:
    """Return an input that a later replica may change in place.

    What is not split is copied.  Parts of a batch are views of it, and share the count
    by which autograd sees that a tensor which it has saved was changed in place.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf is of_replica_0 or leaf.requires_grad or torch_graph.is_transformed():
        return leaf.clone()
    if type(leaf) is not torch.Tensor or leaf.is_inference():
        return leaf
    return leaf.data
