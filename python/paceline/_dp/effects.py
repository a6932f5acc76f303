"""What a forward does besides its output: random numbers drawn, parameters written.

Replicas that are threads share the module's parameters, and the generators of random
numbers.  The first forward of each combination of training flags is a trial: its
replicas run in order, each but replica 0 on copies of all parameters, and what they
draw and write is noted.  Later, replicas have copies of what is written alone, made
before the forward; replica 0 writes to the module's own.  So does torch's class, whose
replicas have copies of everything.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.nn import Module

from paceline import _native
from paceline._compat import torch_graph, torch_modes
from paceline._replicas import rng
from paceline._replicas.generators import generators_of
from paceline._replicas.replicate import (
    check_structure,
    check_thawed,
    copy_parameter,
    frozen,
    replicas_of,
    structure_of,
)

_log = logging.getLogger("paceline")

Seen = tuple[list[int | None] | list[int], ...]
Key = tuple[int, str]
"""The number of a part, and the name of one of its parameters."""


class Record:
    """What forwards of a module with certain training flags have done."""

    def __init__(self, uses_rng: bool, written: set[Key]) -> None:
        self.uses_rng = uses_rng
        self.written = written


_records: weakref.WeakKeyDictionary[Module, dict[bytes, Record]] = (
    weakref.WeakKeyDictionary()
)


def forget(module: Module) -> None:
    """Have the next forward of a module be a trial."""
    with suppress(TypeError):
        _records.pop(module, None)


class Forward:
    """One forward of a module's replicas in one process.

    `record` is what such a forward is known to do; None: this one is a trial.
    """

    def __init__(self, parts: list[Module]) -> None:
        flags = bytes(bool(part.training) for part in parts)
        self._key = flags + bytes((torch.is_grad_enabled(),))
        self._parts = parts
        try:
            self._records = _records.setdefault(parts[0], {})
        except TypeError:  # compares by value, has no hash: nothing is remembered
            self._records = {}
        self.record = self._records.get(self._key)
        self._parameters = [
            p for part in parts for p in part._parameters.values() if p is not None
        ]
        self._copies: list[dict[int, torch.Tensor]] = []
        self._frozen: list[torch.Tensor] = []
        self._structure = structure_of(parts)

    def replicas(self, n_replicas: int) -> list[Module]:
        """Return the module, and replicas with copies of what is written, or may be."""
        record = self.record
        ids: dict[int, torch.Tensor] = {id(p): p for p in self._parameters}
        if record is not None:
            named = self._named() if record.written else ()
            ids = {id(p): p for key, p in named if key in record.written}
        self._copies = [
            {key: copy_parameter(parameter) for key, parameter in ids.items()}
            for _ in range(n_replicas - 1)
        ]
        copied = (p for p in self._parameters if id(p) in ids)
        buffers = (b for part in self._parts for b in part._buffers.values())
        self._frozen = frozen((*copied, *buffers))
        return replicas_of(self._parts, self._copies)

    def check_kept(self) -> None:
        """Raise where a forward has made what other replicas have for themselves."""
        check_thawed(self._parts[0], self._frozen)
        check_structure(self._parts, self._structure)

    # ---- the two ways to run --------------------------------------------------------

    def run_in_order(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what each replica's call returns, one after the other."""
        if torch_modes.count_dispatch_modes():  # they would see what generators do
            return [call() for call in calls]
        if self.record is not None or torch_graph.is_transformed():
            with self._watched_parameters():
                return rng.run_in_order(calls)[0]
        trial = _Trial(self._parameters, self._copies)
        others = rng.other_streams()
        outputs, uses_rng = rng.run_in_order([trial.begins_with(calls[0]), *calls[1:]])
        if others != rng.other_streams():
            uses_rng = True
        if generators_of(self._parts):  # one that it seeds may look untouched
            uses_rng = True
        written = trial.end()
        keys = {key for key, p in self._named() if id(p) in written}
        self.record = Record(uses_rng, keys)
        self._records[self._key] = self.record
        return outputs

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notice what replicas draw and write that run side by side inside."""
        record = self.record
        assert record is not None
        before = rng.marks()
        with self._watched_parameters():
            yield
        if rng.marks() != before:
            record.uses_rng = True
            _log.warning(
                "a forward of DataParallel drew random numbers in replicas that ran "
                "side by side: from now on they run one after the other, so that runs "
                "can be repeated"
            )

    @contextmanager
    def _watched_parameters(self) -> Iterator[None]:
        """Raise where replicas write to a parameter that they share."""
        before = _stamps(self._parameters)
        yield
        after = _stamps(self._parameters)
        if after == before or self.record is None:
            return
        changed = {id(self._parameters[i]) for i in _differing(before, after)}
        keys = {key for key, p in self._named() if id(p) in changed}
        new = keys - self.record.written
        if not new:
            return
        for record in self._records.values():
            record.written |= new
        raise RuntimeError(
            f"the forward of DataParallel wrote to {self._names(new)}, which it had "
            "not done in its first call, and which its replicas share: each of them "
            "may have done so. From the next call on replicas have copies, and what "
            "replica 0 writes stays; load the parameter from a checkpoint, or set it "
            "anew, before you go on"
        )

    # ---- names ----------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[Key, torch.Tensor]]:
        for i, part in enumerate(self._parts):
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    yield (i, name), parameter

    def _names(self, keys: set[Key]) -> str:
        """Return the names that a set of parameters has in the module."""
        ids = {id(self._parts[i]._parameters[name]) for i, name in keys}
        named = self._parts[0].named_parameters()
        return ", ".join(f"'{name}'" for name, p in named if id(p) in ids)


class _Trial:
    """A first forward: what all parameters hold before and after."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], copies: list[dict[int, torch.Tensor]]
    ) -> None:
        self._parameters = parameters
        self._before = self._after_0 = _stamps_and_contents(parameters)
        self._copies = [[copy[id(p)] for p in parameters] for copy in copies]
        contents = self._before[-1]
        self._fresh = [(*_stamps(copy), contents) for copy in self._copies]

    def begins_with(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call of replica 0, which also notes what it has written."""

        def call_and_stamp() -> Any:
            output = call()
            self._after_0 = _stamps_and_contents(self._parameters)
            return output

        return call_and_stamp

    def end(self) -> set[int]:
        """Return the ``id`` of the parameters that some replica has written."""
        if _differing(self._after_0, _stamps_and_contents(self._parameters)):
            raise RuntimeError(
                "a replica of DataParallel wrote to the parameters of the module "
                "itself, and not to its copies: it reaches them by something else "
                "than attributes of modules, and lists and dicts there; hold them so, "
                "or call the module with one replica (device_ids=None)"
            )
        written = _differing(self._before, self._after_0)
        for copy, fresh in zip(self._copies, self._fresh, strict=True):
            written |= _differing(fresh, _stamps_and_contents(copy))
        return {id(self._parameters[i]) for i in written}


def _differing(before: Seen, after: Seen) -> set[int]:
    """Return the numbers of the tensors that are not as they were."""
    return {
        i
        for one, two in zip(before, after, strict=True)
        if one != two
        for i, pair in enumerate(zip(one, two, strict=True))
        if pair[0] != pair[1]
    }


def _stamps(tensors: Sequence[torch.Tensor]) -> Seen:
    """Return what changes with most writes: versions, and where the memory is.

    This takes some 150 ns a tensor.
    """
    try:
        return [t._version for t in tensors], [t.data_ptr() for t in tensors]
    except RuntimeError:  # a sparse one, one of inference mode, one of a transform
        return [_version(t) for t in tensors], [_address(t) for t in tensors]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _address(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None


def _stamps_and_contents(tensors: Sequence[torch.Tensor]) -> Seen:
    """Return the same, and a number for what each tensor holds.

    Versions do not tell what is written to ``.data``: so all bytes are read.
    """
    return *_stamps(tensors), [_content(tensor.detach()) for tensor in tensors]


def _content(tensor: torch.Tensor) -> int | None:
    try:
        return _native.tensor_hash(tensor)
    except (TypeError, ValueError):  # has holes, or a dtype of its own
        pass
    try:
        return _native.tensor_hash(tensor.contiguous().view(torch.uint8))
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None
