"""Where a model's tensors lie in shared memory, and what replicas leave there.

Parameters lie in shared memory themselves, so that an optimizer's step needs no copy;
their identity is kept, whoever made the optimizer and when.  Buffers stay where they
are, and are copied to their places before each forward.  Each replica has a row of
slots for the gradients of its part of a batch.
"""

from __future__ import annotations

import contextlib
import operator
import os
from typing import Any

import torch
from torch import nn

from paceline import _native
from paceline._compat import odd_tensors, torch_core
from paceline._dp.process import pickling

Owner = tuple[dict[str, Any], str]
"""The dictionary that holds a buffer, and its name there."""
Masks = tuple[bytes, ...]
"""Of each replica, a byte a slot: whether there is a gradient in it."""


class ReplicaGradients:
    """The gradients of parameters that replicas leave in shared memory.

    `rows` are the slots of each replica; `slots` is None where no parameter has one.
    `deferred` are masks of the gradients that are added when the backward ends.
    """

    deferred: Masks

    def __init__(
        self, parameters: list[nn.Parameter], rows: list[list[torch.Tensor]]
    ) -> None:
        self.parameters = parameters
        self._rows = rows
        self.slots: _native.ReplicaGrads | None = None
        if parameters:
            self.slots = _native.ReplicaGrads([*parameters], rows)
        self.drop_deferred()

    def hooked(self) -> bytes | None:
        """Return a byte a slot: whether its parameter has hooks; None: none has."""
        return self.slots.hooked() if self.slots is not None else None

    def take(
        self, masks: Masks, slots: list[int], fallbacks: odd_tensors.OddTensors
    ) -> list[torch.Tensor | None]:
        """Return the sum of what replicas have left in each slot, or None.

        Those of `slots` are on their way to autograd, which calls hooks with whatever
        comes: they get zeros where the loss leaves out the outputs that lead to them.
        """
        if self.slots is None:
            return []
        sums = self.slots.take(masks)
        hooked = self.slots.hooked()
        if hooked is None:
            return sums
        has_fallback = {slot for slot, _ in fallbacks}
        for slot in slots:
            if sums[slot] is None and hooked[slot] and slot not in has_fallback:
                sums[slot] = torch.zeros_like(self._rows[0][slot])
        return sums

    def defer(self, masks: Masks, fallbacks: odd_tensors.OddTensors) -> None:
        """Keep what replicas have left for the end of the backward."""
        self.deferred = masks + self.deferred[len(masks) :]
        self._fallbacks += fallbacks

    def drop_deferred(self) -> None:
        """Forget gradients of a backward that has failed."""
        self.deferred = ()
        self._fallbacks: odd_tensors.OddTensors = []

    def add_deferred(self) -> None:
        """Add what replicas have left to the parameters' gradients."""
        masks, fallbacks = self.deferred, self._fallbacks
        self.drop_deferred()
        if masks and self.slots is not None:
            self.slots.add(masks)
        for slot, gradient in fallbacks:
            parameter = self.parameters[slot]
            before = parameter.grad
            parameter.grad = gradient if before is None else before + gradient


class ModelMemory:
    """The memory that a model and its replicas share.

    Parameters are moved into it.  Those that lie there, or did until a wrapper was
    closed or this process was forked, stay where they are.

    Attributes
    ----------
    parameter_memory : dict
        Where parameters lie: shared memory by its address.
    places : list of (SharedMemory, Place)
        Of each parameter.
    replica_memory : SharedMemory
        Where the copies of buffers and the slots lie.
    with_slot : list of int
        The numbers of the parameters that have a slot.
    slot_places : list of list of Place
        Of the slots of each replica.
    """

    def __init__(
        self, parameters: list[nn.Parameter], buffers: list[Owner], n_rows: int
    ) -> None:
        self._pid = os.getpid()
        self._parameters = parameters
        self._tied = _tied(buffers)
        self._move(parameters)
        tensors = [owner[name] for owner, name in buffers]
        places, end = pickling.lay_out(tensors, 0)
        self.buffer_places = [places[i] for i in self._tied]
        self.with_slot = [i for i, p in enumerate(parameters) if p.requires_grad]
        wanting = [parameters[i] for i in self.with_slot]
        self.slot_places = []
        for _ in range(n_rows):
            row, end = pickling.lay_out(wanting, end)
            self.slot_places.append(row)
        self.replica_memory = memory = _native.SharedMemory(max(end, 1))
        self.buffer_views = [place.view_in(memory) for place in self.buffer_places]
        rows = [[place.view_in(memory) for place in row] for row in self.slot_places]
        self.gradients = ReplicaGradients(wanting, rows)

    def _move(self, parameters: list[nn.Parameter]) -> None:
        self.parameter_memory: dict[int, _native.SharedMemory] = {}
        shared = [self._place_now(p) for p in parameters]
        for memory in self.parameter_memory.values():
            memory.share()
        moving = [p for p, place in zip(parameters, shared, strict=True) if not place]
        places, end = pickling.lay_out(moving, 0)
        if moving:
            fresh = _native.SharedMemory(max(end, 1))
            self.parameter_memory[fresh.address] = fresh
        moved = iter([(fresh, place) for place in places] if moving else [])
        self.places = [place or next(moved) for place in shared]
        views = []
        for parameter, (memory, place) in zip(parameters, self.places, strict=True):
            view = place.view_in(memory)
            views.append(view)
            if view.data_ptr() != parameter.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
        self.placed = _native.SharedTensors(list[torch.Tensor](parameters), views)

    def _place_now(
        self, parameter: nn.Parameter
    ) -> tuple[_native.SharedMemory, pickling.Place] | None:
        """Return where a parameter lies, if it may stay there."""
        address = parameter.data_ptr()
        memory = _native.SharedMemory.holding(address)
        is_aligned = address % pickling.LEAST_ALIGNMENT == 0
        if memory is None or not is_aligned or not torch_core.is_dense(parameter):
            return None
        memory = self.parameter_memory.setdefault(memory.address, memory)
        return memory, pickling.place_of(parameter, address - memory.address)

    def fits(self, parameters: list[nn.Parameter], buffers: list[Owner]) -> bool:
        """Tell whether parameters and buffers can stay where they are."""
        wanted = {i for i, p in enumerate(parameters) if p.requires_grad}
        places, _ = pickling.lay_out([owner[name] for owner, name in buffers], 0)
        return (
            self._pid == os.getpid()  # a forked child has memory of its own
            and len(parameters) == len(self._parameters)
            and all(map(operator.is_, parameters, self._parameters))
            and not self.placed.moved()
            and wanted.issubset(self.with_slot)
            and _tied(buffers) == self._tied
            and [places[i] for i in self._tied] == self.buffer_places
        )

    def release(self) -> None:
        """Give the parameters ordinary memory, where no other model shares it.

        They stay at their addresses, so that nothing that is a view of them parts.
        """
        for memory in self.parameter_memory.values():
            with contextlib.suppress(MemoryError, OSError):  # it stays as it is
                memory.unshare()


def _tied(buffers: list[Owner]) -> list[int]:
    """Return, for each buffer, the first that is the same tensor."""
    first: dict[int, int] = {}
    return [
        first.setdefault(id(owner[name]), i) for i, (owner, name) in enumerate(buffers)
    ]
