"""From a forward to its backward: the watcher of one forward's outputs."""

from __future__ import annotations

import traceback
import weakref
from typing import Any

from paceline import _native
from paceline._compat import torch_core
from paceline._ddp.autograd_contexts import watch_contexts
from paceline._ddp.session import Session


class ForwardPass:
    """The hook on a forward's outputs: it reports that their backward begins.

    It also finds the end of that backward, even if every gradient comes from a backward
    inside it, as with reentrant checkpointing.  Each forward has its own, which stores
    whether ``no_sync`` was on when the forward ended.  One forward has one backward,
    however many outputs it has.

    It refers to the session weakly: the session holds the model, which may keep its
    outputs, and with them this hook.
    """

    __slots__ = ("_is_synchronised", "_on_backward", "_reducer", "_session", "_token")

    def __init__(self, session: Session, reducer: _native.Reducer) -> None:
        self._session = weakref.ref(session)
        self._reducer = reducer
        self._on_backward = watch_contexts(reducer, session.model.trainable)
        self._is_synchronised = reducer.sync
        self._token = 0  # the reducer's token of the forward; 0 once its backward began

    def watch(self, output: Any) -> bool:
        """Watch for the backward of ``output``, and tell whether that is possible."""
        return torch_core.hook_outputs(output, self)

    def forward_ends(self, output: Any, is_training: bool) -> None:
        """Watch the output, and count the forward for the step's flags."""
        self._is_synchronised = self._reducer.sync
        is_watched = self.watch(output)
        self._token = self._reducer.forward_ends(is_watched, is_training)

    def forward_fails(self, is_training: bool) -> None:
        """Report that the module has raised, so that no backward follows."""
        self._reducer.forward_fails(is_training)
        session = self._session()
        if session is not None:
            session.world.note_exception(traceback.format_exc())

    def __call__(self, _: Any) -> None:
        reducer, session = self._reducer, self._session()
        if self._on_backward is None and session is not None:
            # RPC may have been initialised since the forward.
            self._on_backward = watch_contexts(reducer, session.model.trainable)
        if self._on_backward is not None:
            self._on_backward()
        is_synchronised = self._is_synchronised or (
            session is not None and session.requested_step == reducer.step
        )
        token, self._token = self._token, 0
        # If the model was wrapped anew, the backward belongs to the new reducer too.
        is_begun = reducer.on_output(is_synchronised, token)
        if not is_begun and session is not None and session.reducer is not None:
            session.reducer.on_output(is_synchronised, 0)


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(ForwardPass.__call__)
