"""Replicas of a module in one process: new shells round the same parameters.

A replica is what torch's ``replicate`` makes, but its parameters are the module's own:
``next(self.parameters())`` works in its forward, and gradients need no way back.
Parameters that a forward writes (``effects.py``) are copies, to which autograd leads,
and so are buffers, or those of replica 0 would not be the ones that survive.
Attributes that are parts or parameters of the module, bound methods of such parts, and
lists and dicts of them lead to the replica's own.
"""

from __future__ import annotations

import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.nn import Embedding, EmbeddingBag, Module

from paceline._compat import torch_core, torch_graph

_PLAIN_COPY = torch_core.PLAIN_COPY
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


Copies = dict[int, torch.Tensor]
"""The copies that one replica has of parameters, and of buffers where it has them on
another device, by the ``id`` of each."""


Bring = Callable[[torch.Tensor], torch.Tensor]
"""Returns a tensor where a replica can use it: itself, or a copy."""


def replicas_of(
    parts: list[Module], copies: list[Copies], bring: Sequence[Bring] = ()
) -> list[Module]:
    """Return the module itself and replicas of it.

    `copies` are the copies of parameters of each replica but replica 0 (the module); it
    shares the others.  `bring` is each one's way to tensors that are attributes, where
    it does not share these.
    """
    brings = bring or [_as_it_is] * len(copies)
    return [
        parts[0],
        *(_replica(parts, *its) for its in zip(copies, brings, strict=True)),
    ]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def copy_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy for one replica: its gradient goes to the parameter itself."""
    if torch_graph.is_transformed():
        return parameter.clone()
    is_recorded = parameter.requires_grad and torch.is_grad_enabled()
    with torch.inference_mode(False):  # else it would be a tensor of that mode
        copy = parameter.clone() if is_recorded else parameter.detach().clone()
    return as_original(copy, parameter)


def as_original(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Return a copy as what the original is: a parameter of that class, or a buffer.

    A copy without a graph becomes a leaf, where it is a parameter.
    """
    if isinstance(original, torch.nn.Parameter):
        if copy.grad_fn is None:
            with torch.inference_mode(False):
                copy = torch.nn.Parameter(copy, original.requires_grad)
        if type(copy) is not type(original):
            copy.__class__ = type(original)
    if original.__dict__:
        copy.__dict__.update(original.__dict__)
    return copy


def _replica(parts: list[Module], parameters: Copies, bring: Bring) -> Module:
    shells = {id(part): _shell(part) for part in parts}
    copies: dict[int, Any] = {**shells, **parameters}
    buffers: dict[int, torch.Tensor] = {}
    for part in parts:
        copy = copies[id(part)]
        if isinstance(part, torch.jit.ScriptModule):
            _fill_script(part, copy, copies, buffers)
        else:
            _fill(part, copy, copies, buffers, bring)
    return shells[id(parts[0])]


def _shell(part: Module) -> Module:
    kind = part.__class__  # that of the module itself, where this is a weak proxy
    method: Callable[[Module], Module] = kind._replicate_for_data_parallel
    if method is _PLAIN_COPY or isinstance(part, torch.fx.GraphModule):
        copy = object.__new__(kind)
        held = copy.__dict__
        held.update(part.__dict__)  # to set __dict__ would ask torch first
        held["_is_replica"] = True
        return copy
    check_lazy((part,))
    copy = method(part)  # of an RNN, of a script, of the user's own
    return copy


def check_lazy(parts: Iterable[Module]) -> None:
    """Raise torch's error where a parameter has no shape yet."""
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None and torch_core.is_lazy(parameter):
                raise ValueError(
                    "Attempted to use an uninitialized parameter in DataParallel: "
                    f"'{name}' of {type(part).__name__} has no shape yet. Modules with "
                    "uninitialized parameters can't be used with `DataParallel`. Run a "
                    "dummy forward pass to correctly initialize the modules"
                )


