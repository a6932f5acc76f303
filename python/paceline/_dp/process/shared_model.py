"""A model in shared memory: the caller's side of what its replicas see.

::

    SharedModel    the module, and what of it has changed
      imported     what its code reaches in modules that workers import
      state        its plain attributes, and their snapshot
      memory       where parameters, buffers and gradients lie
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from paceline import _native
from paceline._compat import torch_core, torch_ops
from paceline._dp.process import imports, messages, obstacles, pickling, snapshot
from paceline._dp.process.model_memory import ModelMemory, Owner, ReplicaGradients
from paceline._replicas import replicate
from paceline._replicas.errors import (
    ReplicaFailedError,
    UnsupportedCallError,
    UnsupportedModelError,
    WrittenError,
)


class SharedModel:
    """A module whose parameters lie in shared memory.

    It is made in this order: what may raise comes before parameters are moved, and
    what watches tensors comes after that.

    1. The keys by which parameters and buffers are known to replicas.
    2. What the code imports, and the plain state; the state is pickled.
    3. The memory: that of `previous`, the model before it changed, where all fits, so
       that graphs of earlier forwards stay valid; else memory of its own.
    4. Copies of buffers, and which parameters are trained.

    `keeps_memory` tells whether the memory is that of `previous`; `active_slots` are
    the slots of the parameters that want a gradient now.
    """

    module: nn.Module
    state: snapshot.ModelState
    memory: ModelMemory

    def __init__(
        self,
        module: nn.Module,
        n_rows: int,
        script_globals: pickling.ScriptGlobals,
        previous: SharedModel | None = None,
    ) -> None:
        is_same = previous is not None and previous.module is module
        obstacle = obstacles.obstacle(module, not is_same)
        if obstacle is not None:
            raise obstacle
        self.module = module
        self.parts = list(module.modules())
        self._parameters = list(module.parameters())
        buffers = list(snapshot.owners_of_buffers(module))
        self._owners_of_buffers = buffers
        keys: dict[int, Any] = {}
        keys.update((id(p), ("parameter", i)) for i, p in enumerate(self._parameters))
        keys.update(
            (id(owner[name]), ("buffer", i)) for i, (owner, name) in enumerate(buffers)
        )
        self._keys = keys
        self.imported = imports.Imported(self.parts)
        made = previous.state.made() if is_same and previous is not None else ()
        self.state = snapshot.ModelState(self.parts, keys, script_globals, made)
        self._skeleton = self.state.skeleton()
        self.keeps_memory = False
        if previous is not None and previous.memory.fits(self._parameters, buffers):
            self.keeps_memory, self.memory = True, previous.memory
        else:
            self.memory = ModelMemory(self._parameters, buffers, n_rows)
        self._share_buffers(buffers)
        self._is_stale = False
        self._record_trainable()

    def _frozen(self) -> Iterable[torch.Tensor]:
        """Return what the replicas of the last forward took as not being trained."""
        if self.memory.placed.trainable() != self._trainable:
            for parameter, was in zip(self._parameters, self._trainable, strict=True):
                if not was:
                    yield parameter
        for owner, name in self._owners_of_buffers:
            buffer = owner.get(name)
            if isinstance(buffer, torch.Tensor):
                yield buffer

    def _share_buffers(self, buffers: list[Owner]) -> None:
        """Have buffers copied to their places; those with gaps or repeats by torch."""
        self._uneven: list[tuple[Owner, torch.Tensor]] = []
        dense: list[Owner] = []
        views = []
        for owner, view in zip(buffers, self.memory.buffer_views, strict=True):
            if torch_core.is_dense(owner[0][owner[1]]):
                dense.append(owner)
                views.append(view)
            else:
                self._uneven.append((owner, view))
        try:
            self._buffers = _native.SharedTensors(dense, views)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"a buffer cannot be shared: {error}") from None
        if not self._save_buffers():
            raise UnsupportedModelError("a buffer cannot be copied to shared memory")

    def _save_buffers(self) -> bool:
        """Copy buffers to their places; return False where one does not fit."""
        for (owner, name), view in self._uneven:
            buffer = owner.get(name)
            if (
                type(buffer) is not torch.Tensor
                or (buffer.shape, buffer.dtype) != (view.shape, view.dtype)
                or torch_core.is_dense(buffer)
            ):
                return False
            view.copy_(buffer)
        return self._buffers.save()

    def _record_trainable(self) -> None:
        self._trainable = self.memory.placed.trainable()
        self.active_slots = [
            slot for slot, i in enumerate(self.memory.with_slot) if self._trainable[i]
        ]

    @property
    def gradients(self) -> ReplicaGradients:
        """What replicas leave of gradients."""
        return self.memory.gradients

    def describe(self, row: int) -> messages.Model:
        """Return what replica `row` + 1 builds its module of."""
        memory = self.memory
        shared = [*memory.parameter_memory.values(), memory.replica_memory]
        return messages.Model(
            memory=[(each.fd, each.n_bytes) for each in shared],
            parameters=[
                (shared.index(home), place, pickling.describe(parameter))
                for parameter, (home, place) in zip(
                    self._parameters, memory.places, strict=True
                )
            ],
            replica_memory=shared.index(memory.replica_memory),
            buffers=memory.buffer_places,
            gradients=list(zip(memory.with_slot, memory.slot_places[row], strict=True)),
            skeleton=self._skeleton,
            keeps_memory=self.keeps_memory,
            imported=self.imported.entries,
            libraries=torch_ops.loaded_libraries(),
            path=[str(path) for path in sys.path],
        )

    # ---- changes ---------------------------------------------------------------------

    def changes(self) -> dict[str, Any] | None:
        """Return what replicas have to receive; None where the model goes anew."""
        if torch_core.has_global_hooks():
            raise UnsupportedCallError(obstacles.GLOBAL_HOOKS)
        if self._is_stale or self.memory.placed.moved() or not self._save_buffers():
            return None
        if not self.imported.check():
            return None
        update: dict[str, Any] = {}
        self._is_stale = True  # until it is sent: nobody else knows what it was
        attributes = self.state.changes()
        if attributes is None:
            return None
        self._is_stale = False
        if attributes:
            update["attributes"] = attributes
        placed, with_slot = self.memory.placed, self.memory.with_slot
        if placed.trainable() != self._trainable:
            self._record_trainable()
            if sum(map(bool, self._trainable)) > len(self.active_slots):
                self._is_stale = True  # one has no slot
                return None
            update["trainable"] = bytes(self._trainable[i] for i in with_slot)
        return update

    def forward_begins(self) -> None:
        """Record what replica 0's forward must leave as it is."""
        self.memory.placed.record_versions()

    def check_hooks(self) -> None:
        """Raise where replica 0's forward has registered hooks that stay.

        What decided that may be known to this process alone: transformers notes in a
        constructor what a forward is to record.
        """
        reason = obstacles.of_hooks(self.module) if self.state.has_other_hooks else None
        if reason is not None:
            raise ReplicaFailedError(
                UnsupportedCallError(f"after its forward, {reason}")
            )

    def check_unwritten(self) -> None:
        """Raise where replica 0's forward has written a parameter, and name it."""
        if written := self.memory.placed.written():
            raise self.error_of_written(written)

    def error_of_answer(self, kind: int, payload: bytes) -> WrittenError | None:
        """Return the error that a replica's answer stands for, if any."""
        if kind != messages.WRITTEN:
            return None
        return self.error_of_written(pickle.loads(payload))

    def error_of_written(self, written: list[int]) -> WrittenError:
        """Return what says that a forward has written parameters."""
        parameter = self._parameters[written[0]]
        names = [n for n, p in self.module.named_parameters() if p is parameter]
        return WrittenError(names[0] if names else f"number {written[0]}")

    def replicas_before(self, n: int) -> list[nn.Module]:
        """Return replicas for this process, as of before the last forward."""
        replicas = replicate.replicas_of(self.parts, [{} for _ in range(n)])[1:]
        for replica in replicas:
            parts = replicate.parts_of(replica)
            for i, attributes in self.state.before():
                vars(parts[i]).update(
                    (name, value)
                    for name, value in attributes.items()
                    if not isinstance(value, nn.Module)
                )
            owners = snapshot.owners_of_buffers(replica)
            for (owner, name), saved in zip(
                owners, self.memory.buffer_views, strict=True
            ):
                owner[name] = saved.clone()
        return replicas

    def forward_ends(self) -> None:
        """Take what replica 0's forward has set, as the other replicas' did theirs."""
        replicate.check_thawed(self.module, self._frozen())
        broken = self.state.forward_ends()
        self._is_stale |= self.state.is_stale
        if broken is not None:
            raise replicate.restructured(self.parts[broken])
