"""Generators of random numbers that a model holds, besides those of the process.

A model may keep its own generator: as an attribute, in a list or dict, in an object
that an attribute holds, or as a global or closure variable that its code reads.
Replicas that share one must take turns.
"""

from __future__ import annotations

import builtins
import functools
import random
import sys
from collections.abc import Iterable
from itertools import islice
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch.nn import Module

_OWN_KEYS = frozenset(Module().__dict__)
_LEVELS = 3
_MOST_ENTRIES = 256
_CLOSED = (str, bytes, int, float, type, ModuleType, torch.Tensor, Module)


def generators_of(parts: Iterable[Module]) -> list[Any]:
    """Return the generators that a model's attributes and its code lead to, each once.

    These are torch's, Python's and NumPy's (bit generators too), not the process's own.
    """
    search = _Search()
    kinds: dict[type, None] = {}
    for part in parts:
        for name, value in vars(part).items():
            if name not in _OWN_KEYS:
                search.visit(value, _LEVELS)
        kinds.update(dict.fromkeys(type(part).__mro__))
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in ("torch", builtins.__name__):
            search.visit_methods(kind)
    return list(search.found.values())


def has_generator(*arguments: Any) -> bool:
    """Tell whether a forward's arguments hold a generator, even in a list or dict."""
    search = _Search()
    for each in arguments:
        search.visit(each, _LEVELS)
    return bool(search.found)


class _Search:
    def __init__(self) -> None:
        self.found: dict[int, Any] = {}
        self._codes: set[CodeType] = set()
        self._kinds: tuple[type, ...] = (torch.Generator, random.Random)
        self._shared = {id(torch.default_generator), id(_owner(random.random))}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            rng = numpy.random
            self._kinds += (rng.Generator, rng.RandomState, rng.BitGenerator)
            self._shared.add(id(_owner(rng.random_sample)))

    def visit(self, value: Any, n_levels: int) -> None:
        """Add the generators that a value leads to."""
        if isinstance(value, self._kinds):
            if id(value) not in self._shared and not isinstance(
                value, random.SystemRandom
            ):
                self.found[id(value)] = value
        elif isinstance(value, (MethodType, BuiltinMethodType)):
            if isinstance(_owner(value), self._kinds):
                self.visit(_owner(value), 0)
        elif isinstance(value, FunctionType):
            self._visit_function(value, n_levels)
        elif n_levels and not isinstance(value, _CLOSED):
            for entry in islice(_entries(value), _MOST_ENTRIES):
                self.visit(entry, n_levels - 1)

    def visit_methods(self, kind: type) -> None:
        """Add the generators that the methods of a class read."""
        for value in vars(kind).values():
            method = getattr(value, "__func__", getattr(value, "fget", value))
            self.visit(method, _LEVELS)

    def _visit_function(self, function: FunctionType, n_levels: int) -> None:
        """Add what it reads from globals and closures; functions there are followed."""
        if function.__code__ in self._codes or not n_levels:
            return
        self._codes.add(function.__code__)
        for cell in function.__closure__ or ():
            self.visit(contents_of(cell), n_levels - 1)
        for name in names_of(function.__code__):
            value = function.__globals__.get(name)
            is_elsewhere = getattr(value, "__module__", None) != function.__module__
            if not (isinstance(value, FunctionType) and is_elsewhere):
                self.visit(value, n_levels - 1)


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


@functools.lru_cache(1 << 14)
def names_of(code: CodeType) -> frozenset[str]:
    """Return all names in code, with those of its inner functions."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_of(constant)
    return frozenset(names)


def contents_of(cell: CellType) -> Any:
    """Return the contents of a closure's cell; None if it is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
