"""Random numbers of replicas, which share the generators of one process.

Replicas that draw from one generator in parallel would draw other numbers in each run,
so they run in order, and each goes on where the one before has stopped, as if the
module were called on each part.  Nothing sets the state of a generator on the CPU: to
another thread that draws from it, replicas are a plain module.

Each GPU has its own generator, but ``torch.manual_seed`` gives all of them one seed,
and so the same numbers.  :func:`seed_apart` ends that.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
import threading
from collections.abc import Iterable
from typing import Any

import torch

from paceline._compat import torch_modes

_MT19937_BYTES = 624 * 4 + 4  # its key, and the position in it
_seeding = threading.Lock()


def seed_apart(generators: Iterable[torch.Generator]) -> None:
    """Give a new seed to each generator that has the seed of an earlier one.

    It is derived from the generator's state and number, and stays, as if the program
    had seeded its GPUs differently.  So the numbers go on from call to call and into
    the backward, and nothing undoes what another thread does with the generator.
    """
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
    with torch_modes.without_transforms(), torch_modes.without_torch_function():
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
