"""Replicas of a module: shells with copies of its parameters and buffers.

A replica is like one of torch's ``replicate``, but its parameters are real ones:
``next(self.parameters())`` works in its forward.  So it lacks ``_is_replica``, which
tells code for torch's replicas to look for parameters in ``__dict__``.  A second
reference there would hide the tensors that ``functional_call`` puts in.

If an attribute refers to a part or parameter of the module, the replica's attribute
refers to its own one.  The reference may also be a bound method, or be in a list, dict,
partial or weak reference.
"""

from __future__ import annotations

import copyreg
import itertools
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from paceline import _native
from paceline._compat import torch_core, torch_graph, torch_modes

OWN_KEYS = frozenset(Module().__dict__)
HOOKS = tuple(name for name in sorted(OWN_KEYS) if "ward_" in name and "hooks" in name)
"""Hooks of forward and backward: each replica registers and removes its own."""


def parts_of(module: Module) -> list[Module]:
    """Return the module and all its parts, each once, in the order of registration."""
    parts = {id(module): module}
    _collect(module, parts)
    return list(parts.values())


def _collect(module: Module, parts: dict[int, Module]) -> None:
    for child in module._modules.values():
        if child is not None and id(child) not in parts:
            parts[id(child)] = child
            if child._modules:
                _collect(child, parts)


class Entries(NamedTuple):
    """What dictionaries of a model's parts hold at one moment, part by part.

    A call in another thread may put other tensors into the model at any time.

    Attributes
    ----------
    sizes : list of int
        Of each dictionary, the number of its entries.
    names, values : list
        Those of all dictionaries.
    """

    sizes: list[int]
    names: list[str]
    values: list[Any]

    @classmethod
    def of(cls, parts: list[Module], *kinds: str) -> Entries:
        """Return the present ones: by default, parameters and buffers."""
        return cls(*_native.items(parts, kinds or ("_parameters", "_buffers")))

    def dicts(self) -> list[dict[str, Any]]:
        """Return a copy of each dictionary."""
        pairs = zip(self.names, self.values, strict=True)
        return [dict(itertools.islice(pairs, size)) for size in self.sizes]

    def ids(self) -> list[int]:
        """Return the ``id`` of each value."""
        return list(map(id, self.values))

    def by_id(self) -> dict[int, Any]:
        """Return all values but None, each once, by their ids."""
        return {id(value): value for value in self.values if value is not None}

    def are_as(self, others: Entries) -> bool:
        """Tell whether these are the same objects under the same names."""
        return (
            self.sizes == others.sizes
            and self.names == others.names
            and all(map(operator.is_, self.values, others.values))
        )


def alone_because(module: torch.nn.Module) -> str | None:
    """Return why replicas cannot compute what the module does, or None."""
    parts = parts_of(module)
    for part in parts:
        if isinstance(part, (Embedding, EmbeddingBag)) and part.max_norm is not None:
            return (
                f"a {type(part).__name__} has max_norm: each call writes to those rows "
                "of its weight that the batch uses"
            )
    held = Entries.of(parts).values
    if any(t is not None and t.is_inference() for t in held):
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


Bring = Callable[[torch.Tensor], torch.Tensor]
"""Returns an attribute's tensor on a replica's device: itself, or a copy."""


