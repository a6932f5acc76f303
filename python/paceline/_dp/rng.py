"""Random numbers of replicas, which share the generators of one process.

Replicas that draw in parallel would draw other numbers in each run, so they run in
order.  From torch's generator, replica 0 draws the caller's stream, as the plain module
would; replica ``k`` has its own stream, with a seed derived from the state before the
forward.  In all other generators, each replica goes on where the previous one ended.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline._compat import torch_modes

_MOST_SEED = 2**63 - 1
_MT19937_BYTES = 624 * 4 + 4  # its key, and the position in it


def run_in_order(calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], bool]:
    """Return the output of each replica's call, and whether any drew from the stream.

    The caller's stream is replica 0's.  A checkpoint that repeats the forward from the
    same state draws the same numbers.
    """
    generator, before = torch.default_generator, stream()
    seed = int.from_bytes(hashlib.blake2b(before, digest_size=8).digest(), "little")
    outputs = [calls[0]()]
    draws, after = stream() != before, get_state()
    try:
        for k, call in enumerate(calls[1:]):
            generator.manual_seed((seed + k) & _MOST_SEED)
            before = stream()
            outputs.append(call())
            draws |= stream() != before
    finally:
        generator.set_state(after)
    return outputs, draws


def stream() -> bytes:
    """Return the state of torch's generator."""
    with torch_modes.without_transforms(), torch_modes.without_torch_function():
        return torch.default_generator.get_state().numpy().tobytes()


def marks() -> list[Any]:
    """Return values that change if any of the process's own generators is used.

    NumPy's usual generator is read from its memory, in 1 us instead of 80.
    """
    found: list[Any] = [stream(), random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        get = getattr(numpy.random, "get_bit_generator", None)  # of NumPy 1.24
        generator: Any = get() if get is not None else None
        if type(generator) is numpy.random.MT19937:
            address = generator.ctypes.state_address
            found.append(ctypes.string_at(address, _MT19937_BYTES))
        else:
            found.append(other_streams())
    return found


def get_state() -> torch.Tensor:
    """Return the state of torch's generator, as a plain tensor even in a transform.

    Before 2.9, torch returns a tensor of the transform.
    """
    with torch_modes.without_transforms():
        return torch.default_generator.get_state()


def other_streams() -> list[Any]:
    """Return the states of Python's and NumPy's generators."""
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states += [name, keys.tobytes(), *rest]
    return states
