"""From a forward to its backward: what watches the outputs of one forward."""

from __future__ import annotations

import traceback
import weakref
from typing import Any, Protocol

import torch

from paceline import _native
from paceline._compat import torch_core
from paceline._ddp.autograd_contexts import watch_contexts
from paceline._ddp.model_spec import Model


class Owner(Protocol):
    """What a forward needs of its wrapper's session."""

    world: _native.RankWorld
    reducer: _native.Reducer | None
    model: Model
    requested_step: int


class ForwardPass:
    """The hook on a forward's outputs: it says that the backward of them begins.

    The end of that is then known too: also where every gradient comes out of a backward
    inside it, as with reentrant checkpointing.  Each forward has one of its own, which
    remembers whether ``no_sync`` was on when it ended, and that one forward has one
    backward to come, however many its outputs.

    It refers to the session weakly: that knows the model, which may keep its outputs,
    and with them this.
    """

    __slots__ = ("_is_synchronised", "_on_backward", "_reducer", "_session", "_token")

    def __init__(self, session: Owner, reducer: _native.Reducer) -> None:
        self._session = weakref.ref(session)
        self._reducer = reducer
        self._on_backward = watch_contexts(reducer, session.model.trainable)
        self._is_synchronised = reducer.sync
        self._token = 0  # the reducer's, of the forward whose backward is to come

    def watch(self, output: Any) -> bool:
        """Have the beginning of the backward of ``output`` noticed, if it can be."""
        is_watched = False
        for leaf in torch_core.leaves_of(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self)  # type: ignore[no-untyped-call]
                is_watched = True
        return is_watched

    def forward_ends(self, output: Any, is_training: bool) -> None:
        """Watch what the forward has returned, and say so to the peers."""
        self._is_synchronised = self._reducer.sync
        is_watched = self.watch(output)
        self._token = self._reducer.forward_ends(is_watched, is_training)

    def forward_fails(self) -> None:
        """Say that the module has raised: no backward comes of this."""
        self._reducer.forward_fails()
        session = self._session()
        if session is not None:
            session.world.note_exception(traceback.format_exc())

    def __call__(self, gradient: torch.Tensor) -> None:
        reducer, session = self._reducer, self._session()
        if self._on_backward is None and session is not None:
            # RPC may have come since the forward.
            self._on_backward = watch_contexts(reducer, session.model.trainable)
        if self._on_backward is not None:
            self._on_backward()
        is_synchronised = self._is_synchronised or (
            session is not None and session.requested_step == reducer.step
        )
        token, self._token = self._token, 0
        # Where the model was wrapped anew since, this is a backward of that, too.
        is_begun = reducer.on_output(is_synchronised, token)
        if not is_begun and session is not None and session.reducer is not None:
            session.reducer.on_output(is_synchronised, 0)


# Called in backwards, which may be part of what torch.compile is given.
torch_core.skip_frames(ForwardPass.__call__)
