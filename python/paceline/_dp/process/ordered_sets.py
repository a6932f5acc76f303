"""Sets of numbers and strings, whose order a pickle does not keep.

In what order a set yields its members follows from their hashes, which for strings each
process has of its own, and from how the set has grown.  A forward that goes through one
does the same in a replica if it goes through it in the caller's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paceline._dp.process.watchable import ATOMS


def has_order(value: Any) -> bool:
    """Tell whether a value is a set of constants, of more than one."""
    return (
        type(value) in (set, frozenset)
        and len(value) > 1
        and all(map(_is_constant, value))
    )


def _is_constant(member: Any) -> bool:
    if type(member) is tuple:
        return all(type(inner) in ATOMS for inner in member)
    return type(member) in ATOMS


def made(is_frozen: bool, members: tuple[Any, ...]) -> Any:
    """Return a set that yields its members in this order."""
    plain: Any = frozenset(members) if is_frozen else set(members)
    if tuple(plain) == members:
        return plain
    return (_OrderedFrozenSet if is_frozen else _OrderedSet)(members)


class _OrderedFrozenSet(frozenset[Any]):
    def __new__(cls, members: tuple[Any, ...]) -> _OrderedFrozenSet:
        self = super().__new__(cls, members)
        self._order = members
        return self

    _order: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order)

    def __copy__(self) -> _OrderedFrozenSet:
        return self

    def __deepcopy__(self, memo: Any) -> _OrderedFrozenSet:
        return self

    def __reduce__(self) -> Any:  # the caller has the plain one
        return frozenset, (self._order,)


class _OrderedSet(set[Any]):
    """What comes later is behind the members that it was made with."""

    def __init__(self, members: Iterable[Any]) -> None:
        super().__init__(members)
        self._order = tuple(members)

    def __iter__(self) -> Iterator[Any]:
        known = dict.fromkeys(member for member in self._order if member in self)
        later = [] if len(known) == len(self) else super().__iter__()
        return iter([*known, *(member for member in later if member not in known)])

    def pop(self) -> Any:
        for member in self:
            self.remove(member)
            return member
        raise KeyError("pop from an empty set")

    def copy(self) -> _OrderedSet:
        return _OrderedSet(tuple(self))

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> _OrderedSet:
        return self.copy()

    def __reduce__(self) -> Any:  # the caller has the plain one
        return set, (list(self),)
