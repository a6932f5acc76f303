"""Whether what ranks synchronise has changed since a model was wrapped."""

from __future__ import annotations

import weakref
from typing import Any

from paceline import _native
from paceline._ddp.model_spec import Model, watch


class Changes:
    """Notices that parameters or buffers which travel have changed.

    A native watch says cheaply, at each forward, that nothing at all has.  Where
    something has, what travels is compared with what was wrapped: a module without
    parameters, say, is one rank's own affair.  `buffers` are those that travel; the
    reducer sees them in each step.
    """

    def __init__(
        self,
        wrapper: Any,
        model: Model,
        buffers: list[tuple[str, dict[str, Any], str]],
        reducer: _native.Reducer,
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self._reducer = weakref.ref(reducer)
        self._trained = {id(p): p for p in model.trainable}  # may be frozen later
        self._sends_buffers = bool(buffers)
        self._was = self._travelling(model)
        # What is compared by its id: alive, it is no other's.
        self._kept = buffers, [p.__dict__ for p in model.trainable]
        self._native = watch(wrapper)

    def changed(self) -> bool:
        """Tell whether the model is to be wrapped anew."""
        reducer = self._reducer()
        if reducer is not None and reducer.has_other_buffers:
            return True
        if not self._native.changed():
            return False
        wrapper = self._wrapper()
        if wrapper is None or self._travelling(Model.of(wrapper.module)) != self._was:
            return True
        self._native = watch(wrapper)
        return False

    def parameters_changed(self) -> bool:
        """Tell whether it is so not for the sake of the buffers alone."""
        wrapper = self._wrapper()
        return (
            wrapper is None
            or self._travelling(Model.of(wrapper.module))[0] != self._was[0]
        )

    def _travelling(self, model: Model) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return what the ranks synchronise of a model, of what was wrapped."""
        parameters = {
            # Where torch swaps two tensors, the attributes go over, with the hooks.
            key: (p.dtype, p.device, id(p.__dict__), key in model.declared_sparse)
            for _, p in model.parameters
            if (key := id(p)) in self._trained or p.requires_grad
        }
        buffers = {full: (id(owner), name) for full, owner, name in model.buffers}
        return parameters, buffers if self._sends_buffers else {}
