"""Whether the tensors that ranks synchronise have changed since wrapping."""

from __future__ import annotations

import weakref
from typing import Any

from paceline import _native
from paceline._ddp.model_spec import Model, Watch


class Changes:
    """Notices changes of the parameters and buffers that travel.

    At each forward a watch tells cheaply if nothing has changed at all.  If
    something has, this compares what travels with what was wrapped: a module without
    parameters, for example, concerns its own rank only.  `buffers` are those that
    travel; the reducer reads them in each step.
    """

    def __init__(
        self,
        wrapper: Any,
        model: Model,
        buffers: list[tuple[str, dict[str, Any], str]],
        reducer: _native.Reducer,
    ) -> None:
        # The session, which owns this, has both; it may not keep them alive.
        self._wrapper: Any = weakref.proxy(wrapper)
        self._reducer: _native.Reducer = weakref.proxy(reducer)
        self._trained = {id(p): p for p in model.trainable}  # they may be frozen later
        self._sends_buffers = bool(buffers)
        self._was = self._travelling(model)
        # Keep alive objects that are compared by id, so that no other gets the id.
        self._kept = buffers, [p.__dict__ for p in model.trainable]
        self._watch = Watch(wrapper)
        self.wraps_anew = False  # even unchanged; no rank takes over parameters

    def changed(self) -> bool:
        """Tell whether the model must be wrapped anew."""
        if self.wraps_anew or self._reducer.has_other_buffers:
            return True
        if not self._watch.changed():
            return False
        if self._travelling(Model.of(self._wrapper.module)) != self._was:
            return True
        self._watch = Watch(self._wrapper)
        return False

    def parameters_changed(self) -> bool:
        """Tell whether parameters changed, so that rank 0's are copied."""
        return not self.wraps_anew and (
            self._travelling(Model.of(self._wrapper.module))[0] != self._was[0]
        )

    def _travelling(self, model: Model) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return the parts of a model that ranks synchronise, of those wrapped."""
        parameters = {
            # When torch swaps two tensors, their __dict__ and hooks go along.
            key: (p.dtype, p.device, id(p.__dict__), key in model.declared_sparse)
            for _, p in model.parameters
            if (key := id(p)) in self._trained or p.requires_grad
        }
        buffers = {full: (id(owner), name) for full, owner, name in model.buffers}
        return parameters, buffers if self._sends_buffers else {}
