"""Random numbers of replicas that share one process, and so its generators.

Replicas that draw side by side would draw other numbers in each run, so they run in
order.  Of torch's generator, replica 0 goes on with the caller's stream, as the plain
module would, and replica ``k`` has a stream of its own, from a seed that follows from
the state before the forward; of all others, each replica goes on where the one before
has ended.
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
_MT19937_BYTES = 624 * 4 + 4  # its key, and where in that it is


def run_in_order(calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], bool]:
    """Return what each replica's call returns, and whether any drew from the stream.

    The caller's stream is replica 0's.  A checkpoint that repeats the forward, from the
    same state, repeats the numbers.
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
    """Return what changes where any generator is used that a process has by itself.

    NumPy's is read in its memory, if it is of the usual kind: 1 us for 80.
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
    """Return the state of torch's generator, as a plain tensor under a transform too.

    torch makes it one of the transform's before 2.9.
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
