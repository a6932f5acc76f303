"""Random numbers of replicas, which share the generators of one process.

Replicas that draw from one generator in parallel would draw other numbers in each run,
so they run in order, and each goes on where the one before has stopped, as if the
module were called on each part.  Nothing sets the state of a generator on the CPU: to
another thread that draws from it, replicas are a plain module.

Each GPU has its own generator, but ``torch.manual_seed`` gives all of them one seed,
and so the same numbers.  :func:`seed_apart` ends that.

A model may keep its own generator: as an attribute, in a list or dict, in an object
that an attribute holds, or as a global or closure variable that its code reads.
Replicas that share one must take turns, even if it looks unused: a forward may begin to
draw from it.  So must those that seed any generator, also the process's: if each call
does, the generator's state need not differ before and after.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import hashlib
import random
import sys
import threading
from collections.abc import Iterable
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn import Module

from paceline._compat import torch_modes
from paceline._dp.replicate import OWN_KEYS

_MT19937_BYTES = 624 * 4 + 4  # its key, and the position in it
_seeding = threading.Lock()
_LEVELS = 5
_MOST_ENTRIES = 256
_CLOSED = (str, bytes, int, float, type, ModuleType, torch.Tensor, Module)


def seed_apart(generators: Iterable[torch.Generator]) -> None:
    """Give a new seed to each generator that has the seed of an earlier one.

    It is derived from the generator's state and number, and stays, as if the program
    had seeded its GPUs differently.  So the numbers go on from call to call and into
    the backward, and nothing undoes what another thread does with the generator.
    """
    generators = list(generators)
    if len({g.initial_seed() for g in generators}) == len(generators):
        return
    seeds = set()
    with _seeding:
        for k, generator in enumerate(generators):
            if generator.initial_seed() in seeds:
                key = state_of(generator) + bytes((k,))
                digest = hashlib.blake2b(key, digest_size=7).digest()
                generator.manual_seed(int.from_bytes(digest, "little"))
            seeds.add(generator.initial_seed())


def state_of(generator: torch.Generator) -> bytes:
    """Return a generator's state, unseen by modes and transforms."""
    if torch_modes.has_transform() or torch_modes.function_modes():
        with torch_modes.without_transforms(), torch_modes.without_torch_function():
            return _bytes_of(generator)
    return _bytes_of(generator)  # no context that Ctrl-C could leave on


def _bytes_of(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def marks(generators: Iterable[torch.Generator] = ()) -> list[Any]:
    """Return values that change if one of these or the process's generators is used.

    NumPy's usual generator is read from its memory, in 1 us instead of 80.
    """
    found = [*map(state_of, (torch.default_generator, *generators)), random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        get = getattr(numpy.random, "get_bit_generator", None)  # of NumPy 1.24
        generator: Any = get() if get is not None else None
        if type(generator) is numpy.random.MT19937:
            address = generator.ctypes.state_address
            found.append(ctypes.string_at(address, _MT19937_BYTES))
        else:
            name, keys, *rest = numpy.random.get_state(legacy=True)
            found += [name, keys.tobytes(), *rest]
    return found


def have_generator(parts: Iterable[Module], others: tuple[type, ...] = ()) -> bool:
    """Tell whether a model's attributes or code lead to a generator, or code seeds one.

    It may be torch's, Python's or NumPy's (a bit generator too), if it is not the
    process's own.  Objects of the types `others` count as generators.
    """
    held: list[Any] = []
    kinds: dict[type, None] = {}
    for part in parts:
        held += (v for name, v in vars(part).items() if name not in OWN_KEYS)
        kinds.update(dict.fromkeys(type(part).__mro__))
    for kind in kinds:
        if kind.__module__.partition(".")[0] not in ("torch", builtins.__name__):
            held += (v for name, v in vars(kind).items() if name != "__init__")
    return has_generator(*held, others=others)


def has_generator(*values: Any, others: tuple[type, ...] = ()) -> bool:
    """Tell whether one of these values is a generator, leads to one or seeds one."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random, *others)
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
