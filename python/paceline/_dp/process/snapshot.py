"""A module's plain state as replicas have it: what has changed, and how it is sent.

The caller pickles the module once (:meth:`ModelState.skeleton`), attribute by
attribute, and the pickler shows every object that it meets.  All that can change is
recorded in a ``_native.Snapshot``, so what is watched is what was sent:

lists, dicts, sets, objects, tensors, arrays   belong to the attribute that led to them;
                                               where one differs, that attribute is
                                               pickled anew, with all that share
                                               something with it
functions, classes, cells, globals of code     the model is sent anew
pickled by value; the parts themselves

What replica 0's forward has changed is taken as the other replicas' own doing: it is
recorded, and not sent.
"""

from __future__ import annotations

import copyreg
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from paceline import _native
from paceline._compat import torch_weights
from paceline._dp.process import holders, pickling
from paceline._dp.process.watchable import ATOMS, cache_slot_names, watchable
from paceline._replicas.errors import UnsupportedModelError

Attribute = tuple[int, str]
"""A part's number, and the name of an attribute of it."""

Changed = list[tuple[int, dict[str, Any]]]

STRUCTURE: Attribute = (-1, "")
"""Stands for all that is no attribute's: where it differs the model is sent anew."""

_OWN_NAMES = frozenset(vars(nn.Module())) - {"training"}
_OF_THIS_PROCESS = frozenset({"_compiled_call_impl"})
_WATCHED_PARTS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_IN_REDUCER = (type, types.FunctionType, types.ModuleType)
_MOST_GROWN = 64
"""How often a forward may put something new into a global before all is sent anew."""


