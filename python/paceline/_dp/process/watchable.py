"""What shows whether an object changes; and which objects nobody can watch."""

from __future__ import annotations

import copyreg
import pickle
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from paceline._replicas.errors import UnsupportedModelError
from paceline._replicas.generators import kinds_of_generators

_IMMUTABLE_TYPE = 1 << 8  # no class statement sets it
_HEAP_TYPE = 1 << 9  # nor leaves this out; types written in C may have both
_CONTAINERS = (list, dict, set, deque, bytearray, array)


ATOMS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        type(...),
        torch.dtype,
        torch.device,
        torch.Size,
    }
)
"""Types whose values hold nothing, and never change."""


class _Named(NamedTuple):
    field: Any


_CONSTANTS: tuple[type, ...] = (
    tuple,
    frozenset,
    range,
    slice,
    property,
    staticmethod,
    classmethod,
    pickle.PickleBuffer,
    types.BuiltinFunctionType,
    types.CellType,
    types.CodeType,
    types.GenericAlias,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.MethodType,
    types.MethodWrapperType,
    types.UnionType,
    types.WrapperDescriptorType,
    type(vars(_Named)["field"]),  # what a named tuple's class holds
    torch.layout,
    torch.memory_format,
    torch.qscheme,
    torch.finfo,
    torch.iinfo,
)
_SHOWN = (
    *_CONTAINERS,
    *_CONSTANTS,
    str,
    int,
    float,
    complex,
    bytes,
    type,
    BaseException,
    types.FunctionType,
    types.MappingProxyType,
    types.ModuleType,
    types.SimpleNamespace,
)
"""Types written in C whose objects hide nothing that changes; nor do subclasses'."""
_HOMES_OF_CONSTANTS = frozenset(
    {
        "_operator",
        "_struct",
        "datetime",
        "decimal",
        "functools",
        "numpy",
        "operator",
        "re",
        "typing",
        "zoneinfo",
    }
)
"""Modules whose types, where they have no attributes, do not change."""


def is_generator(value: Any) -> bool:
    """Tell whether a value is a generator of random numbers with a state of its own."""
    return isinstance(value, kinds_of_generators())


class _Slots:
    """Iterates over what an object holds in ``__slots__``."""

    def __init__(self, value: Any, names: list[str]) -> None:
        self._value, self._names = value, names

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self._value, name, None) for name in self._names])


class _Pairs:
    """Iterates over the keys and values of a mapping that may be read alone."""

    def __init__(self, value: types.MappingProxyType[Any, Any]) -> None:
        self._value = value

    def __iter__(self) -> Iterator[Any]:
        return iter([part for pair in self._value.items() for part in pair])


def cache_slot_names(kind: type) -> None:
    """Have a class hold what the pickler notes in it, before it is watched."""
    copyreg._slotnames(kind)  # type: ignore[attr-defined]


def watchable(value: Any) -> list[tuple[Any, Any]]:
    """Return the objects that show whether a value changes, and whose attributes.

    Raise where nothing shows it.
    """
    kind = type(value)
    if is_generator(value):
        raise UnsupportedModelError(
            f"it holds a random generator ({kind.__module__}.{kind.__qualname__}), of "
            "which each replica would have the same numbers"
        )
    found: list[tuple[Any, Any]] = []
    if isinstance(value, torch.Tensor):
        return [(value, None)]
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    if isinstance(value, _CONTAINERS) or (is_array and not value.dtype.hasobject):
        found.append((value, None))
    if isinstance(value, types.MappingProxyType):  # a dataclass has some in its class
        found.append((_Pairs(value), None))
    held = getattr(value, "__dict__", None)
    if type(held) is dict and not isinstance(value, type):
        found.append((held, value))
    names = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    if names:
        found.append((_Slots(value, names), None))
    base = next(k for k in kind.__mro__ if not _is_python(k))
    is_shown = base is object or issubclass(base, _SHOWN)
    is_constant = base.__module__.partition(".")[0] in _HOMES_OF_CONSTANTS
    is_opaque = is_array and value.dtype.hasobject
    if is_opaque or not (is_shown or is_constant):
        raise UnsupportedModelError(
            f"it holds a {kind.__module__}.{kind.__qualname__}, of which nobody can "
            "tell whether it changes"
        )
    return found


def _is_python(kind: type) -> bool:
    """Tell whether a class is written in Python: what it adds shows."""
    return kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE
