"""Replicas of a module: shells with copies of its parameters and buffers.

A replica is like one of torch's ``replicate``, but its parameters are real ones:
``next(self.parameters())`` works in its forward.  If an attribute refers to a part or
parameter of the module, the replica's attribute refers to its own one.  The reference
may also be a bound method, or be in a list, dict, partial or weak reference.
"""

from __future__ import annotations

import copyreg
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from paceline._compat import torch_core, torch_modes

_PLAIN_COPY = torch_core.PLAIN_COPY
OWN_KEYS = frozenset(Module().__dict__)
HOOKS = tuple(name for name in sorted(OWN_KEYS) if "ward_" in name and "hooks" in name)
"""Hooks of forward and backward: each replica registers and removes its own."""


def parts_of(module: Module) -> list[Module]:
    """Return the module and all its parts, each once, in the order of registration."""
    seen = {id(module)}
    parts = [module]
    _collect(module, seen, parts)
    return parts


def _collect(module: Module, seen: set[int], parts: list[Module]) -> None:
    for child in module._modules.values():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            parts.append(child)
            if child._modules:
                _collect(child, seen, parts)


def tensors_of(parts: list[Module]) -> dict[int, torch.Tensor]:
    """Return all parameters and buffers, each once, by their ids."""
    return {id(tensor): tensor for tensor in held_by(parts)}


def held_by(parts: list[Module]) -> list[torch.Tensor]:
    """Return the parameters and buffers of each part; shared ones several times."""
    return [
        tensor
        for part in parts
        for tensors in (part._parameters, part._buffers)
        for tensor in tensors.values()
        if tensor is not None
    ]


def alone_because(module: torch.nn.Module) -> str | None:
    """Return why replicas cannot compute what the module does, or None."""
    parts = parts_of(module)
    for part in parts:
        if isinstance(part, (Embedding, EmbeddingBag)) and part.max_norm is not None:
            return (
                f"a {type(part).__name__} has max_norm: each call writes to those rows "
                "of its weight that the batch uses"
            )
    if any(tensor.is_inference() for tensor in held_by(parts)):
        return "a parameter or buffer was made in torch.inference_mode()"
    if torch_modes.is_mutation_allowed():
        return "in allow_mutation_on_saved_tensors() torch must see the whole batch"
    return None


def has_hooks(tensor: torch.Tensor) -> bool:
    """Tell whether hooks are called with a tensor's gradient, or after it."""
    late = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks or late)


