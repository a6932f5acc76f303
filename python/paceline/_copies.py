"""Replicas of a module in one process: new shells round the same parameters.

A replica is what torch's ``replicate`` makes, but its parameters are the module's own:
``next(self.parameters())`` works in its forward, and gradients need no way back.
Buffers are copies, or those of replica 0 would not be the ones that survive.
Attributes that are parts of the module, bound methods of such parts, and lists of them
lead to the replica's own parts.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch.nn import Module

from paceline import _torch

_PLAIN_COPY = _torch.PLAIN_COPY
_OWN_KEYS = frozenset(Module().__dict__)
_HOOKS = tuple(
    name for name in sorted(_OWN_KEYS) if "ward_" in name and "hooks" in name
)
"""Hooks of forward and backward: what one replica registers or removes is its own."""


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
            _collect(child, seen, parts)


def replicas_of(parts: list[Module], n_replicas: int) -> list[Module]:
    """Return the module itself and ``n_replicas - 1`` replicas of it.

    Parameters
    ----------
    parts : list of torch.nn.Module
        What :func:`parts_of` returned.
    n_replicas : int
        How many, replica 0 (the module) among them.

    Raises
    ------
    ValueError
        If a parameter is lazy and has no shape yet.
    """
    return [parts[0]] + [_replica(parts) for _ in range(n_replicas - 1)]


def _replica(parts: list[Module]) -> Module:
    copies = {id(part): _shell(part) for part in parts}
    buffers: dict[int, torch.Tensor] = {}
    for part in parts:
        copy = copies[id(part)]
        if isinstance(part, torch.jit.ScriptModule):
            _fill_script(part, copy, copies, buffers)
        else:
            _fill(part, copy, copies, buffers)
    return copies[id(parts[0])]


def _shell(part: Module) -> Module:
    kind = type(part)
    method: Callable[[Module], Module] = kind._replicate_for_data_parallel
    if method is _PLAIN_COPY or isinstance(part, torch.fx.GraphModule):
        copy = object.__new__(kind)
        copy.__dict__ = part.__dict__.copy()
        copy.__dict__["_is_replica"] = True
        return copy
    check_lazy((part,))
    copy = method(part)  # of an RNN, of a script, of the user's own
    return copy


def check_lazy(parts: Iterable[Module]) -> None:
    """Raise torch's error where a parameter has no shape yet."""
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None and _torch.is_lazy(parameter):
                raise ValueError(
                    "Attempted to use an uninitialized parameter in DataParallel: "
                    f"'{name}' of {type(part).__name__} has no shape yet. Modules with "
                    "uninitialized parameters can't be used with `DataParallel`. Run a "
                    "dummy forward pass to correctly initialize the modules"
                )


def _fill(
    part: Module,
    copy: Module,
    copies: dict[int, Module],
    buffers: dict[int, torch.Tensor],
) -> None:
    held = copy.__dict__
    held["_parameters"] = part._parameters.copy()
    own = part._buffers.copy()
    for name, buffer in own.items():
        if buffer is not None:
            own[name] = _buffer(buffer, buffers)
    held["_buffers"] = own
    children = part._modules.copy()
    for name, child in children.items():
        if child is not None:
            children[name] = copies[id(child)]
    held["_modules"] = children
    held["zero_grad"] = _zero_nothing
    for name in _HOOKS:
        hooks = held.get(name)
        held[name] = hooks.copy() if hooks else OrderedDict()
    for name, value in held.items():
        if name not in _OWN_KEYS:
            renewed = _renewed(value, copies)
            if renewed is not value:
                held[name] = renewed
    if "dynamo_ctx" in held:  # torch.compile(part): its forward leads to the original
        copy._initialize()  # type: ignore[operator]


def _zero_nothing(set_to_none: bool = True) -> None:
    """Take the place of ``zero_grad`` in a replica: its gradients are replica 0's.

    Two threads that set the gradient of one parameter to None at a time crash torch.
    """
    warnings.warn(
        "Calling .zero_grad() in a replica of DataParallel has no effect: it has the "
        "parameters of the module itself, whose own forward may zero them; better do "
        "so before the forward",
        stacklevel=2,
    )


def _fill_script(
    part: Module,
    copy: Module,
    copies: dict[int, Module],
    buffers: dict[int, torch.Tensor],
) -> None:
    for name, child in part._modules.items():
        if child is not None:
            if not isinstance(child, torch.jit.ScriptModule):
                raise RuntimeError(
                    "Cannot replicate network where python modules are children of "
                    "ScriptModule"
                )
            setattr(copy, name, copies[id(child)])
    for name, buffer in part._buffers.items():
        if buffer is not None:
            setattr(copy, name, _buffer(buffer, buffers))


def _buffer(buffer: torch.Tensor, done: dict[int, torch.Tensor]) -> torch.Tensor:
    if buffer.requires_grad:
        return buffer
    copy = done.get(id(buffer))
    if copy is None:
        copy = done[id(buffer)] = buffer.detach().clone()
    return copy


def _renewed(value: Any, copies: dict[int, Module]) -> Any:
    """Return what stands for an attribute in the replica; most stand for themselves."""
    if isinstance(value, Module):
        return copies.get(id(value), value)
    kind = type(value)
    if kind is MethodType:
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if (kind is list or kind is tuple) and value and isinstance(value[0], Module):
        return kind(copies.get(id(v), v) for v in value)
    if kind is dict and value and isinstance(next(iter(value.values())), Module):
        return {k: copies.get(id(v), v) for k, v in value.items()}
    return value
