"""Guards the module while its replicas run in order on the caller's thread.

A replica that reaches the module by anything but its attributes would write to it once
more, for its own rows: that is an error.  A registry of layers in a class is not an
attribute; it holds the replica's parts while that replica runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from paceline import _native
from paceline._dp.replicate import Entries, name_of, parts_of

Lists = list[tuple[type, str, list[Any]]]
"""Lists of classes that hold parts: class, name and list."""


class Originals:
    """The module's tensors and attributes, which later replicas must leave alone."""

    def __init__(self, parts: list[Module]) -> None:
        self._parts = parts
        self._tensors: list[torch.Tensor | None] = []
        self._versions: dict[int, int] = {}
        self._attributes: list[dict[str, Any]] = []

    def look(self) -> None:
        """Note their present state."""
        self._tensors = Entries.of(self._parts).values
        self._versions = _versions(self._tensors)
        self._attributes = [part.__dict__.copy() for part in self._parts]

    def check(self, k: int) -> None:
        """Raise if replica `k` changed them."""
        versions = _versions(Entries.of(self._parts).values)
        if versions != self._versions:
            written = dict(versions.items() - self._versions.items())
            name = name_of(self._parts[0], written)
        else:
            now, before = [p.__dict__ for p in self._parts], self._attributes
            for i in _native.differing(now, before, self):
                if not _is_same(now[i], before[i]):
                    name = f"an attribute of a {type(self._parts[i]).__name__}"
                    break
            else:
                return
        raise RuntimeError(
            f"replica {k} of DataParallel wrote to {name} in the module itself, not in "
            "its own copy: it reaches the module by something other than attributes, "
            "lists and dicts (a lambda over self, a registry, an optimizer), or "
            "another thread wrote to it. Use self in forward instead, or call the "
            "module without DataParallel"
        )


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Tell whether a part holds the same objects, or equal ones."""
    try:
        return now == before
    except Exception:  # tensors and arrays do not compare to one bool
        return False


def _versions(tensors: list[torch.Tensor | None]) -> dict[int, int]:
    """Return the version of each tensor; inference tensors have none, so return 0."""
    try:
        return {id(t): t._version for t in tensors if t is not None}
    except RuntimeError:
        held = (t for t in tensors if t is not None)
        return {id(t): 0 if t.is_inference() else t._version for t in held}


# ---- lists of classes ---------------------------------------------------------------


def lists_of_classes(parts: list[Module]) -> Lists:
    """Return lists in the parts' classes that hold parts, as a registry of layers does.

    snntorch uses one to reset the hidden states of all layers.
    """
    kinds = {kind for of in set(map(type, parts)) for kind in of.__mro__[:-1]}
    own_kinds = (kind for kind in kinds if not kind.__module__.startswith("torch."))
    ids = set(map(id, parts))
    return [
        (kind, name, value)
        for kind in own_kinds
        for name, value in vars(kind).items()
        if type(value) is list and not ids.isdisjoint(map(id, value))
    ]


def of_replica(lists: Lists, parts: list[Module], replica: Module) -> Lists:
    """Return the same lists with a replica's parts in place of the module's."""
    if not lists or replica is parts[0]:
        return []
    pairs = zip(parts, parts_of(replica), strict=True)
    stand_in = {id(part): own for part, own in pairs}
    return [
        (kind, name, [stand_in.get(id(entry), entry) for entry in value])
        for kind, name, value in lists
    ]


def put(lists: Lists) -> Lists:
    """Put these lists into their classes; return the lists that were there."""
    before = [(kind, name, getattr(kind, name)) for kind, name, _ in lists]
    for kind, name, value in lists:
        setattr(kind, name, value)
    return before
