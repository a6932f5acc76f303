"""What a module's attributes hold: which of it has changed, and how replicas hear it.

Lists, dicts, sets, deques, plain objects, tensors and arrays are *things*.  Each has a
mirror (``_native.Mirror``) of its members, and those that a replica knows have a key:
a change travels as what differs and is written into the replica's own thing, so that
who shares it there goes on sharing it.  What replica 0's forward has changed is taken
as the other replicas' own doing: it is not told, and things that came up in it have no
key.  Where such a one is changed later, the member that holds it travels anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from paceline import _native, _torch_weights, _travel
from paceline._things import (
    MAPPINGS,
    OWN_NAMES,
    Thing,
    Write,
    has_own_pickle,
    is_plain,
    items_of,
    kind_of,
    members_of,
)

OF_THIS_PROCESS = frozenset({"_compiled_call_impl"})
"""Attributes that a module does not take along; ``Module.compile`` sets one."""

MOST_DEPTH = 8
MOST_THINGS = 4096
MOST_TENSORS = 512
N_SPARE = 64


class LostError(Exception):
    """Nobody can say who holds a thing that has changed."""


class Change:
    """What of a thing is to be told: names, or all from an index on."""

    __slots__ = ("begin", "is_whole", "names", "removed")

    def __init__(self) -> None:
        self.begin = sys.maxsize
        self.is_whole = False
        self.names: dict[Any, None] = {}
        self.removed: list[Any] = []

    @property
    def rest(self) -> slice:
        """All from the index on."""
        return slice(self.begin, None)


class Held:
    """The things that a module's attributes hold.

    Parameters
    ----------
    mirror : _native.Mirror
        Where they, and the modules' attributes, are mirrored.
    modules : list of torch.nn.Module
        The module and all its parts.
    own : set of int
        The ``id`` of what replicas have in another way: modules, parameters, buffers.
    homes : _travel.Homes
        Where functions that travel have their globals.
    """

    def __init__(
        self,
        mirror: _native.Mirror,
        modules: list[nn.Module],
        own: set[int],
        homes: _travel.Homes,
    ) -> None:
        self._mirror = mirror
        self._homes = homes
        self._own = own
        self._things: dict[int, Thing] = {}
        self._at: dict[int, Thing] = {}
        self._n_tensors = 0
        self._released: list[Any] = []
        self._gone: list[Any] = []
        self._n_keys = 0
        self._most = MOST_THINGS
        self._roots: list[Thing] = []
        for index, part in enumerate(modules):
            root = Thing(part, "module", None)
            root.key = ("module", index)
            root.slot = mirror.add(vars(part), part)
            self._at[root.slot] = root
            self._roots.append(root)
            for member in root.members():
                self._hold(member, root)
        self._most = 2 * len(self._things) + N_SPARE

    # ---- who holds what --------------------------------------------------------------

    def _hold(self, value: Any, holder: Thing) -> bool:
        """Note that `holder` holds a value; tell whether that is a thing."""
        if is_plain(value):
            return False
        thing = self._things.get(id(value))
        if thing is not None:
            thing.n_holders += 1
            return True
        kind = kind_of(value) if id(value) not in self._own else None
        if kind is None or holder.depth >= MOST_DEPTH:
            return False
        if len(self._things) >= MOST_THINGS:
            return False
        thing = Thing(value, kind, holder)
        if kind in ("tensor", "array"):
            if self._n_tensors >= MOST_TENSORS:
                return False
            self._n_tensors += 1
        if kind != "tuple":
            try:
                self._mirror_of(thing)
            except (BufferError, TypeError, ValueError):  # memory nobody can read
                return False
        if thing.beside is not None:
            self._mirror_of(thing.beside)
        self._things[id(value)] = thing
        holds = [self._hold(member, thing) for member in thing.members()]
        if kind == "tuple" and not any(holds) and thing.beside is None:
            del self._things[id(value)]
            return False
        return True

    def _mirror_of(self, thing: Thing) -> None:
        owner = thing.value if thing.kind in ("object", "whole") else None
        thing.slot = self._mirror.add(thing.target, owner)
        self._at[thing.slot] = thing

    def _settle(self) -> None:
        """Forget what nobody holds any more."""
        while self._released:
            thing = self._things.get(id(self._released.pop()))
            if thing is None:
                continue
            thing.n_holders -= 1
            if thing.n_holders <= 0:
                self._released += thing.members()
                self._forget(thing)
        if len(self._things) > self._most:
            self._sweep()

    def _forget(self, thing: Thing) -> None:
        del self._things[id(thing.value)]
        self._n_tensors -= thing.kind in ("tensor", "array")
        for one in (thing, thing.beside):
            if one is not None and one.slot >= 0:
                del self._at[one.slot]
                self._mirror.drop(one.slot)
        if thing.key is not None:
            self._gone.append((id(thing.value), thing.key))

    def _sweep(self) -> None:
        """Forget what but holds itself, in a circle."""
        held: dict[int, int] = {}
        values = [member for root in self._roots for member in root.members()]
        while values:
            thing = self._things.get(id(values.pop()))
            if thing is None:
                continue
            at = id(thing.value)
            held[at] = held.get(at, 0) + 1
            if held[at] == 1:
                values += thing.members()
        for at, thing in list(self._things.items()):
            thing.n_holders = held.get(at, 0)
            if not thing.n_holders:
                self._forget(thing)
        self._most = 2 * len(self._things) + N_SPARE

    def _renew(self, thing: Thing) -> tuple[int, Any, Any]:
        """Take a thing as it is now; return how it differs."""
        begin, before, after = self._mirror.delta(thing.slot)
        self._mirror.accept(thing.slot)
        if thing.kind not in ("tensor", "array", "whole"):
            for value in thing.values_of(after):
                self._hold(value, thing)
            self._released += thing.values_of(before)
        return begin, before, after

    def accept(self, slots: Iterable[int]) -> None:
        """Take some things as they are now, and tell nobody."""
        for slot in slots:
            thing = self._at[slot]
            self._renew(thing)
            thing.cls = type(thing.value)
        self._settle()

    def values(self) -> dict[int, Any]:
        """Return the things that replicas may know, by their ``id``."""
        return {
            at: thing.value
            for at, thing in self._things.items()
            if thing.kind not in ("tuple", "whole")
        }

    def keep(self, values: Sequence[Any]) -> None:
        """Give keys to the things that have travelled, and forget the others.

        A class may leave behind what it holds (``__getstate__``): that is not told.
        """
        travelled = set(map(id, values))
        for at, thing in list(self._things.items()):
            if thing.kind not in ("tuple", "whole") and at not in travelled:
                self._forget(thing)
        self._give_keys([self._things[id(value)] for value in values])

    def _give_keys(self, things: Iterable[Thing]) -> list[Any]:
        values = []
        for thing in things:
            if thing.key is None and thing.kind not in ("tuple", "whole"):
                thing.key = ("held", self._n_keys)
                if thing.beside is not None:
                    thing.beside.key = thing.key
                self._n_keys += 1
                values.append(thing.value)
        return values

    def keys(self) -> Iterator[tuple[int, Any]]:
        """Yield the ``id`` and the key of each thing that replicas know."""
        for thing in self._things.values():
            if thing.key is not None:
                yield id(thing.value), thing.key

    def has(self, value: Any) -> bool:
        """Tell whether a value is a thing."""
        return id(value) in self._things

    def unknown_tensors(self) -> set[int]:
        """Return the ``id`` of the tensors that forwards have made."""
        return {
            id(thing.value)
            for thing in self._things.values()
            if thing.kind == "tensor" and thing.key is None
        }

    # ---- what to tell ----------------------------------------------------------------

    def tell(
        self, slots: Iterable[int], keys: dict[int, Any], as_data: frozenset[int]
    ) -> tuple[bytes, int] | None:
        """Take some things as they are now; return what replicas have to write.

        Raises
        ------
        LostError
            If only a new replica would have it all.
        """
        things = [self._at[slot] for slot in slots]
        if any(type(thing.value) is not thing.cls for thing in things):
            raise LostError
        deltas = [(thing, self._renew(thing)) for thing in things]
        self._settle()
        changes: dict[int, tuple[Thing, Change]] = {}
        for thing, delta in deltas:
            if thing.kind == "module" or id(thing.value) in self._things:
                self._note(thing, delta, changes)
        writes = [
            write
            for thing, change in changes.values()
            if (write := _write_of(thing, change)) is not None
        ]
        gone = [key for _, key in self._gone]
        for at, _ in self._gone:
            keys.pop(at, None)
        self._gone = []
        if not writes and not gone:
            return None
        fresh: dict[int, Thing] = {}
        for _, _, payload in writes:
            self._find_fresh(payload, fresh)
        values = [t.value for t in fresh.values()]
        words = _travel.dumps(
            (writes, values, gone), keys, as_data=as_data, homes=self._homes
        )
        begin = self._n_keys
        self._give_keys(fresh.values())
        keys.update((id(t.value), t.key) for t in fresh.values())
        return words, begin

    def _find_fresh(self, value: Any, fresh: dict[int, Thing]) -> None:
        """Find the things in what is told that replicas do not know yet."""
        thing = self._things.get(id(value))
        if thing is None:
            if type(value) in (tuple, list, dict):
                members = value.values() if type(value) is dict else value
                for member in members:
                    self._find_fresh(member, fresh)
            return
        if thing.key is not None or id(value) in fresh:
            return
        if thing.kind not in ("tuple", "whole"):
            fresh[id(value)] = thing
        for member in thing.members():
            self._find_fresh(member, fresh)

    def _note(
        self, thing: Thing, delta: Any, changes: dict[int, tuple[Thing, Change]]
    ) -> None:
        """Note what has changed in a thing, or who holds it if no replica knows it."""
        if thing.key is None:
            self._climb(thing, changes)
            return
        _, change = changes.setdefault(id(thing), (thing, Change()))
        begin, before, after = delta
        if thing.kind not in MAPPINGS:
            change.begin = min(change.begin, begin)
            return
        named = [k for k in after if k not in before or before[k] is not after[k]]
        if thing.kind == "module":
            named = [k for k in named if k not in OF_THIS_PROCESS]
        change.names.update(dict.fromkeys(named))
        change.removed += [k for k in before if k not in after]
        if thing.kind == "dict" and before and list(before) != list(after):
            change.is_whole = True  # the order counts too

    def _climb(self, thing: Thing, changes: dict[int, tuple[Thing, Change]]) -> None:
        """Have the member told anew that holds a thing which no replica knows."""
        holder = thing.holder
        assert holder is not None
        is_held = holder.kind == "module" or self.has(holder.value)
        labels = holder.labels_of(thing.value) if is_held else []
        if not labels:
            raise LostError
        if holder.key is None:
            self._climb(holder, changes)
            return
        _, change = changes.setdefault(id(holder), (holder, Change()))
        if holder.kind in MAPPINGS:
            if holder.kind == "module" and not OWN_NAMES.isdisjoint(labels):
                raise LostError
            change.names.update(dict.fromkeys(labels))
        else:
            change.begin = min(change.begin, *labels)


def _write_of(thing: Thing, change: Change) -> Write | None:
    """Return what a replica is to write; None where nothing is new."""
    kind, value = thing.kind, thing.value
    if kind in ("tensor", "array"):
        if kind == "tensor" and value.requires_grad:
            raise _travel.CannotTravelError(
                f"a tensor of shape {tuple(value.shape)} requires a gradient, and is "
                "neither a parameter nor a buffer of the module"
            )
        copy = value.detach().clone() if kind == "tensor" else value.copy()
        return thing.key, kind, (copy,)
    if kind in MAPPINGS:
        now = thing.target
        if kind == "module" and has_own_pickle(thing.cls):
            state = _torch_weights.state_of(value)
            now = state if isinstance(state, dict) else now
        now = dict(items_of(now))
        if change.is_whole:
            return thing.key, kind, (True, now, [])
        named = {name: now[name] for name in change.names if name in now}
        if not named and not change.removed:
            return None
        return thing.key, kind, (False, named, change.removed)
    if kind == "set":
        return thing.key, kind, (members_of(kind, value),)
    members = value if kind == "list" else members_of(kind, value)
    return thing.key, kind, (change.begin, list.__getitem__(members, change.rest))
