"""Generators of random numbers that a model holds or seeds.

A model may keep its own generator: as an attribute, in a list or dict, in an object
that an attribute holds, or as a global or closure variable that its code reads.
Replicas that share one must take turns, even if it looks unused: a forward may begin to
draw from it.  So must those that seed any generator, also the process's: if each call
does, the generator's state need not differ before and after.
"""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module

_OWN_KEYS = frozenset(Module().__dict__)
_LEVELS = 3
_MOST_ENTRIES = 256
_CLOSED = (str, bytes, int, float, type, ModuleType, torch.Tensor, Module)


def have_generator(parts: Iterable[Module]) -> bool:
    """Tell whether a model's attributes or code lead to a generator, or code seeds one.

    It may be torch's, Python's or NumPy's (a bit generator too), if it is not the
    process's own.
    """
    leads = _Search().leads
    kinds: dict[type, None] = {}
    for part in parts:
        values = (v for name, v in vars(part).items() if name not in _OWN_KEYS)
        if any(map(leads, values)):
            return True
        kinds.update(dict.fromkeys(type(part).__mro__))
    return any(
        leads(getattr(value, "__func__", getattr(value, "fget", value)))
        for kind in kinds
        if kind.__module__.partition(".")[0] not in ("torch", builtins.__name__)
        for name, value in vars(kind).items()
        if name != "__init__"
    )


def has_generator(*arguments: Any) -> bool:
    """Tell whether a forward's arguments hold a generator, even in a list or dict."""
    return any(map(_Search().leads, arguments))


class _Search:
    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._kinds: tuple[type, ...] = (torch.Generator, random.Random)
        self._shared = [torch.default_generator, _owner(random.random)]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            rng = numpy.random
            self._kinds += (rng.Generator, rng.RandomState, rng.BitGenerator)
            self._shared.append(_owner(rng.random_sample))

    def leads(self, value: Any, n_levels: int = _LEVELS) -> bool:
        """Tell whether a value is a generator or leads to one."""
        if isinstance(value, (MethodType, BuiltinMethodType)):
            value, n_levels = _owner(value), 0
        if isinstance(value, self._kinds):
            is_shared = any(value is each for each in self._shared)
            return not (is_shared or isinstance(value, random.SystemRandom))
        if n_levels == 0 or isinstance(value, _CLOSED):
            return False
        if isinstance(value, FunctionType):
            entries = self._read_by(value)
        else:
            entries = islice(_entries(value), _MOST_ENTRIES)
        return any(self.leads(entry, n_levels - 1) for entry in entries)

    def _read_by(self, function: FunctionType) -> Iterable[Any]:
        """Yield what it reads from closures and globals, with functions of its file."""
        if function.__code__ in self._codes:
            return
        self._codes.add(function.__code__)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is still empty
                yield cell.cell_contents
        stand_in = torch.Generator()  # for a generator that code seeds
        if _seeds(function):
            yield stand_in
        for name in _names_in(function.__code__):
            value = function.__globals__.get(name)
            is_elsewhere = getattr(value, "__module__", None) != function.__module__
            if not (isinstance(value, FunctionType) and is_elsewhere):
                yield value
            elif _seeds(value):
                yield stand_in


def _seeds(function: FunctionType) -> bool:
    names = _names_in(function.__code__)
    return "manual_seed" in names or {"random", "seed"} <= names


def _owner(method: Any) -> Any:
    return getattr(method, "__self__", None)


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, dict):
        return value.values()
    try:
        held = getattr(value, "__dict__", None)
    except Exception:  # a class may raise anything
        return ()
    return held.values() if isinstance(held, dict) else ()


def _names_in(code: CodeType) -> set[str]:
    """Return all names in code, with those of its inner functions."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
