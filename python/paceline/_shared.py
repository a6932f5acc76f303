"""A model in shared memory: the caller's side of what its replicas see.

Parameters lie in the arena themselves, so that an optimizer's step needs no copy; their
identity is kept, whoever made the optimizer and when.  Buffers stay where they are, and
are copied to their places before each forward.  Each replica has a row of slots for the
gradients of its part of a batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from paceline import (
    _code,
    _held,
    _native,
    _protocol,
    _strays,
    _torch,
    _torch_ops,
    _torch_weights,
    _travel,
)

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
GLOBAL_HOOKS = "hooks are registered for all modules"
_STRUCTURE = frozenset({"_parameters", "_buffers", "_modules", *_HOOKS})

Home = tuple[_native.Arena, _travel.Place]

_alive: weakref.WeakSet[SharedModel] = weakref.WeakSet()


def reason_to_stay(module: nn.Module, is_first: bool = True) -> str | None:
    """Say why a module cannot have replicas in other processes, or None.

    Memory that parameters share with other tensors matters when they are moved for the
    first time; later (``vector_to_parameters``) they are moved back to where they were.
    """
    if _torch.has_global_hooks():
        return GLOBAL_HOOKS
    for name, part in module.named_modules():
        which = f"'{name}' ({type(part).__name__})"
        if _has_hooks(part):
            return f"{which} has hooks, whose side effects belong in this process"
        if isinstance(part, torch.jit.ScriptModule):
            return f"{which} is a ScriptModule"
    for name, tensor in _named_tensors(module):
        if _torch.is_lazy(tensor):
            return f"'{name}' has no shape yet"
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return f"'{name}' is a {tensor.layout} tensor on {tensor.device}"
    for name, parameter in module.named_parameters():
        if not parameter.is_leaf:
            return f"'{name}' is computed from other tensors (functional_call)"
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            return f"buffer '{name}' requires a gradient"
    return _reason_of_aliases(module) if is_first else None


def _has_hooks(part: nn.Module) -> bool:
    """Tell whether a module has hooks that do not just compute its own weights."""
    return any(
        not (
            hooks == "_forward_pre_hooks"
            and all(map(_torch_weights.computes, live.values()))
        )
        for hooks in _HOOKS
        if (live := getattr(part, hooks, None))
    )


def _computed(module: nn.Module) -> frozenset[int]:
    """Return the ``id`` of attributes that such hooks compute anew in each forward."""
    found: set[int] = set()
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            if _torch_weights.computes(hook):
                found.add(id(vars(part).get(_torch_weights.name_computed(hook))))
    return frozenset(found)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _reason_of_aliases(module: nn.Module) -> str | None:
    """Say what shares memory with a parameter, which is about to be moved."""
    owners: dict[int, tuple[str, torch.Tensor]] = {}
    others: list[tuple[str, torch.Tensor]] = list(module.named_buffers())
    computed = _computed(module)
    for prefix, part in module.named_modules():
        others += [
            (f"{prefix}.{name}", value)
            for name, value in vars(part).items()
            if isinstance(value, torch.Tensor) and id(value) not in computed
        ]
    for name, tensor in [*module.named_parameters(), *others]:
        if tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        where = tensor.untyped_storage().data_ptr()
        if is_parameter:
            _, other = owners.setdefault(where, (name, tensor))
        else:
            _, other = owners.get(where, (name, tensor))
        if other is not tensor:
            return f"'{name}' and '{owners[where][0]}' share their memory"
    return None


class SharedModel:
    """A module whose parameters lie in shared memory.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters are moved there; they stay the same objects.
    n_rows : int
        How many replicas leave gradients.
    is_first : bool
        Whether it was not in shared memory before.
    made : set of int
        The ``id`` of tensors that forwards have made, and left as attributes: their
        values travel, and not what they were computed from.

    Raises
    ------
    CannotTravelError
        If the module cannot be run in another process.
    """

    def __init__(
        self,
        module: nn.Module,
        n_rows: int,
        is_first: bool = True,
        made: frozenset[int] = frozenset(),
    ) -> None:
        reason = reason_to_stay(module, is_first)
        if reason is not None:
            raise _travel.CannotTravelError(reason)
        self.module = module
        parameters = list(module.parameters())
        owners = list(_owners_of_buffers(module))
        grown = [i for i, p in enumerate(parameters) if p.requires_grad]
        self._owners, self._tied, self._is_stale = owners, _ties(owners), False
        self._keys: dict[int, Any] = {}
        self._keys.update((id(p), ("parameter", i)) for i, p in enumerate(parameters))
        self._keys.update(
            (id(owner[name]), ("buffer", i)) for i, (owner, name) in enumerate(owners)
        )
        self._made: list[torch.Tensor] = []
        self.homes = _travel.Homes()
        self.code = _code.Code(list(module.modules()))
        self._watch()
        others: list[torch.Tensor] = []
        held = _travel.Travelled(self._held.values())
        self._skeleton = _travel.dumps(
            (module, owners, held),
            self._keys,
            others,
            as_data=_computed(module) | made,
            homes=self.homes,
            asked=held.asked,
        )
        self._held.keep(held.found)
        self._all_keys.update(self._held.keys())
        self._hidden: list[list[Any]] = [
            [value, value._version]
            for value in others
            if not (self._held.has(value) or self.code.has_tensor(value))
            and not value.is_inference()
        ]
        self._lay_out(
            parameters, [owner[name] for owner, name in owners], grown, n_rows
        )
        self._parameters = parameters
        self._placed = _native.Placed(list[torch.Tensor](parameters), self._views)
        self._buffers = _native.Placed(owners, self._buffer_views)
        self._grown = grown
        self.n_slots = len(grown)
        self.slots: _native.Slots | None = None
        if grown:
            self.slots = _native.Slots([parameters[i] for i in grown], self._rows)
        self._trainable = self._placed.trainable()
        self._trained = list(range(len(grown)))
        self._buffers.save()
        _alive.add(self)

    # ---- memory ----------------------------------------------------------------------

    def _lay_out(
        self,
        parameters: list[nn.Parameter],
        buffers: list[torch.Tensor],
        grown: list[int],
        n_rows: int,
    ) -> None:
        """Make the arena, and move into it what no other wrapper has in one."""
        found = [_place_elsewhere(p) for p in parameters]
        moving = [p for p, place in zip(parameters, found, strict=True) if not place]
        places, end = _travel.lay_out(moving, 0)
        self._buffer_places, end = _travel.lay_out(buffers, end)
        self._buffer_places = [self._buffer_places[i] for i in self._tied]
        self._row_places = []
        for _ in range(n_rows):
            row, end = _travel.lay_out([parameters[i] for i in grown], end)
            self._row_places.append(row)
        arena = _native.Arena(max(end, 1))
        own = iter(places)
        self.places: list[Home] = [place or (arena, next(own)) for place in found]
        self._views = []
        for parameter, (home, place) in zip(parameters, self.places, strict=True):
            view = place.view_in(home)
            self._views.append(view)
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
        self.arena = arena
        self._buffer_views = [place.view_in(arena) for place in self._buffer_places]
        self._rows = [
            [place.view_in(arena) for place in row] for row in self._row_places
        ]

    def place_of(self, parameter: nn.Parameter) -> Home | None:
        """Return where a parameter lies, if it lies in this model's place for it."""
        key = self._keys.get(id(parameter))
        if key is None or key[0] != "parameter":
            return None
        if self._parameters[key[1]] is not parameter:
            return None
        if self._views[key[1]].data_ptr() != parameter.data_ptr():
            return None
        place: Home = self.places[key[1]]
        return place

    def describe(self, row: int) -> _protocol.Model:
        """Return what replica `row` + 1 builds its module of."""
        arenas: list[Any] = []
        for home, _ in [*self.places, (self.arena, None)]:
            if home not in arenas:
                arenas.append(home)
        return _protocol.Model(
            arenas=[(arena.fd, arena.n_bytes) for arena in arenas],
            parameters=[
                (arenas.index(home), place, _travel.describe(parameter))
                for parameter, (home, place) in zip(
                    self._parameters, self.places, strict=True
                )
            ],
            own_arena=arenas.index(self.arena),
            buffers=self._buffer_places,
            gradients=list(zip(self._grown, self._row_places[row], strict=True)),
            skeleton=self._skeleton,
            libraries=_torch_ops.loaded_libraries(),
            path=[str(path) for path in sys.path],
        )

    # ---- changes ---------------------------------------------------------------------

    def _watch(self) -> None:
        self._modules = list(self.module.modules())
        # Attributes may hold parts of the module: those are the replica's own there.
        self._all_keys = dict(self._keys)
        self._all_keys.update(
            (id(part), ("module", i)) for i, part in enumerate(self._modules)
        )
        self._mirror = _native.Mirror([])
        self._held = _held.Held(
            self._mirror, self._modules, set(self._all_keys), self.homes
        )
        self._kinds: dict[int, tuple[str, dict[str, Any], int]] = {}
        for index, part in enumerate(self._modules):
            for name in ("_parameters", "_buffers", "_modules", *_HOOKS):
                live = vars(part)[name]
                self._kinds[self._mirror.add(live)] = name, live, index

    def changes(self) -> dict[str, Any] | None:
        """Return what replicas have to hear; None where the model is another one.

        Raises
        ------
        CannotTravelError
            If it has changed into one that cannot be run in another process.
        """
        news: dict[str, Any] = {}
        if _torch.has_global_hooks():
            raise _travel.CannotTravelError(GLOBAL_HOOKS)
        if self._is_stale or self._placed.moved() or not self._buffers.save():
            return None
        if any(value._version != version for value, version in self._hidden):
            return None
        globals_read = self.code.changes()
        if globals_read is None:
            return None
        if globals_read:
            news["code"] = _code.assignments(globals_read, self.homes)
            if news["code"] is None:
                return None
        if differing := self._mirror.differing():
            if self._is_another(differing):
                return None
            self._is_stale = True  # until it is told: nobody else knows what it was
            try:
                told = self._held.tell(
                    [at for at in differing if at not in self._kinds],
                    self._all_keys,
                    _computed(self.module) | frozenset(map(id, self._made)),
                )
            except _held.LostError:
                return None
            self._made = []
            self._is_stale = False
            if told is not None:
                news["attributes"] = told
        if not self._placed.is_trainable_as(self._trainable):
            trainable = self._placed.trainable()
            if any(
                trainable[i] and i not in self._grown for i in range(len(trainable))
            ):
                return None
            self._trainable = trainable
            news["trainable"] = bytes(trainable[i] for i in self._grown)
            self._trained = [slot for slot, i in enumerate(self._grown) if trainable[i]]
        return news

    def _is_another(self, differing: Sequence[int]) -> bool:
        """Tell whether parameters, buffers, parts or hooks came, went or parted."""
        for at in differing:
            if at not in self._kinds:
                _, before, after = self._mirror.delta(at)
                if isinstance(self._mirror.owner(at), nn.Module) and not (
                    _STRUCTURE.isdisjoint(before.keys() | after.keys())
                ):
                    return True
                continue
            kind, live, index = self._kinds[at]
            if kind in _HOOKS and live and _has_hooks(self._modules[index]):
                reason = reason_to_stay(self.module)
                raise _travel.CannotTravelError(reason or "a module has hooks")
            if kind != "_buffers" or not self._has_buffers_alike(at):
                return True
            self._mirror.accept(at)
        return False

    def _has_buffers_alike(self, at: int) -> bool:
        """Tell whether no buffer came, went, or parted from its other name."""
        _, before, after = self._mirror.delta(at)
        return (
            before.keys() == after.keys()
            and all((x is None) == (before[name] is None) for name, x in after.items())
            and _ties(self._owners) == self._tied
        )

    def forward_ends(self) -> None:
        """Take what replica 0's forward has set, as the other replicas' did theirs.

        Raises
        ------
        RuntimeError
            If the forward has changed the module's structure.
        """
        self.code.accept()
        for hidden in self._hidden:
            hidden[1] = hidden[0]._version
        differing = self._mirror.differing()
        if not differing:
            return
        attributes = []
        for at in differing:
            if at not in self._kinds:
                attributes.append(at)
                continue
            kind, _, index = self._kinds[at]
            if kind == "_buffers":
                self._is_stale |= not self._has_buffers_alike(at)
            if kind in ("_parameters", "_modules"):
                raise RuntimeError(
                    f"{type(self._modules[index]).__name__} has changed its {kind} in "
                    "forward, after its replicas were made: run the bare module once "
                    "on a small batch before you wrap it; the next call works"
                )
            self._mirror.accept(at)
        self._held.accept(attributes)

    def results(self) -> list[torch.Tensor]:
        """Return the attributes that are news, and results of a computation."""
        deltas = [
            self._mirror.delta(at)[2]
            for at in self._mirror.differing()
            if isinstance(self._mirror.owner(at), nn.Module)
        ]
        return [
            value
            for after in deltas
            for value in after.values()
            if isinstance(value, torch.Tensor) and value.grad_fn is not None
        ]

    def forward_ends_alone(self, before: Sequence[torch.Tensor] = ()) -> None:
        """Note what a forward has left that not all replicas took part in.

        They hear of it later; the results among it as values, and not as what would
        want a gradient.  What `before` has was there before that forward.
        """
        known = set(map(id, before))
        self._made += [value for value in self.results() if id(value) not in known]

    def made(self) -> frozenset[int]:
        """Return the ``id`` of tensors that forwards have left as attributes."""
        return frozenset(self._held.unknown_tensors()).union(map(id, self._made))

    @property
    def trained(self) -> list[int]:
        """The slots of the parameters that want a gradient now."""
        return self._trained

    def parameters_of(self, slots: list[int]) -> list[nn.Parameter]:
        """Return the parameters of some slots."""
        return [self._parameters[self._grown[slot]] for slot in slots]

    def take(
        self, masks: tuple[bytes, ...], slots: list[int], strays: _strays.Strays
    ) -> list[torch.Tensor | None]:
        """Return the sum of what replicas have left in each slot, or None.

        Those of `slots` are on their way to autograd, which calls hooks with whatever
        comes: theirs get zeros where the loss leaves out the outputs that would tell.
        """
        assert self.slots is not None
        found = self.slots.take(masks)
        hooked = self.slots.hooked()
        if hooked is None:
            return found
        strayed = {slot for slot, _ in strays}
        for slot in slots:
            if found[slot] is None and hooked[slot] and slot not in strayed:
                found[slot] = torch.zeros_like(self._rows[0][slot])
        return found

    def add_stray(self, slot: int, stray: torch.Tensor) -> None:
        """Add a gradient that no slot can hold to its parameter's."""
        parameter = self._parameters[self._grown[slot]]
        before = parameter.grad
        parameter.grad = stray if before is None else before + stray

    def hooked(self) -> bytes | None:
        """Return a byte a slot: whether its parameter has hooks; None: none has."""
        return self.slots.hooked() if self.slots is not None else None


def _place_elsewhere(parameter: nn.Parameter) -> Home | None:
    """Return where another wrapper of this process has put a parameter."""
    for model in _alive:
        place = model.place_of(parameter)
        if place is not None:
            return place
    return None


def _ties(owners: list[tuple[dict[str, Any], str]]) -> list[int]:
    """Return, for each buffer, the first that is the same tensor."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(owner[name]), i) for i, (owner, name) in enumerate(owners)
    ]


def _owners_of_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the dictionary and the name of each buffer, under each of its names."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                yield part._buffers, name
