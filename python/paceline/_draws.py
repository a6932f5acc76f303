"""Random numbers of replicas that share one process, and so one generator.

Replicas that draw side by side would draw other numbers in each run.  So a forward that
draws runs its replicas in order: replica 0 goes on with the caller's stream, as the
plain module would, and replica ``k`` has a stream of its own, from a seed that follows
from the state before the forward.  Worker processes get these seeds, and stir them by
their inputs.  Whether a forward draws is seen in its first run for each combination of
training flags.
"""

from __future__ import annotations

import logging
import random
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module

from paceline import _native
from paceline._protocol import MOST_SEED
from paceline._state import has_dispatch_modes

_log = logging.getLogger("paceline")
_known_draws: weakref.WeakKeyDictionary[Module, dict[bytes, bool]] = (
    weakref.WeakKeyDictionary()
)


class Drawing:
    """Whether forwards of a module draw random numbers, by its training flags.

    Parameters
    ----------
    parts : list of torch.nn.Module
        The module first, then all its parts.

    Attributes
    ----------
    key : bytes
        The flags.
    """

    def __init__(self, parts: list[Module]) -> None:
        flags = bytes(bool(part.training) for part in parts)
        self.key = flags + bytes((torch.is_grad_enabled(),))
        try:
            self._known = _known_draws.setdefault(parts[0], {})
        except TypeError:  # compares by value, has no hash: nothing is remembered
            self._known = {}

    @property
    def may_draw(self) -> bool:
        """Whether a forward like this one has drawn, or none was seen yet."""
        return self._known.get(self.key, True)

    def run_in_order(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what each replica's call returns; the caller's stream is replica 0's.

        A checkpoint that repeats the forward, from the same state, repeats the numbers.
        """
        if has_dispatch_modes():  # which would see what is done to the generator
            return [call() for call in calls]
        generator = torch.default_generator
        others = None if self.key in self._known else _other_streams()
        seed = _stream()
        outputs = [calls[0]()]
        has_drawn = _stream() != seed
        after = generator.get_state()
        try:
            for k, call in enumerate(calls[1:]):
                generator.manual_seed((seed + k) & MOST_SEED)
                fresh = _stream()
                outputs.append(call())
                has_drawn = has_drawn or _stream() != fresh
        finally:
            generator.set_state(after)
        if others is not None:
            self._known[self.key] = has_drawn or _other_streams() != others
        return outputs

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice where replicas draw that run side by side inside."""
        before = _stream()
        yield
        if _stream() != before:
            self._known[self.key] = True
            _log.warning(
                "a forward of DataParallel drew random numbers in replicas that ran "
                "side by side: from now on they run one after the other, so that runs "
                "can be repeated"
            )


def _stream() -> int:
    """Return a number that stands for the state of torch's generator."""
    return _native.fingerprint(torch.default_generator.get_state())


def _other_streams() -> list[Any]:
    """Return the states of Python's and NumPy's generators."""
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state(legacy=True)
        states += [name, keys.tobytes(), *rest]
    return states


class OtherGenerators:
    """Python's and NumPy's generators, of which few modules draw.

    The caller tells its replicas a number that follows from their states, and each
    replica seeds its own by it.  That costs 30 us: whether a module needs it is seen in
    its first forward in training, and in evaluation.
    """

    def __init__(self) -> None:
        self._draws: dict[bool, bool] = {}
        self._fresh: list[Any] | None = None

    def salt(self, training: bool) -> int:
        """Return a number for the forward to come; 0 where it does not draw."""
        self._fresh = None
        if not self._draws.get(training, True):
            return 0
        states = _other_streams()
        if training not in self._draws:
            self._fresh = states
        return zlib.crc32(repr(states).encode()) + 1

    def seed(self, training: bool, salt: int) -> None:
        """Seed this process's, as the caller's are."""
        self._fresh = None
        if not self._draws.get(training, True):
            return
        random.seed(salt)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(salt % 2**32)
        if training not in self._draws:
            self._fresh = _other_streams()

    def note(self, training: bool) -> None:
        """See, after a first forward, whether it has drawn."""
        if self._fresh is not None:
            self._draws[training] = _other_streams() != self._fresh
            self._fresh = None