def has_more_behind(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor has hooks or a graph behind it.

    They must not run if no replica has used the tensor.
    """
    return (
        not tensor.is_leaf
        or has_hooks(tensor)
        or torch_core.is_accumulation_held(tensor)
    )


def unused_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient for a tensor that no replica has used.

    Hooks registered since the forward receive it: zeros, as in torch's class, not None.
    """
    return torch.zeros_like(tensor) if has_hooks(tensor) else None


Copies = dict[int, torch.Tensor]
"""The copies that one replica has of parameters and buffers, by the ``id`` of each."""


Bring = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor on a replica's device: itself, or a copy."""


def as_original(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Make a copy of its original's kind: a parameter of that class, or a buffer.

    The copy of a parameter becomes a leaf if it has no graph.
    """
    kind = type(original)
    if kind is torch.Tensor and not original.__dict__:
        return copy
    if kind is Parameter or isinstance(original, Parameter):
        if copy.grad_fn is None:
            copy = Parameter(copy, original.requires_grad)
        if type(copy) is not kind:
            copy.__class__ = kind
    if original.__dict__:
        copy.__dict__.update(original.__dict__)
    return copy


def replica_of(parts: list[Module], tensors: Copies, bring: Bring) -> Module:
    """Return a further replica; `bring` moves tensors of attributes to its device."""
    shells = {id(part): shell_of(part) for part in parts}
    copies: dict[int, Any] = {**shells, **tensors}
    for part in parts:
        copy = copies[id(part)]
        if isinstance(part, torch.jit.ScriptModule):
            _fill_script(part, copy, copies)
        else:
            fill(part, copy, copies, bring)
    return shells[id(parts[0])]


def shell_of(part: Module) -> Module:
    kind = part.__class__  # the module's, even if `part` is a weak proxy
    method: Callable[[Module], Module] = kind._replicate_for_data_parallel
    if method is _PLAIN_COPY or isinstance(part, torch.fx.GraphModule):
        copy = object.__new__(kind)
        held = copy.__dict__
        held.update(part.__dict__)  # assigning __dict__ would run Module.__setattr__
        held["_is_replica"] = True
        return copy
    check_lazy((part,))
    copy = method(part)  # overridden by an RNN, a script or the user
    return copy


def check_lazy(parts: Iterable[Module]) -> None:
    """Raise torch's error if a parameter has no shape yet."""
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None and torch_core.is_lazy(parameter):
                raise ValueError(
                    "Attempted to use an uninitialized parameter in DataParallel: "
                    f"'{name}' of {type(part).__name__} has no shape yet. Modules with "
                    "uninitialized parameters can't be used with `DataParallel`. Run a "
                    "dummy forward pass to correctly initialize the modules"
                )


Structure = list[tuple[int, bool, int]]
"""For each parameter and module of a part: its id, whether it is or may be trained, and
its number of gradient hooks."""


def structure_of(parts: Iterable[Module]) -> list[Structure]:
    """Return the structure of each part, to detect changes."""
    return [
        [
            *[
                (id(p), True, len(p._backward_hooks or ()))
                if p is not None and p.requires_grad
                else (id(p), False, 0)
                for p in part._parameters.values()
            ],
            *[(id(module), True, 0) for module in part._modules.values()],
        ]
        for part in parts
    ]


def check_structure(parts: Sequence[Module], before: list[Structure]) -> None:
    """Raise if replica 0's forward changed what a part trains, or added hooks.

    Each other replica did the same for itself: nothing trains what it made, and a hook
    of replica 0 would receive the gradient of all replicas.
    """
    for part, old, new in zip(parts, before, structure_of(parts), strict=True):
        if old == new:
            continue
        pairs = list(zip(old, new, strict=False))
        # A frozen parameter may be replaced.
        if len(old) != len(new) or any(
            was[0] != now[0] and (was[1] or now[1]) for was, now in pairs
        ):
            raise RuntimeError(
                f"{type(part).__name__} has changed its parameters or modules in "
                "forward, after its replicas were made: run the bare module once on a "
                "small batch before you wrap it; the next call works"
            )
        for name, (was, now) in zip(part._parameters, pairs, strict=False):
            if now[2] > was[2]:
                raise RuntimeError(
                    f"a forward of DataParallel has registered a hook on the parameter "
                    f"'{name}' of {type(part).__name__} in each replica: register it "
                    "before the forward, to get the gradient of the whole batch"
                )


def fill(
    part: Module,
    copy: Module,
    copies: dict[int, Any],
    bring: Bring,
) -> None:
    held = copy.__dict__
    for kind in ("_parameters", "_buffers", "_modules"):
        entries = held[kind] = part.__dict__[kind].copy()
        for name, entry in entries.items():
            if entry is not None:
                entries[name] = copies[id(entry)]
    held["zero_grad"] = _zero_nothing
    for name in HOOKS:
        hooks = held.get(name)
        held[name] = OrderedDict()
        if hooks:
            held[name].update(hooks_of(hooks, copies))
    held.pop("_compiled_call_impl", None)  # of part.compile(): calls the original
    for name in held.keys() - OWN_KEYS:
        value = held[name]
        if type(value) not in CONSTANTS:
            held[name] = renewed(value, copies, bring)
    for name in copyreg._slotnames(part.__class__):  # type: ignore[attr-defined]
        if hasattr(part, name):
            object.__setattr__(copy, name, _renewed(getattr(part, name), copies))
    if "dynamo_ctx" in held:  # torch.compile(part): its forward calls the original
        copy._initialize()  # type: ignore[operator]


def hooks_of(hooks: dict[Any, Any], copies: dict[int, Any]) -> dict[Any, Any]:
    """Return a part's hooks for its replica."""
    return {key: _renewed(hook, copies) for key, hook in hooks.items()}


def renewed(value: Any, copies: dict[int, Any], bring: Bring) -> Any:
    """Return the value of a part's attribute in its replica."""
    own = _renewed(value, copies)
    return bring(value) if own is value and isinstance(value, torch.Tensor) else own


def _zero_nothing(set_to_none: bool = True) -> None:
    """Take the place of ``zero_grad`` in a replica, whose parameters are copies."""
    warnings.warn(
        "Calling .zero_grad() in a replica of DataParallel has no effect: its "
        "parameters are copies, and gradients go to those of the module itself; call "
        "it before the forward, or use torch.autograd.grad inside",
        stacklevel=2,
    )


def _fill_script(
    part: Module,
    copy: Module,
    copies: dict[int, Any],
) -> None:
    for name, child in part._modules.items():
        if child is not None:
            if not isinstance(child, torch.jit.ScriptModule):
                raise RuntimeError(
                    "Cannot replicate network where python modules are children of "
                    "ScriptModule"
                )
            setattr(copy, name, copies[id(child)])
    for tensors in (part._parameters, part._buffers):
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(copy, name, copies[id(tensor)])


_LEVELS = 3
CONSTANTS = frozenset((int, bool, float, str, type(None)))


def _renewed(value: Any, copies: dict[int, Any], n_levels: int = _LEVELS) -> Any:
    """Return the replica's value of an attribute; most values are the same.

    The first entry of a list or dict decides whether its entries are renewed, so a list
    of a million strings is not searched.  All replicas share values that hold nothing
    of the module.
    """
    if isinstance(value, (Module, torch.Tensor)):
        return copies.get(id(value), value)
    kind = type(value)
    if kind is MethodType:
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if kind is partial:
        given = (value.func, *value.args, *value.keywords.values())
        entries = [_renewed(v, copies, n_levels - 1) for v in given]
        if _are_same(given, entries):
            return value
        function, *args = entries[: 1 + len(value.args)]
        named = zip(value.keywords, entries[1 + len(value.args) :], strict=True)
        return partial(function, *args, **dict(named))
    if kind is weakref.ref:
        own = copies.get(id(value()))
        return value if own is None else weakref.ref(own)
    if kind in (list, tuple) and leads(value, n_levels):
        entries = [_renewed(v, copies, n_levels - 1) for v in value]
        return value if _are_same(value, entries) else kind(entries)
    if kind is dict and leads(value, n_levels):
        entries = [_renewed(v, copies, n_levels - 1) for v in value.values()]
        is_same = _are_same(value.values(), entries)
        return value if is_same else dict(zip(value, entries, strict=True))
    return value


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Tell whether two containers hold the same objects, so replicas can share one."""
    return all(map(operator.is_, values, others))


def leads(value: Any, n_levels: int = _LEVELS) -> bool:
    """Tell whether a list, or the values of a dict, begin with a module or a tensor."""
    first = next(iter(value.values() if isinstance(value, dict) else value), None)
    if not isinstance(first, (list, tuple, dict)):
        return isinstance(first, (Module, torch.Tensor))
    n_levels -= isinstance(first, dict)  # its values are one level more
    return n_levels > 1 and leads(first, n_levels - 1)