def as_original(copy: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Make a copy of its original's kind: a parameter of that class, or a buffer.

    The copy of a parameter becomes a leaf if it has no graph.
    """
    kind = type(original)
    if kind is torch.Tensor and not original.__dict__:
        return copy
    if kind is Parameter or isinstance(original, Parameter):
        if copy.is_leaf:
            copy = Parameter(copy, original.requires_grad)
        if type(copy) is not kind:
            copy.__class__ = kind
    if original.__dict__:
        copy.__dict__.update(original.__dict__)
    return copy


def replica_of(
    parts: list[Module],
    entries: Sequence[dict[str, Any]],
    tensors: dict[int, torch.Tensor],
    bring: Bring,
) -> Module:
    """Return a further replica; `tensors` are its copies, by the originals' ``id``.

    The `entries` are each part's parameters, then its buffers.
    """
    shells = {id(part): shell_of(part) for part in parts}
    copies: dict[int, Any] = {**shells, **tensors}
    for i, part in enumerate(parts):
        copy, own = copies[id(part)], entries[2 * i : 2 * i + 2]
        if isinstance(part, torch.jit.ScriptModule):
            _fill_script(part, copy, own, copies)
        else:
            fill(part, copy, own, copies, bring)
    return shells[id(parts[0])]


def shell_of(part: Module) -> Module:
    kind = part.__class__  # the module's, even if `part` is a weak proxy
    method: Callable[[Module], Module] = kind._replicate_for_data_parallel
    if method is torch_core.PLAIN_COPY or isinstance(part, torch.fx.GraphModule):
        copy = object.__new__(kind)
        held = copy.__dict__
        held.update(part.__dict__)  # assigning __dict__ would run Module.__setattr__
        return copy
    check_lazy((part,))
    copy = method(part)  # overridden by an RNN, a script or the user
    copy.__dict__.pop("_is_replica", None)
    return copy


def is_replica(module: Module) -> bool:
    """Tell whether a module is part of a replica with its own tensors."""
    return module.__dict__.get("zero_grad") is _zero_nothing


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


def name_of(module: Module, keys: Collection[int]) -> str:
    """Return the name of one of these tensors in a module, and its part's class."""
    for prefix, part in module.named_modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if id(tensor) in keys:
                    path = f"{prefix}.{name}" if prefix else name
                    return f"'{path}' (of a {type(part).__name__})"
    return "a removed tensor"


class Trained:
    """The parameters of replicas before a forward, to find those that it makes.

    Each replica makes its own, and that of replica 0 would be trained by its own rows
    alone.  If a new parameter takes the place of an old one, replica 0's stays, as
    statistics of a batch norm do, but no gradient may arrive for it.
    """

    def __init__(self, replicas: Sequence[Any]) -> None:
        self._parts = [parts_of(r) if isinstance(r, Module) else [] for r in replicas]
        self._held = list(map(_held_by_each, self._parts))
        held = (p for p in self._held[0].values if isinstance(p, torch.Tensor))
        self._trained = [p for p in held if p.requires_grad]
        self._n_hooks = self._count_hooks()

    def _count_hooks(self) -> list[int]:
        return [len(p._backward_hooks or ()) for p in self._trained]

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise if replicas made parameters, or added hooks to those of replica 0.

        Such a hook would receive the gradient of all replicas.
        """
        for k, (parts, held) in enumerate(zip(self._parts, self._held, strict=True)):
            if not held.are_as(_held_by_each(parts)):
                self._check_new(k, outputs[k])
        more = map(operator.gt, self._count_hooks(), self._n_hooks)
        p = next(itertools.compress(self._trained, more), None)
        if p is not None:
            raise RuntimeError(
                "a forward of DataParallel has registered a hook on "
                f"{name_of(self._parts[0][0], [id(p)])} in each replica: register it "
                "before the forward, to get the gradient of the whole batch"
            )

    def _check_new(self, k: int, output: Any) -> None:
        parts, held = self._parts[k], self._held[k].dicts()[::2]
        before = dict(zip(map(id, parts), held, strict=True))
        known = {id(p) for each in held for p in each.values()}
        for part in parts_of(parts[0]):
            for name, p in part._parameters.items():
                if p is None or not p.requires_grad or id(p) in known:
                    continue
                where = f"the parameter '{name}' of {type(part).__name__}"
                if before.get(id(part), {}).get(name) is None:
                    raise RuntimeError(
                        f"a forward of DataParallel has made {where}: each replica "
                        "trains its own; make it in __init__ or, if only the first "
                        "forward makes it, run the bare module once on a small batch "
                        "before you wrap it"
                    )
                if k == 0:
                    _refuse_gradient(p, where, output)
                else:  # it goes with its replica
                    p.register_hook(partial(_refuse, where))  # type: ignore[no-untyped-call]


def _held_by_each(parts: list[Module]) -> Entries:
    """Return the parameters of each part, and its children."""
    return Entries.of(parts, "_parameters", "_modules")


def _refuse(where: str, grad: torch.Tensor | None) -> None:
    if grad is not None:
        raise RuntimeError(
            f"a gradient has arrived for {where}, which a forward of DataParallel has "
            "replaced: each replica has its own; write to the old one instead, by "
            "p.data.copy_(new), or use the new one detached"
        )


def _refuse_gradient(p: Parameter, where: str, output: Any) -> None:
    """Have a backward raise if it has a gradient for a parameter of replica 0.

    Later forwards train the parameter, so hooks on this forward's graph watch it.
    """
    for node, i in torch_graph.edges_to(p, _native.flatten(output)[1]):
        node.register_hook(lambda grads, _, i=i: _refuse(where, grads[i]))


def fill(
    part: Module,
    copy: Module,
    tensors: Sequence[dict[str, Any]],
    copies: dict[int, Any],
    bring: Bring,
) -> None:
    held = copy.__dict__
    kinds = "_parameters", "_buffers", "_modules"
    for kind, of in zip(kinds, (*tensors, part._modules), strict=True):
        entries = held[kind] = of.copy()
        for name, entry in entries.items():
            if entry is not None:
                # A part that another thread's call has just put here is shared.
                entries[name] = copies.get(id(entry), entry)
    held["zero_grad"] = _zero_nothing
    for name in HOOKS:
        hooks = held.get(name)
        held[name] = OrderedDict()
        if hooks:
            held[name].update(hooks_of(hooks, copies, bring))
    held.pop("_compiled_call_impl", None)  # of part.compile(): calls the original
    for name in held.keys() - OWN_KEYS:
        value = held[name]
        if type(value) not in CONSTANTS:
            held[name] = renewed(value, copies, bring)
    for name in copyreg._slotnames(part.__class__):  # type: ignore[attr-defined]
        if hasattr(part, name):
            object.__setattr__(copy, name, renewed(getattr(part, name), copies, bring))
    if "dynamo_ctx" in held:  # torch.compile(part): its forward calls the original
        copy._initialize()  # type: ignore[operator]


def hook_dicts(attributes: Iterable[dict[str, Any]]) -> list[dict[Any, Any]]:
    """Return the dictionaries of hooks of forward and backward among attributes."""
    hooks = (held.get(name) for held in attributes for name in HOOKS)
    return [each for each in hooks if each is not None]


def hooks_of(
    hooks: dict[Any, Any], copies: dict[int, Any], bring: Bring
) -> dict[Any, Any]:
    """Return a part's hooks for its replica."""
    return {key: renewed(hook, copies, bring) for key, hook in hooks.items()}


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
    tensors: Sequence[dict[str, Any]],
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
    for of in tensors:
        for name, tensor in of.items():
            if tensor is not None:
                setattr(copy, name, copies[id(tensor)])


_LEVELS = 3
_DICTS = (dict, OrderedDict)
CONTAINERS = (list, tuple, *_DICTS)
CONSTANTS = frozenset((int, bool, float, str, type(None)))


def renewed(
    value: Any, copies: dict[int, Any], bring: Bring, n_levels: int = _LEVELS
) -> Any:
    """Return the replica's value of an attribute; most values are the same.

    The first entry of a list or dict that is not None decides whether its entries are
    renewed, so a list of a million strings is not searched.  All replicas share values
    that hold nothing of the module, and no tensor on another device.
    """
    if isinstance(value, (Module, torch.Tensor)):
        own = copies.get(id(value))
        if own is None:
            return bring(value) if isinstance(value, torch.Tensor) else value
        return own
    kind = type(value)
    if kind is MethodType:
        owner = copies.get(id(value.__self__))
        return value if owner is None else MethodType(value.__func__, owner)
    if kind is weakref.ref:
        own = copies.get(id(value()))
        return value if own is None else weakref.ref(own)
    if kind is partial:
        given = [value.func, *value.args, *value.keywords.values()]
    elif kind in CONTAINERS and leads(value, n_levels):
        given = list(value.values() if kind in _DICTS else value)
    else:
        return value
    gpus = {v.device for v in given if isinstance(v, torch.Tensor) and not v.is_cpu}
    if len(gpus) > 1:  # replicas fill it: they share it
        bring = _as_it_is
    entries = [renewed(v, copies, bring, n_levels - 1) for v in given]
    if all(map(operator.is_, given, entries)):
        return value
    if kind is partial:
        function, *args = entries[: 1 + len(value.args)]
        named = zip(value.keywords, entries[1 + len(value.args) :], strict=True)
        return partial(function, *args, **dict(named))
    return kind(zip(value, entries, strict=True) if kind in _DICTS else entries)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def leads(value: Any, n_levels: int = _LEVELS) -> bool:
    """Tell whether a list, or a dict's values, begin with a module or a tensor."""
    entries = value.values() if isinstance(value, dict) else value
    first = next((entry for entry in entries if entry is not None), None)
    if not isinstance(first, CONTAINERS):
        return isinstance(first, (Module, torch.Tensor))
    n_levels -= isinstance(first, dict)  # its values are one level more
    return n_levels > 1 and leads(first, n_levels - 1)