def frozen(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """Return those that do not require a gradient."""
    return [t for t in tensors if t is not None and not t.requires_grad]


def check_thawed(module: Module, were_frozen: Iterable[torch.Tensor]) -> None:
    """Raise where replica 0's forward has made a tensor require a gradient.

    Each other replica has done so with its own copy, which nobody reads.
    """
    if not torch.is_grad_enabled():
        return
    for tensor in were_frozen:
        if tensor.requires_grad and tensor.is_leaf:
            raise thawed(tensor, tensor, module)


def thawed(
    original: torch.Tensor, tensor: torch.Tensor, replica: Module
) -> RuntimeError:
    """Return what to raise where a replica has made its copy be trained."""
    kind, named = "buffer", replica.named_buffers
    if isinstance(original, torch.nn.Parameter):
        kind, named = "parameter", replica.named_parameters
    found = named(remove_duplicate=False)
    name = next((name for name, each in found if each is tensor), "of a part")
    return RuntimeError(
        f"a replica of DataParallel made its {kind} '{name}' require a gradient, which "
        "would be that of some rows alone: call requires_grad_() on the module's own "
        "before the forward"
    )


Structure = list[tuple[int, bool, int]]
"""Which parameters and modules a part has, whether each is, or may be, trained, and how
many hooks its gradient has."""


def structure_of(parts: Iterable[Module]) -> list[Structure]:
    """Return what tells whether a part has been given others."""
    return [
        [
            *((id(p), *_use_of(p)) for p in part._parameters.values()),
            *((id(module), True, 0) for module in part._modules.values()),
        ]
        for part in parts
    ]


def _use_of(parameter: torch.Tensor | None) -> tuple[bool, int]:
    if parameter is None or not parameter.requires_grad:
        return False, 0
    hooks = parameter._backward_hooks
    return True, len(hooks) if hooks else 0


def _differs(old: Structure, new: Structure) -> bool:
    """Tell whether what is trained is another; a frozen one may give way to another."""
    return len(old) != len(new) or any(
        before != now and (was_trained or is_trained)
        for (before, was_trained, _), (now, is_trained, _) in zip(old, new, strict=True)
    )


def _hooked(part: Module, old: Structure, new: Structure) -> str | None:
    """Return the name of a parameter that has more hooks than it had."""
    for name, before, now in zip(part._parameters.keys(), old, new, strict=False):
        if now[2] > before[2]:
            return name
    return None


def check_structure(parts: Sequence[Module], before: list[Structure]) -> None:
    """Raise where replica 0's forward has given a part others to train, or hooks.

    A hook of replica 0's would be called with the gradient of all.
    """
    for part, old, new in zip(parts, before, structure_of(parts), strict=True):
        if old == new:
            continue
        if _differs(old, new):
            raise restructured(part)
        name = _hooked(part, old, new)
        if name is not None:
            raise RuntimeError(
                f"a forward of DataParallel has put a hook on the parameter '{name}' "
                f"of {type(part).__name__} in each replica: put it there before the "
                "forward, where it sees the gradient of the whole batch"
            )


def restructured(part: Module) -> RuntimeError:
    """Return what to raise where a forward has changed what a part is made of.

    Each other replica has done so for itself, and what it has made nobody trains.
    """
    return RuntimeError(
        f"{type(part).__name__} has changed its parameters or modules in forward, "
        "after its replicas were made: run the bare module once on a small batch "
        "before you wrap it; the next call works"
    )


def check_norms(parts: Iterable[Module]) -> None:
    """Raise where replicas would norm the rows of their parts of a batch alone."""
    for part in parts:
        if isinstance(part, (Embedding, EmbeddingBag)) and part.max_norm is not None:
            raise RuntimeError(
                "an embedding of the module was given max_norm after it was wrapped, "
                "by which each call writes the rows of the whole batch to the weight: "
                "call refresh() on the DataParallel, which then calls the module "
                "plainly"
            )


def _fill(
    part: Module,
    copy: Module,
    copies: dict[int, Any],
    buffers: dict[int, torch.Tensor],
    bring: Bring,
) -> None:
    held = copy.__dict__
    held["_parameters"] = {
        name: copies.get(id(parameter), parameter)
        for name, parameter in part._parameters.items()
    }
    copied = part._buffers.copy()
    for name, buffer in copied.items():
        if buffer is not None:
            copied[name] = _buffer(buffer, copies, buffers)
    held["_buffers"] = copied
    children = part._modules.copy()
    for name, child in children.items():
        if child is not None:
            children[name] = copies[id(child)]
    held["_modules"] = children
    held["zero_grad"] = _zero_nothing
    for name in _HOOKS:
        hooks = held.get(name)
        held[name] = hooks.copy() if hooks else OrderedDict()
    for name in held.keys() - _OWN_KEYS:
        value = held[name]
        if type(value) not in _CONSTANTS:
            renewed = _renewed(value, copies)
            if renewed is not value:
                held[name] = renewed
            elif isinstance(value, torch.Tensor):
                held[name] = bring(value)
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
    copies: dict[int, Any],
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
    for name, parameter in part._parameters.items():
        if id(parameter) in copies:
            setattr(copy, name, copies[id(parameter)])
    for name, buffer in part._buffers.items():
        if buffer is not None:
            setattr(copy, name, _buffer(buffer, copies, buffers))


def _buffer(
    buffer: torch.Tensor, copies: dict[int, Any], done: dict[int, torch.Tensor]
) -> torch.Tensor:
    if id(buffer) in copies:
        return copies[id(buffer)]  # type: ignore[no-any-return]
    if buffer.requires_grad:
        return buffer
    copy = done.get(id(buffer))
    if copy is None:
        copy = done[id(buffer)] = buffer.detach().clone()
    return copy


_LEVELS = 3
_CONSTANTS = frozenset((int, bool, float, str, type(None)))


def _renewed(value: Any, copies: dict[int, Any], n_levels: int = _LEVELS) -> Any:
    """Return what stands for an attribute in the replica; most stand for themselves.

    The first entry of a list or dict says whether there is something in it to be
    renewed: a list of a million strings is not gone through.  What holds nothing of the
    module's stays the one that all replicas have.
    """
    if isinstance(value, (Module, torch.Tensor)):
        return copies.get(id(value), value)
    kind = type(value)
    if kind is MethodType:
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if (kind is list or kind is tuple) and _leads(value, n_levels):
        entries = [_renewed(v, copies, n_levels - 1) for v in value]
        return value if _are_same(value, entries) else kind(entries)
    if kind is dict and _leads(value.values(), n_levels):
        entries = [_renewed(v, copies, n_levels - 1) for v in value.values()]
        is_same = _are_same(value.values(), entries)
        return value if is_same else dict(zip(value, entries, strict=True))
    return value


def _are_same(values: Iterable[Any], others: Iterable[Any]) -> bool:
    """Tell whether two containers hold the same objects; replicas share it then."""
    return all(map(operator.is_, values, others))


def _leads(values: Iterable[Any], n_levels: int) -> bool:
    """Tell whether a list or the values of a dict begin with a module or a tensor."""
    first = next(iter(values), None)
    if isinstance(first, dict):
        first, n_levels = first.values(), n_levels - 1
    elif not isinstance(first, (list, tuple)):
        return isinstance(first, (Module, torch.Tensor))
    return n_levels > 1 and _leads(first, n_levels - 1)
