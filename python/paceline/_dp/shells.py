"""Replicas that are kept from forward to forward.

Making a replica's objects takes the host longer than everything else before replicas
start.  So they are kept, and each forward gives them its tensors::

    begin   copy attributes that changed in the module; put the tensors in
    end     if nothing else holds the replica: remove tensors, and what forward has set

Attributes that a forward sets are lost, as in a new replica.  If anything else holds a
replica (a checkpoint until its backward, a closure, a traceback), the next forward
checks it again.  If it is still held, a new replica takes its place.

Reference counts of a part and of its dictionaries show whether anything holds a
replica.  The plan knows how many are ours; to measure them might count a profiler's.
The counts are right only if a part's parent alone refers to it.  If an attribute or a
hook does (a bound method of a part, a list of parts), each forward makes new replicas.
So does a forward that sets parts.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.nn import Module

from paceline import _native
from paceline._compat import torch_core
from paceline._dp import replicate
from paceline._dp.replicate import Bring, Entries

_TENSORS = ("_parameters", "_buffers")
_ANY = object()
"""Stands for a value that may be any object."""
# An RNN's method renews its list of tensors, as replicate.renewed() does.
_METHODS = torch_core.PLAIN_COPY, torch_core.RNN_COPY


def can_be_kept(parts: Iterable[Module]) -> bool:
    """Tell whether all state of a replica of the module is in its dictionaries."""
    return all(
        type(part) is part.__class__
        and type(part)._replicate_for_data_parallel in _METHODS
        and type(part).__basicsize__ == Module.__basicsize__
        and not isinstance(part, (torch.jit.ScriptModule, torch.fx.GraphModule))
        and "dynamo_ctx" not in part.__dict__
        and all(type(name) is str for name in part.__dict__)
        for part in parts
    )


def _is_live(value: Any) -> bool:
    """Tell whether an attribute's value differs in each replica and forward."""
    if type(value) in replicate.CONTAINERS:
        return replicate.leads(value)
    if type(value) is MethodType:
        value = value.__self__  # _leads_to_part() finds methods of parts
    elif type(value) is weakref.ref:
        value = value()
    return type(value) is partial or isinstance(value, torch.Tensor)


def _leads_to_part(value: Any, n_levels: int = 4) -> bool:
    """Tell whether a value is a module or leads to one."""
    entries: Iterable[Any] = ()
    kind = type(value)
    if kind is MethodType:
        entries = (value.__self__,)
    elif kind is weakref.ref:
        entries = (value(),)
    elif kind is partial:
        entries = (value.func, *value.args, *value.keywords.values())
    elif kind in replicate.CONTAINERS and replicate.leads(value):
        entries = value.values() if issubclass(kind, dict) else value
    return isinstance(value, Module) or (
        n_levels > 0 and any(_leads_to_part(entry, n_levels - 1) for entry in entries)
    )


class _Dicts:
    """Dictionaries and their expected entries: names, and values by identity."""

    def __init__(self, dicts: Iterable[dict[str, Any]]) -> None:
        self.dicts = list(dicts)
        self.expected = list(map(dict, self.dicts))

    def note(self, i: int, but: Iterable[str], there: object) -> None:
        """Expect the entries of dictionary `i`, with `there` as the values of `but`."""
        self.expected[i] = {**self.dicts[i], **dict.fromkeys(but, there)}

    def differing(self) -> list[int]:
        """Return the numbers of dictionaries that differ."""
        return _native.differing(self.dicts, self.expected, _ANY)

    def restore(self) -> None:
        """Make all hold their expected entries."""
        _native.restore(self.dicts, self.expected)


class _Sorted:
    """The attributes of a part whose values replicas do not simply share.

    Attributes
    ----------
    live : list of str
        Names whose values are renewed in each forward.
    watched : list
        Containers that may later lead to a part or tensor of the module.
    leads_to_part : bool
        Whether another attribute is a part, or a method of one.
    """

    def __init__(self, held: dict[str, Any]) -> None:
        self.live: list[str] = []
        self.watched: list[Any] = []
        self.leads_to_part = False
        constants = replicate.CONSTANTS
        for name, value in held.items():
            if name in replicate.OWN_KEYS or type(value) in constants:
                continue
            if _is_live(value):
                self.live.append(name)
            elif type(value) not in replicate.CONTAINERS:
                self.leads_to_part |= _leads_to_part(value)
            elif type(value) is not tuple or not {*map(type, value)} <= constants:
                self.watched.append(value)