class ModelState:
    """The plain state of a module's parts, as replicas have it.

    `keys` has, by ``id``, what takes the place of parameters and buffers.  `made` are
    attributes that forwards have set: tensors in them are sent as values.
    """

    def __init__(
        self,
        parts: list[nn.Module],
        keys: dict[int, Any],
        script_globals: pickling.ScriptGlobals,
        made: Iterable[Attribute] = (),
    ) -> None:
        self._parts = parts
        self._keys = {**keys, **{id(p): ("module", i) for i, p in enumerate(parts)}}
        self._script_globals = script_globals
        self._made = set(made)
        self._unsent: set[Attribute] = set()  # of those that forwards have set
        self._computed = {
            (i, name)
            for i, part in enumerate(parts)
            for name in torch_weights.computed_by(part)
        }
        self._as_values = self._made | self._computed
        self._whole = {i for i, part in enumerate(parts) if _has_own_pickle(part)}
        self._current = STRUCTURE
        self._has_parts = False  # at this place of the pickle
        self._snapshot = _native.Snapshot()
        self._attribute_of: dict[int, Attribute] = {}
        self._items: dict[Attribute, list[tuple[Any, list[int], list[int]]]] = {}
        self._visited: dict[int, Attribute] = {}
        self._links: dict[Attribute, set[Attribute]] = {}
        self._at_part: dict[int, int] = {}
        self._kind_at: dict[int, tuple[str, int]] = {}  # `_buffers` of a part, say
        self._code_at: dict[int, tuple[Any, Any]] = {}
        self._n_names = Counter(
            id(buffer) for part in parts for buffer in part._buffers.values()
        )
        self._buffers = holders.Buffers(parts)
        self._n_grown = 0
        self._before: Changed | None = None
        self.is_stale = False
        self.has_other_hooks = False  # since a forward; then it is stale, too
        self._watch_parts()

    # ---- what is watched -------------------------------------------------------------

    def _watch_parts(self) -> None:
        for i, part in enumerate(self._parts):
            held = vars(part)
            self._at_part[self._snapshot.add(held, part)] = i
            for name in _WATCHED_PARTS:
                at = self._snapshot.add(held[name])
                self._attribute_of[at] = STRUCTURE
                self._kind_at[at] = name, i
            watched = [held] + [held[name] for name in _WATCHED_PARTS]
            self._visited.update((id(one), STRUCTURE) for one in watched)
        for i, part in enumerate(self._parts):
            for parameter in part._parameters.values():
                if parameter is not None and id(parameter) not in self._visited:
                    self._visited[id(parameter)] = STRUCTURE
                    at = self._snapshot.add(vars(parameter))
                    self._attribute_of[at] = STRUCTURE
                    self._kind_at[at] = "attributes of a parameter", i

    def see(self, value: Any) -> None:
        """Watch an object that the pickler has met, for the attribute it is at."""
        if type(value) in (tuple, frozenset) and not value:
            return  # there is only one, which nobody shares
        at = id(value)
        before = self._visited.get(at)
        if before is not None:
            if before != self._current:
                self._links.setdefault(before, set()).add(self._current)
                self._links.setdefault(self._current, set()).add(before)
        elif type(value) in (tuple, frozenset):  # what it holds may be shared by it
            self._add(value, [], self._current)
        elif not isinstance(value, _IN_REDUCER) and (pairs := watchable(value)):
            if isinstance(value, torch.Tensor) and not self.is_at_made:
                self._buffers.check_apart(value)
            self._add(value, pairs, self._current)

    def check_known(self, key: tuple[str, int]) -> None:
        """Raise where a class refers to a part: replicas make parts of classes."""
        kind, i = key
        if kind == "module" and not self._has_parts:
            raise UnsupportedModelError(
                "a class of the model refers to one of the model's own parts (a "
                f"{type(self._parts[i]).__name__}), by a closure or a class attribute, "
                "and replicas have classes before parts"
            )

    @property
    def is_at_made(self) -> bool:
        """Whether the attribute that is pickled now is one that a forward has set."""
        return self._current in self._as_values

    def see_code(self, value: Any, names: Iterable[str] = ()) -> None:
        """Watch a function or class that is pickled by value, and its globals."""
        pairs: list[tuple[Any, Any]] = [(value, None)]
        if isinstance(value, type):
            cache_slot_names(value)
        if isinstance(value, types.FunctionType):
            pairs += [(cell, None) for cell in value.__closure__ or ()]
            pairs += [(value.__globals__, name) for name in names]
            if vars(value):
                pairs.append((vars(value), None))
        self._add(value, pairs, STRUCTURE)
        self._visited[id(value)] = self._current

    def see_module(self, module: types.ModuleType) -> None:
        """Watch a module that nobody can import, and that is pickled by value."""
        self._add(module, [(vars(module), None)], STRUCTURE)
        self._visited[id(module)] = self._current

    def _add(
        self, value: Any, pairs: list[tuple[Any, Any]], attribute: Attribute
    ) -> None:
        ids = [id(value)] + [id(live) for live, owner in pairs if owner is value]
        self._visited.update(dict.fromkeys(ids, attribute))
        found: list[int] = []
        # The value itself is kept: while it lives its id is no other's.
        self._items.setdefault(attribute, []).append((value, ids, found))
        is_whole = self._current not in self._as_values
        for live, owner in pairs:
            try:
                at = self._snapshot.add(live, owner, whole=is_whole)
            except (BufferError, ValueError) as error:
                raise UnsupportedModelError(
                    f"it holds a {type(value).__qualname__} whose memory cannot be "
                    f"read: {error}"
                ) from error
            self._attribute_of[at] = attribute
            if attribute == STRUCTURE:
                self._code_at[at] = live, owner
            found.append(at)

    def _forget(self, attributes: Iterable[Attribute]) -> None:
        """Watch what belongs to some attributes no longer."""
        for attribute in attributes:
            for _, ids, found in self._items.pop(attribute, ()):
                for at in found:
                    self._snapshot.drop(at)
                    del self._attribute_of[at]
                for one in ids:
                    self._visited.pop(one, None)
            for other in self._links.pop(attribute, ()):
                self._links.get(other, set()).discard(attribute)

    def _with_linked(self, attributes: Iterable[Attribute]) -> set[Attribute]:
        """Return attributes with all that share something with them."""
        found: set[Attribute] = set()
        todo = list(attributes)
        while todo:
            attribute = todo.pop()
            if attribute not in found:
                found.add(attribute)
                todo += self._links.get(attribute, ())
        return found

    # ---- all of it -------------------------------------------------------------------

    def skeleton(self) -> bytes:
        """Pickle all parts, and record what replicas have then."""
        stream = pickling.Stream(self, self._keys, self._script_globals)
        self._current = STRUCTURE
        stream.write(tuple(_maker(part) for part in self._parts))
        self._has_parts = True
        for i in reversed(range(len(self._parts))):  # what a part holds comes first
            part = self._parts[i]
            if i in self._whole:
                stream.write((i, "", pickling.Whole(part)))
            else:
                held = [(name, vars(part).get(name)) for name in _OWN_NAMES]
                stream.write((i, "", tuple(pair for pair in held if pair[1])))
        self._write_attributes(stream)
        for at, i in self._at_part.items():
            if i in self._whole:  # to pickle a GraphModule compiles it anew
                self._snapshot.accept(at)
        return stream.getvalue()

    def _write_attributes(self, stream: pickling.Stream) -> None:
        constants = []
        for i, part in enumerate(self._parts):
            if i in self._whole:
                continue
            plain = []
            for name, value in list(vars(part).items()):
                if name in _OWN_NAMES or name in _OF_THIS_PROCESS:
                    continue
                if type(value) in ATOMS:
                    plain.append((name, value))
                else:
                    self._current = (i, name)
                    stream.write((i, name, value))
            constants.append((i, tuple(plain)))
        self._current = STRUCTURE
        stream.write_plain((-1, "", tuple(constants)))

    # ---- what has changed ------------------------------------------------------------

    def changes(self) -> bytes | None:
        """Return what replicas have to receive, pickled; None: send the model anew.

        Empty where nothing has changed, nearly always, and then quick.
        """
        differing = self._snapshot.differing()
        if not differing:
            return b""
        changed = self._changed(differing)
        if changed is None:
            return None
        group = self._with_linked(changed)
        self._as_values = self._unsent | (self._made - changed) | self._computed
        while STRUCTURE not in group:
            self._forget(group)
            stream = pickling.Stream(self, self._keys, self._script_globals)
            for i, name in sorted(group):
                self._current = (i, name)
                held = vars(self._parts[i])
                stream.write((i, name, held[name]) if name in held else (i, name))
            self._current = STRUCTURE
            wider = self._with_linked(group)
            if wider == group:
                self._made = (self._made - changed) | self._unsent
                self._unsent = set()
                self._accept_parts(differing)
                return stream.getvalue()
            group = wider
        return None

    def _changed(self, differing: Iterable[int]) -> set[Attribute] | None:
        """Return the attributes concerned; None: more than attributes are."""
        changed: set[Attribute] = set()
        for at in differing:
            i = self._at_part.get(at)
            if i is not None:
                names = self._names_changed(at)
                if not names or not self._is_plain(i, names):
                    return None
                changed.update((i, name) for name in names - _OF_THIS_PROCESS)
            elif self._kind_at.get(at, ("",))[0] != "_buffers":
                changed.add(self._attribute_of[at])
            elif not self._accept_buffers(at):
                return None
        return None if STRUCTURE in changed else changed

    def _is_plain(self, i: int, names: set[str]) -> bool:
        """Tell whether attributes of a part can be sent one by one."""
        if not names.isdisjoint(_OWN_NAMES):
            return False
        held = vars(self._parts[i])
        return i not in self._whole or all(
            name in held and type(held[name]) in ATOMS for name in names
        )

    def _accept_buffers(self, at: int) -> bool:
        """Take buffers that are other tensors now; not where any came, went or parted.

        Their values are copied before each forward in any case.
        """
        before, after = self._snapshot.delta(at)
        if before.keys() != after.keys():
            return False
        for name, old in before.items():
            new = after[name]
            if old is None or new is None:
                if old is not new:
                    return False
                continue
            if id(new) in self._keys or self._n_names[id(old)] != 1:
                return False
            self._keys[id(new)] = self._keys.pop(id(old))
            self._n_names[id(new)] = self._n_names.pop(id(old))
        self._buffers.have_changed()
        self._snapshot.accept(at)
        return True

    def _names_changed(self, at: int) -> set[str]:
        before, after = self._snapshot.delta(at)
        return {
            name
            for name in before.keys() | after.keys()
            if name not in before
            or name not in after
            or not _is_same(before[name], after[name])
        }

    def _accept_parts(self, differing: Iterable[int]) -> None:
        for at in differing:
            if at in self._at_part:
                self._snapshot.accept(at)

    # ---- what a forward has changed --------------------------------------------------

    def differing_attributes(self) -> set[Attribute]:
        """Return the attributes that differ from what replicas have."""
        found: set[Attribute] = set()
        for at in self._snapshot.differing():
            if at in self._at_part:
                i = self._at_part[at]
                names = self._names_changed(at) - _OWN_NAMES - _OF_THIS_PROCESS
                found.update((i, name) for name in names)
            elif self._attribute_of[at] != STRUCTURE:
                found.add(self._attribute_of[at])
            else:
                self._note_hooks(at)
        return found

    def _note_hooks(self, at: int) -> None:
        kind, _ = self._kind_at.get(at, ("", -1))
        self.has_other_hooks |= kind.endswith("_hooks")

    def forward_ends_alone(self, before: set[Attribute]) -> None:
        """Record what a forward has set that not all replicas took part in.

        They receive it later; tensors in it as values, and not as what would want a
        gradient.  What differed `before` the forward is not of its making.
        """
        self._unsent |= self.differing_attributes() - before

    def made(self) -> set[Attribute]:
        """Return the attributes that are as forwards have left them."""
        differing = self.differing_attributes()
        return (self._made - differing) | self._unsent

    def forward_ends(self) -> int | None:
        """Take all as it is now: replicas have done what this process's forward did.

        Return the number of a part that has other parameters or parts now, if one has.
        """
        broken: int | None = None
        changed: set[Attribute] = set()
        differing = self._snapshot.differing()
        self._before = self._before_of(differing) if differing else []
        for at in differing:
            i = self._at_part.get(at)
            if i is not None:
                names = self._names_changed(at)
                self.is_stale |= not names.isdisjoint(_OWN_NAMES)
                changed.update((i, name) for name in names - _OWN_NAMES)
            elif at in self._kind_at:
                kind, i = self._kind_at[at]
                if kind in ("_parameters", "_modules"):
                    broken = i
                self._note_hooks(at)
                self.is_stale |= kind != "_buffers" or not self._accept_buffers(at)
            elif at in self._code_at:
                self._record_code(*self._code_at[at])
            else:
                changed.add(self._attribute_of[at])
            self._snapshot.accept(at)
        if changed:
            self._made |= changed
            self._as_values = self._made | self._computed
            self._record_anew(changed)
        return broken

    def _record_code(self, live: Any, owner: Any) -> None:
        """Watch what a forward has put into a global, a cell, or what these hold."""
        if isinstance(live, _IN_REDUCER):
            self.is_stale = True
            return
        value = live.get(owner) if isinstance(owner, str) else live
        if type(value) in ATOMS or isinstance(value, torch.Tensor):
            return
        pickling.Recorder(self, self._keys, self._script_globals).write((value,))
        self._n_grown += 1
        self.is_stale |= self._n_grown > _MOST_GROWN

    def _record_anew(self, changed: set[Attribute]) -> None:
        """Watch what some attributes hold now."""
        group = self._with_linked(changed)
        if STRUCTURE in group:
            group = changed
            self._n_grown += 1
            self.is_stale |= self._n_grown > _MOST_GROWN
        else:
            self._forget(group)
        recorder = pickling.Recorder(self, self._keys, self._script_globals)
        for i, name in group:
            value = vars(self._parts[i]).get(name)
            if type(value) not in ATOMS and i not in self._whole:
                self._current = (i, name)
                recorder.write((value,))
        self._current = STRUCTURE

    def forget_before(self) -> None:
        """Forget what attributes were before the last forward."""
        self._before = None

    def before(self) -> Changed:
        """Return what the last forward has changed, as it was: parts and attributes."""
        if self._before is not None:
            return self._before
        return self._before_of(self._snapshot.differing())

    def _before_of(self, differing: Iterable[int]) -> Changed:
        parts = [at for at in differing if at in self._at_part]
        return [(self._at_part[at], self._snapshot.delta(at)[0]) for at in parts]


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    is_atom = type(before) is type(after) and type(before) in (int, float, str)
    return is_atom and repr(before) == repr(after)


def _has_own_pickle(part: nn.Module) -> bool:
    """Tell whether a part chooses itself what of it is pickled, and how."""
    if torch_weights.is_parametrized(part):
        return False
    kind = type(part)
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"):
        if getattr(kind, name, None) is not getattr(nn.Module, name, None):
            return True
    return bool(copyreg._slotnames(kind))  # type: ignore[attr-defined]


def _maker(part: nn.Module) -> tuple[Any, ...]:
    if torch_weights.is_parametrized(part):
        make, arguments, _ = torch_weights.reduce_parametrized(part)
        return make, arguments
    if _has_own_pickle(part):
        return ()
    return _new_part, (type(part),)


def owners_of_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dictionary and the name of each buffer, under each of its names."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name


def _new_part(kind: Any) -> nn.Module:
    part: nn.Module = kind.__new__(kind)
    return part
