"""The code of a model: what its functions read, what of it has changed, who lacks it.

A forward depends on more than its module: on its class's methods, on the functions that
these call, on globals and cells.  The caller finds them once (:class:`Code`) by the
names that functions mention, watches them, and tells replicas what differs:

data           a number, a tensor, a list of them: the global is assigned in every
               replica, also where the list was changed in place
code           functions, classes: the model is told anew, by value
imported code  replicas have imported it for themselves, maybe another state of it; the
               caller tells digests, the replicas whose differ, and the caller sends its
               own (``_imports.py``)

Libraries (what is installed, and torch) are looked at no further than the methods of
the model's own classes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from paceline import _native, _things, _torch_ops, _travel
from paceline._imports import (
    Entry,
    Missing,
    digest,
    inner,
    is_importable,
    is_own,
)

MOST = 4000
"""Functions, classes and containers that are looked at; a model seldom has 100."""
_DEEPEST = 6
_DATA = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_NOT_CODE = frozenset(
    {
        "__module__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__annotations__",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "_abc_impl",
        "__qualname__",
        "__slots__",
        "__annotate_func__",
        "__annotations_cache__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__match_args__",
        "__parameters__",
        "__orig_bases__",
    }
)
_GLOBAL_OPERATIONS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"})
_OPEN = (types.SimpleNamespace, argparse.Namespace, nn.Module)
_NOTHING = -1
_OFTEN = 3
_CONTAINERS = frozenset({"dict", "list", "tuple", "set", "deque", "array"})
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_BUILT_IN = (dict, list, tuple, set, bool, torch.Tensor)


# ---- what code mentions ------------------------------------------------------------


@functools.lru_cache(1 << 14)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """Return all names that code mentions, globals and attributes."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
    return frozenset(names)