class _Plan:
    """The state of the module when its replicas were made and last filled.

    Attributes
    ----------
    parts : list of Module
    attributes : _Dicts
        ``__dict__`` of each part.
    live : list of (int, str)
        Attributes whose values are renewed in each forward, by part.
    tensors : list of (int, str, str, int)
        Part, ``"_parameters"`` or ``"_buffers"``, name, and number of the tensor.
    counts : tuple of int
        The references to each of a member's objects, if nothing else holds it.
    """

    def __init__(self, parts: list[Module], entries: Entries) -> None:
        self.parts = parts
        self.attributes = _Dicts(part.__dict__ for part in parts)
        self.tensors: list[tuple[int, str, str, int]] = []
        self._kinds = list(map(type, parts))
        self._children = _Dicts(part._modules for part in parts)
        children = chain(*(of.values() for of in self._children.dicts))
        parents = Counter(map(id, children))
        # Of a part: `shells`, `_objects`, each parent, and what is expected of it.
        of_parts = [2 + 2 * parents[id(part)] for part in parts]
        # Of `__dict__`: its part, a list, `_objects`. Of the three dictionaries in it:
        # `__dict__`, what is expected of it, a list, `_objects`.
        self.counts = (*of_parts, *len(parts) * [3], *3 * len(parts) * [4])
        self._names = entries.sizes, entries.names
        self._ids: list[int] = []
        self._ids_by_place: list[int] = []
        self._sorted = [_Sorted(part.__dict__) for part in parts]
        self._gather(range(len(parts)))

    def fits(self, parts: list[Module], entries: Entries) -> bool:
        """Tell whether the module consists of the same parts, under the same names."""
        return (
            len(parts) == len(self.parts)
            and all(map(operator.is_, parts, self.parts))
            and list(map(type, parts)) == self._kinds
            and not self._children.differing()
            and (entries.sizes, entries.names) == self._names
        )

    def changed(self) -> list[int]:
        """Return the numbers of parts whose attributes have changed."""
        held = self.attributes.dicts
        found = set(self.attributes.differing())
        found |= {i for i, name in self.live if not _is_live(held[i].get(name))}
        return sorted(found | {i for i, value in self._watched if _is_live(value)})

    def take_over(self, changed: list[int]) -> None:
        """Expect the present attributes of these parts."""
        for i in changed:
            self._sorted[i] = _Sorted(self.attributes.dicts[i])
        if changed:
            self._gather(changed)

    def leads_to_part(self, hooks: list[tuple[int, str, dict[Any, Any]]]) -> bool:
        """Tell whether anything but its parent refers to a part."""
        held = self.attributes.dicts
        return (
            self._leads_to_part
            or any(_leads_to_part(held[i][name]) for i, name in self.live)
            or any(any(map(_leads_to_part, of.values())) for _, _, of in hooks)
        )

    def hooks(self) -> list[tuple[int, str, dict[Any, Any]]]:
        """Return the registered hooks of forward and backward, by part."""
        if not any(self._hooks):
            return []
        held = enumerate(self.attributes.dicts)
        return [
            (i, at, of[at]) for i, of in held for at in replicate.HOOKS if of.get(at)
        ]

    def live_of(self, i: int) -> list[str]:
        """Return the live attributes of a part."""
        return self._sorted[i].live

    def _gather(self, changed: Iterable[int]) -> None:
        for i in changed:
            self.attributes.note(i, self.live_of(i), _ANY)
        parts = list(enumerate(self._sorted))
        self.live = [(i, name) for i, of in parts for name in of.live]
        self._watched = [(i, value) for i, of in parts for value in of.watched]
        self._leads_to_part = any(of.leads_to_part for of in self._sorted)
        self._hooks = replicate.hook_dicts(self.attributes.dicts)

    def locate(self, entries: Entries, tensors: Sequence[torch.Tensor]) -> None:
        """Note the place of each tensor."""
        ids, ids_by_place = list(map(id, tensors)), entries.ids()
        if (ids, ids_by_place) == (self._ids, self._ids_by_place):
            return
        number = {key: n for n, key in enumerate(ids)}
        self.tensors = [
            (i // 2, _TENSORS[i % 2], name, number[id(tensor)])
            for i, of in enumerate(entries.dicts())
            for name, tensor in of.items()
            if tensor is not None
        ]
        self._ids, self._ids_by_place = ids, ids_by_place  # last, in case of Ctrl-C

    def copies(self, shells: list[Module], flat: Sequence[Any]) -> dict[int, Any]:
        """Return a replica's tensors and parts, by the ids of the originals."""
        keys = [*self._ids, *map(id, self.parts)]
        return dict(zip(keys, [*flat, *shells], strict=True))


class _Member:
    """One replica."""

    def __init__(self, plan: _Plan) -> None:
        self.shells = list(map(replicate.shell_of, plan.parts))
        self.stale = set(range(len(plan.parts)))
        self._plan = plan
        self._held = _Dicts(())
        self._hooks: list[dict[Any, Any]] = []
        self._children = _Dicts(())
        self._places = _Dicts(())
        self._is_filled = False
        self._objects: list[Any] = []

    # ---- for a forward --------------------------------------------------------------

    def fill(
        self,
        entries: Entries,
        flat: Sequence[torch.Tensor],
        bring: Bring,
        hooks: list[tuple[int, str, dict[Any, Any]]],
    ) -> None:
        """Give the replica this forward's tensors, and the module's attributes."""
        self._is_filled = True
        plan, stale = self._plan, self.stale
        copies: dict[int, Any] = {}
        if stale or plan.live or hooks:
            copies = plan.copies(self.shells, flat)
        if stale:
            self._fill_parts(entries, copies, bring)
        held = self._held.dicts
        for i, name in plan.live:
            if i not in stale:
                value = plan.attributes.dicts[i][name]
                held[i][name] = replicate.renewed(value, copies, bring)
        for i, name, values in hooks:
            held[i][name].update(replicate.hooks_of(values, copies, bring))
        for i, kind, name, number in plan.tensors:
            held[i][kind][name] = flat[number]

    def _fill_parts(
        self, entries: Entries, copies: dict[int, Any], bring: Bring
    ) -> None:
        """Make the dictionaries of stale parts again."""
        dicts = entries.dicts()
        for i in self.stale:
            part, shell = self._plan.parts[i], self.shells[i]
            held = shell.__dict__
            held.clear()
            held.update(part.__dict__)
            own = dicts[2 * i : 2 * i + 2]
            replicate.fill(part, shell, own, copies, bring)
        held_by = [shell.__dict__ for shell in self.shells]
        self._held = _Dicts(held_by)
        for i in {i for i, _ in self._plan.live}:
            self._held.note(i, self._plan.live_of(i), None)
        self._children = _Dicts(held["_modules"] for held in held_by)
        self._places = _Dicts(held[kind] for held in held_by for kind in _TENSORS)
        self._places.expected = list(map(dict.fromkeys, self._places.dicts))
        self._hooks = replicate.hook_dicts(held_by)
        places = self._places.dicts
        self._objects = [*self.shells, *held_by, *self._children.dicts, *places]
        self.stale = set()  # last, in case of Ctrl-C

    # ---- after a forward ------------------------------------------------------------

    def clean(self) -> bool:
        """Remove what a forward left; return False if anything holds the replica."""
        if not self._is_filled:
            return True
        if (
            self._children.differing()
            or self._plan.counts != _native.reference_counts(self._objects)
            or any(map(weakref.getweakrefcount, self.shells))
        ):
            return False
        self._held.restore()
        self._places.restore()
        if any(self._hooks):
            for hooks in self._hooks:
                hooks.clear()
        self._is_filled = False
        return True


class Shells:
    """The replicas of a wrapper, without replica 0, which is the module itself."""

    def __init__(self) -> None:
        self._plan: _Plan | None = None
        self._members: list[_Member] = []

    def replicas(
        self,
        parts: list[Module],
        entries: Entries,
        tensors: Sequence[torch.Tensor],
        flat: Sequence[Sequence[torch.Tensor]],
        bring: Sequence[Bring],
    ) -> list[Module] | None:
        """Return replicas with their own tensors; None if they cannot be kept.

        Parameters
        ----------
        parts : list of Module
            The module, and all its parts.
        entries : Entries
            Its parameters and buffers.
        tensors, flat : sequence
            The same ones, each once, and those of each replica.
        bring : sequence of callable
            Moves tensors of attributes to the device, for each replica.
        """
        plan = self._look(parts, entries)
        hooks = plan.hooks() if plan is not None else []
        if plan is None or plan.leads_to_part(hooks):
            self._members = []
            return None
        plan.locate(entries, tensors)
        while len(self._members) < len(flat):
            self._members.append(_Member(plan))
        for k, (own, way) in enumerate(zip(flat, bring, strict=True)):
            if not self._members[k].clean():
                self._members[k] = _Member(plan)
            self._members[k].fill(entries, own, way, hooks)
        return [member.shells[0] for member in self._members[: len(flat)]]

    def _look(self, parts: list[Module], entries: Entries) -> _Plan | None:
        """Return the plan, with the changes of the module taken over."""
        if self._plan is not None and self._plan.fits(parts, entries):
            changed = self._plan.changed()
            for member in self._members:  # first, in case of Ctrl-C
                member.stale.update(changed)
            self._plan.take_over(changed)
        else:
            self._members = []
            self._plan = _Plan(parts, entries) if can_be_kept(parts) else None
        return self._plan

    def finish(self) -> None:
        """Remove what a forward has set, in replicas that nothing else holds."""
        for member in self._members:
            member.clean()
