"""Things that attributes hold: of which kind, with what in them, and how written into.

See ``_held.py``.
"""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

OWN_NAMES = frozenset(vars(nn.Module()))
_IN_MODULES = OWN_NAMES - {"_parameters", "_buffers", "_modules"}

_PLAIN = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type,
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodType,
        types.ModuleType,
        torch.dtype,
        torch.device,
        torch.Size,
    }
)
_CONTAINERS: dict[Any, str] = {
    dict: "dict",
    list: "list",
    tuple: "tuple",
    set: "set",
    collections.deque: "deque",
}
_ITERATORS: dict[str, Any] = {name: kind.__iter__ for kind, name in _CONTAINERS.items()}
_OBJECTS = frozenset({"module", "object", "whole"})
MAPPINGS = _OBJECTS | {"dict"}
_NEVER = (nn.parallel.DataParallel, type, types.ModuleType, enum.Enum)
_HEAP_TYPE = 1 << 9  # a class statement made it

Write = tuple[Any, str, Any]


def is_plain(value: Any) -> bool:
    """Tell whether a value is of a type that holds nothing: it need not be watched."""
    return type(value) in _PLAIN


def kind_of(value: Any) -> str | None:
    """Return what kind of thing a value is; None where there is nothing to watch."""
    kind = type(value)
    if kind in _PLAIN:
        return None
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]
    if issubclass(kind, torch.Tensor):
        return None if value.is_inference() else "tensor"
    for base, name in _CONTAINERS.items():
        if issubclass(kind, base):
            return name
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return "array"
    if issubclass(kind, _NEVER):
        return None
    if kind is types.SimpleNamespace:
        return "object"
    if not has_attributes(value):
        return None
    return "whole" if has_own_pickle(kind) else "object"


def has_attributes(value: Any) -> bool:
    """Tell whether a value is of a class that a script made, and holds attributes."""
    kind = type(value)
    if not kind.__flags__ & _HEAP_TYPE or not hasattr(kind, "__dict__"):
        return False
    try:
        return type(getattr(value, "__dict__", None)) is dict
    except Exception:  # a class may answer as it likes
        return False


def items_of(mapping: Any) -> Any:
    """Return a dictionary's items, whatever its class makes of ``items``."""
    return _kind_of_dict(mapping).items(mapping)


def _kind_of_dict(mapping: Any) -> Any:
    is_ordered = isinstance(mapping, collections.OrderedDict)
    return collections.OrderedDict if is_ordered else dict


def members_of(kind: str, value: Any) -> list[Any]:
    """Return the members of a list, tuple, set or deque."""
    return list(_ITERATORS[kind](value))


def has_own_pickle(kind: type) -> bool:
    """Tell whether instances choose what of them is pickled."""
    base = nn.Module if issubclass(kind, nn.Module) else object
    return any(
        getattr(kind, name, None) is not getattr(base, name, None)
        for name in ("__reduce__", "__reduce_ex__", "__getstate__")
    )


class Thing:
    """One thing, and who holds it.

    A container of a class of its own may hold attributes too: those are one more thing,
    `beside` it, of the same value and key.
    """

    __slots__ = (
        "beside",
        "cls",
        "depth",
        "holder",
        "key",
        "kind",
        "n_holders",
        "skipped",
        "slot",
        "value",
    )

    def __init__(self, value: Any, kind: str, holder: Thing | None) -> None:
        self.value, self.kind, self.holder = value, kind, holder
        self.depth: int = holder.depth + 1 if holder is not None else 0
        self.cls = type(value)
        self.skipped = frozenset[str]()  # names whose values are not looked at
        if kind == "module":
            self.skipped = OWN_NAMES
        elif kind == "object" and isinstance(value, nn.Module):  # not registered
            self.skipped = _IN_MODULES
        self.n_holders = 1
        self.slot = -1
        self.key: Any = None  # by which replicas know it
        self.beside: Thing | None = None
        if kind in _ITERATORS and has_attributes(value):
            self.beside = Thing(value, "object", holder)

    @property
    def target(self) -> Any:
        """What is mirrored."""
        return vars(self.value) if self.kind in _OBJECTS else self.value

    def members(self) -> list[Any]:
        """Return what it holds now, as far as that may be things."""
        if self.kind in ("tensor", "array", "whole"):
            return []
        if self.kind in MAPPINGS:
            held = self.values_of(self.target)
        else:
            held = members_of(self.kind, self.value)
        if self.kind == "module":
            held += self.value._forward_pre_hooks.values()
        if self.beside is not None:
            held += self.beside.members()
        return held

    def values_of(self, part: Any) -> list[Any]:
        """Return the values of a part of its members, as far as they may be things."""
        if self.kind not in MAPPINGS:
            return list(part)
        pairs = list(items_of(part))  # at once: another thread may write to it
        return [value for name, value in pairs if name not in self.skipped]

    def labels_of(self, value: Any) -> list[Any]:
        """Return the names, or the indices, under which it holds a value."""
        if self.kind in MAPPINGS:
            pairs: Iterable[tuple[Any, Any]] = list(items_of(self.target))
        else:
            pairs = enumerate(members_of(self.kind, self.value))
        return [label for label, member in pairs if member is value]


# ---- the replica's side -------------------------------------------------------------


def write(target: Any, kind: str, payload: Any) -> None:
    """Write into a replica's own thing what the caller's side has told."""
    if kind == "tensor":
        target.data = payload[0]
    elif kind == "array":
        if target.shape != payload[0].shape:
            target.resize(payload[0].shape, refcheck=False)
        target[...] = payload[0]
    elif kind == "set":
        set.clear(target)
        set.update(target, payload[0])
    elif kind == "list":
        begin, tail = payload
        list.__setitem__(target, slice(begin, None), tail)
    elif kind == "deque":
        begin, tail = payload
        left = members_of(kind, target)[:begin]
        collections.deque.clear(target)
        collections.deque.extend(target, left + tail)
    else:
        _write_entries(target if kind == "dict" else vars(target), *payload)


def _write_entries(
    target: dict[Any, Any], is_whole: bool, named: dict[Any, Any], removed: list[Any]
) -> None:
    kind = _kind_of_dict(target)
    if is_whole:
        kind.clear(target)
    for name in removed:
        if name in target:
            kind.__delitem__(target, name)
    kind.update(target, named)