@functools.lru_cache(1 << 14)
def _globals_of(code: types.CodeType) -> frozenset[str]:
    """Return the names of the globals that code reads or sets."""
    names = {
        operation.argval
        for operation in dis.get_instructions(code)
        if operation.opname in _GLOBAL_OPERATIONS
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _globals_of(constant)
    return frozenset(names)


# ---- the caller's side --------------------------------------------------------------


class Code:
    """All code that the forward of a model reaches, watched.

    Parameters
    ----------
    parts : list of torch.nn.Module
        The module, and all its parts.

    Attributes
    ----------
    entries : list of Entry
        What replicas have imported for themselves.
    names : set of str
        All that the user's functions mention.

    Raises
    ------
    CannotTravelError
        If a function reads a tensor that is trained, and lives in a module which
        replicas have their own of.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self._parts = parts
        self._importable: dict[str, bool] = {}
        self._set_by_forward: collections.Counter[Any] = collections.Counter()
        self._walk()

    # ---- what there is -----------------------------------------------------------

    def _walk(self) -> None:
        self.entries: list[Entry] = []
        self.names: set[str] = set()
        self._kinds: dict[type, list[tuple[type, dict[str, Any]]]] = {}
        # What is watched; and the place of the global that leads to it, if one does.
        self._places: list[Any] = []
        self._roots: list[int | None] = []
        self._dicts: list[dict[str, Any]] = []
        self._dict_roots: list[int | None] = []
        self._tensors: list[tuple[torch.Tensor, int, int | None]] = []
        self._seen: set[Any] = set()
        self._root_of_seen: dict[int, int | None] = {}
        self._same: list[tuple[int | None, int | None]] = []  # roots of one thing
        self._todo: list[tuple[Any, int | None]] = []
        for kind in dict.fromkeys(type(part) for part in self._parts):
            self._see_kind(kind)
        for part in self._parts:
            for value in vars(part).values():
                if callable(value):
                    self._add([value])
                elif not isinstance(value, _DATA) and type(value) not in _BUILT_IN:
                    self._add([type(value)])
        while self._todo and len(self._seen) < MOST:
            self._see(*self._todo.pop())
        self._spots = _native.Spots(self._places)
        self._mirror = _native.Mirror(self._dicts)
        self._seen, self._root_of_seen, self._todo = set(), {}, []

    def _add(self, values: Iterable[Any], root: int | None = None) -> None:
        self._todo += [(value, root) for value in values]

    def _watch(self, place: Any, root: int | None = None) -> None:
        self._places.append(place)
        self._roots.append(root)

    def _see(self, value: Any, root: int | None) -> None:
        if isinstance(value, (*_DATA, types.ModuleType)):
            return
        if id(value) in self._seen:
            first = self._root_of_seen[id(value)]
            is_empty = isinstance(value, tuple) and not value  # there is but one
            if first != root and not is_empty and not callable(value):
                self._same.append((first, root))
            return
        self._seen.add(id(value))
        self._root_of_seen[id(value)] = root
        if isinstance(value, types.FunctionType):
            self._see_function(value)
        elif isinstance(value, type):
            if is_own(value.__module__):
                self._see_kind(value)
        elif isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._tensors.append((value, value._version, root))
        elif _things.kind_of(value) in _CONTAINERS:
            self._see_container(value, root)
        elif found := inner(value):
            self._add(found)
        elif _is_open(value):
            self._see_container(vars(value), root)
            self._add([type(value)])

    def _see_container(self, value: Any, root: int | None) -> None:
        kind = _things.kind_of(value)
        if type(value) is list:
            self._watch(value, root)
        elif kind != "tuple":
            self._dicts.append(value)
            self._dict_roots.append(root)
        if kind != "array":
            self._add(value.values() if isinstance(value, dict) else value, root)

    def _see_function(self, function: types.FunctionType) -> None:
        held = function.__globals__
        if not is_own(held.get("__name__")):
            # Decorators of libraries: torch.no_grad, jaxtyping.
            self._add([getattr(function, "__wrapped__", None)])
            return
        self._watch(function)
        if vars(function):
            self._see_container(vars(function), None)
        names = _names_of(function.__code__)
        self.names |= names
        for name in _globals_of(function.__code__) & held.keys():
            self._read(held, name, names)
        for cell in function.__closure__ or ():
            self._watch(cell)
            with contextlib.suppress(ValueError):  # empty as yet
                self._add([cell.cell_contents])
        self._add(function.__defaults__ or ())
        self._add((function.__kwdefaults__ or {}).values())

    def _read(self, held: dict[str, Any], name: str, names: frozenset[str]) -> None:
        """See a global, and what of a module of the user's is mentioned with it."""
        value = held[name]
        if (id(held), name) not in self._seen:
            self._seen.add((id(held), name))
            self._watch((held, name))
            if self._is_imported(held):
                self.entries.append(Entry(held["__name__"], "", name))
                _check_untrained(name, value)
            self._add([value], len(self._places) - 1)
        if isinstance(value, types.ModuleType):
            for inside, attribute in _mentioned_in(value, names):
                if (id(inside), attribute) not in self._seen:
                    self._read(inside, attribute, names)

    def _is_imported(self, held: dict[str, Any]) -> bool:
        name = held.get("__name__", "")
        if name not in self._importable:
            self._importable[name] = is_importable(name)
        return self._importable[name] and vars(sys.modules[name]) is held

    def _see_kind(self, kind: type) -> None:
        if kind in self._kinds:
            return
        bases = [b for b in kind.__mro__ if b not in (object, nn.Module)]
        self._kinds[kind] = [(base, dict(vars(base))) for base in bases]
        getattr(kind, "forward", None)  # gives it a version, if it has none
        self._watch(kind)
        for base in bases:
            if (base, "") in self._seen:
                continue
            self._seen.add((base, ""))
            names = vars(base).keys() - _NOT_CODE
            if is_own(base.__module__):
                self._add(vars(base)[name] for name in names)
            if _by_reference(base):
                self.entries += [
                    Entry(base.__module__, base.__qualname__, name) for name in names
                ]

    # ---- what has changed --------------------------------------------------------

    def changes(self) -> list[tuple[dict[str, Any], str]] | None:
        """Return which globals hold other data; None where code has changed.

        Empty nearly always, and then quick.
        """
        spots, dicts = self._spots.differing(), self._mirror.differing()
        if not spots and not dicts and not self._tensors:
            return []
        roots = [self._root_of(at) for at in spots]
        roots += [self._dict_roots[at] for at in dicts]
        roots += [root for x, version, root in self._tensors if x._version != version]
        reads: list[tuple[dict[str, Any], str]] = []
        is_deep = not all(map(_is_flat, self._changed_inside(spots, dicts)))
        for root in self._with_same(dict.fromkeys(roots)):
            if root == _NOTHING:
                continue
            if root is None:
                return None
            held, name = self._places[root]
            value = held.get(name, Missing)
            if not _is_data(value):
                return None
            if root in spots:
                is_deep |= not isinstance(value, _DATA)
            reads.append((held, name))
        if is_deep:
            self._walk()
        elif roots:
            self._take(spots, dicts)
        return reads

    def _changed_inside(self, spots: Sequence[int], dicts: Sequence[int]) -> list[Any]:
        places = [self._places[at] for at in spots]
        lists = [place for place in places if type(place) is list]
        return lists + [self._mirror.live(at) for at in dicts]

    def _with_same(self, roots: dict[int | None, None]) -> dict[int | None, None]:
        """Add the other globals that lead to what these lead to: it stays one thing."""
        n = 0
        while roots and n != len(roots):
            n = len(roots)
            for pair in self._same:
                if not roots.keys().isdisjoint(pair):
                    roots.update(dict.fromkeys(pair))
        return roots

    def _root_of(self, at: int) -> int | None:
        """Return the place of the global that has changed; None: it is no global."""
        place = self._places[at]
        if isinstance(place, tuple):
            return at
        if isinstance(place, type) and not self._has_changed(place):
            return _NOTHING
        return self._roots[at]

    def _has_changed(self, kind: type) -> bool:
        getattr(kind, "forward", None)
        for base, seen in self._kinds[kind]:
            held = vars(base)
            if held.keys() != seen.keys():
                return True
            if any(held[name] is not value for name, value in seen.items()):
                return True
        return False

    def accept(self) -> None:
        """Take all as it is now: replicas have done what this process's forward did."""
        spots, dicts = self._spots.differing(), self._mirror.differing()
        if (spots or dicts) and self._has_made(spots, dicts):
            self._walk()
        else:
            self._take(spots, dicts)

    def _take(self, spots: Sequence[int], dicts: Sequence[int]) -> None:
        """Take what differs, as was found just now, for what replicas know."""
        if spots:
            self._spots.accept()
        if dicts:
            self._mirror.accept()
        if self._tensors:
            self._tensors = [(x, x._version, root) for x, _, root in self._tensors]

    def _has_made(self, spots: Sequence[int], dicts: Sequence[int]) -> bool:
        """Tell whether a forward has set what must be watched; not what each sets."""
        inside = self._changed_inside(spots, dicts)
        set_now: list[Any] = [id(live) for live in inside if not _is_flat(live)]
        for place in (self._places[at] for at in spots):
            if type(place) is list:
                continue
            if isinstance(place, tuple):
                held, name = place
                if not isinstance(held.get(name), (*_DATA, torch.Tensor)):
                    set_now.append((id(held), name))
            elif not isinstance(place, type) or self._has_changed(place):
                set_now.append(id(place))
        self._set_by_forward.update(set_now)
        return any(self._set_by_forward[one] <= _OFTEN for one in set_now)

    def has_tensor(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is watched here."""
        return any(x is tensor for x, _, _ in self._tensors)

    def told(self) -> tuple[list[tuple[Entry, Any]], list[str]]:
        """Return what :func:`differing` is to compare in a replica."""
        digests = [(entry, digest(entry.value())) for entry in self.entries]
        found = [pair for pair in digests if pair[1] is not None]
        operators = []
        if "ops" in self.names:
            operators = sorted(_torch_ops.operators_among(self.names))
        return found, operators


def _mentioned_in(
    module: types.ModuleType, names: frozenset[str]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield what code may read of a module; of torch the functions, to be patched."""
    if is_own(module.__name__):
        for name in names & vars(module).keys():
            yield vars(module), name
    elif module in (torch, torch.nn, functional):
        for inside in (vars(torch), vars(functional)):
            for name in names & inside.keys():
                if isinstance(inside[name], _FUNCTIONS):
                    yield inside, name


def _is_open(value: Any) -> bool:
    """Tell whether an object's attributes are looked at."""
    if not isinstance(value, _OPEN) and not is_own(type(value).__module__):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _by_reference(kind: type) -> bool:
    """Tell whether a class can be found where it says."""
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__ in ("__main__", "builtins"):
        return False
    found: Any = module
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _check_untrained(name: str, value: Any) -> None:
    tensors = [value] if isinstance(value, torch.Tensor) else []
    if isinstance(value, nn.Module):
        tensors = list(value.parameters())
    if any(tensor.requires_grad for tensor in tensors):
        raise _travel.CannotTravelError(
            f"forward reads the global '{name}', which requires a gradient and is no "
            "part of the module"
        )


def _is_data(value: Any, depth: int = 0) -> bool:
    """Tell whether a value holds no code, and nothing that is trained."""
    if isinstance(value, _DATA):
        return True
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    if depth > _DEEPEST or isinstance(value, (type, nn.Module)) or callable(value):
        return False
    if _is_open(value):
        return _is_data(vars(value), depth)
    kind = _things.kind_of(value)
    if kind == "array":
        return not value.dtype.hasobject
    if kind == "dict":
        value = value.values()
    elif kind not in _CONTAINERS and not isinstance(value, frozenset):
        return False
    return all(_is_data(one, depth + 1) for one in value)


def _is_flat(value: Any) -> bool:
    """Tell whether a thing holds numbers and words alone: nothing else to watch."""
    if _things.kind_of(value) == "array":
        return True
    members = value.values() if isinstance(value, dict) else value
    return all(isinstance(one, _DATA) for one in members)


def assignments(
    places: list[tuple[dict[str, Any], str]], homes: _travel.Homes
) -> bytes | None:
    """Return what replicas assign, where globals of this process hold other data.

    None where no name leads to it, as in a module that a script has made.
    """
    found: list[tuple[Any, str, Any]] = []
    for held, name in places:
        value = held.get(name, Missing)
        module = held.get("__name__", "")
        is_imported = is_importable(module) and vars(sys.modules[module]) is held
        if held in homes:
            found.append((homes.key(held), name, value))
        elif not is_imported:
            return None
        if is_imported:
            found.append((Entry(module, "", name), name, value))
    return _travel.dumps(found, {}, homes=homes)
