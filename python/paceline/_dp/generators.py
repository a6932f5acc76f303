"""Generators of random numbers that a model holds or seeds.

A model may keep its own generator: as an attribute, in a list or dict, in an object
that an attribute holds, or as a global or closure variable that its code reads.
Replicas that share one must take turns, even if it looks unused: a forward may begin to
draw from it.  So must those that seed any generator, also the process's: if each call
does, the generator's state need not differ before and after.
"""

from __future__ import annotations

import builtins
import gc
import random
import sys
from collections.abc import Iterable
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module

from paceline._dp.replicate import OWN_KEYS

_LEVELS = 5
_MOST_ENTRIES = 256
_CLOSED = (str, bytes, int, float, type, ModuleType, torch.Tensor, Module)


def have_generator(parts: Iterable[Module]) -> bool:
    """Tell whether a model's attributes or code lead to a generator, or code seeds one.

    It may be torch's, Python's or NumPy's (a bit generator too), if it is not the
    process's own.
    """
    held: list[Any] = []
    kinds: dict[type, None] = {}
    for part in parts:
        held += (v for name, v in vars(part).items() if name not in OWN_KEYS)
        kinds.update(dict.fromkeys(type(part).__mro__))
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in ("torch", builtins.__name__):
            held += (v for name, v in vars(kind).items() if name != "__init__")
    return has_generator(*held)


def has_generator(*values: Any) -> bool:
    """Tell whether one of these values is a generator, leads to one or seeds one."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    shared = [torch.default_generator, getattr(random.random, "__self__", None)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        rng = numpy.random
        kinds += (rng.Generator, rng.RandomState, rng.BitGenerator)
        shared.append(getattr(rng.random_sample, "__self__", None))
    met: set[int] = set()
    level: Iterable[Any] = values
    for _ in range(_LEVELS):
        following: list[Any] = []
        for value in level:
            is_method = isinstance(value, (MethodType, BuiltinMethodType))
            value = value.__self__ if is_method else value
            if isinstance(value, kinds):
                is_shared = any(value is each for each in shared)
                if not (is_shared or isinstance(value, random.SystemRandom)):
                    return True
            elif not (is_method or id(value) in met or isinstance(value, _CLOSED)):
                if isinstance(value, FunctionType) and _seeds(value):
                    return True
                met.add(id(value))
                following += _held_by(value)
        level = following
    return False


def _held_by(value: Any) -> Iterable[Any]:
    """Return what a value holds; what a function reads from closures and globals.

    Of the functions that it names, include those of its own file, and others that seed.
    """
    if not isinstance(value, FunctionType):
        return islice(gc.get_referents(value), _MOST_ENTRIES)
    named = map(value.__globals__.get, _names_in(value.__code__))
    return gc.get_referents(*(value.__closure__ or ())) + [
        each
        for each in named
        if not isinstance(each, FunctionType)
        or each.__module__ == value.__module__
        or _seeds(each)
    ]


def _seeds(function: FunctionType) -> bool:
    names = _names_in(function.__code__)
    return "manual_seed" in names or {"random", "seed"} <= names


def _names_in(code: CodeType) -> set[str]:
    """Return all names in code, with those of its inner functions."""
    inner = (_names_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
