"""What a wrapper does at the end of each backward, once the averages are in place."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline import _native

if TYPE_CHECKING:
    from paceline._journal import Journal


class Finish:
    """Calls what was asked for, inside the backward: ``Reducer.on_finish``.

    It knows neither the wrapper nor the reducer, which owns it: a wrapper that is
    dropped must go at once.

    Attributes
    ----------
    always : list of callable
        Called after every step.
    """

    def __init__(self) -> None:
        self.always: list[Callable[[], object]] = []
        self._once: list[Callable[[], object]] = []

    def attach(self, reducer: _native.Reducer | None) -> None:
        """Have a reducer call this, if there is anything to call."""
        if reducer is not None:
            reducer.on_finish = self if self.always or self._once else None

    def once(self, reducer: _native.Reducer, call: Callable[[], object]) -> None:
        """Call ``call`` after the next step."""
        self._once.append(call)
        reducer.on_finish = self

    def __call__(self) -> None:
        once, self._once = self._once, []
        for call in (*self.always, *once):
            call()


def wait_for(futures: Iterable[Any]) -> None:
    """Wait for what a hook has begun."""
    for future in futures:
        future.wait()


class InBackward:
    """Steps the optimizers that ``_apply_optimizer_in_backward`` gave to parameters.

    They step by averages, so after the step of the reducer; then the gradients that
    they have used become None.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        Those that have such an optimizer.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters

    @classmethod
    def of(cls, parameters: Iterable[torch.nn.Parameter]) -> InBackward | None:
        """Take over from torch's hooks, which step by gradients of one rank."""
        owners = [p for p in parameters if getattr(p, "_in_backward_optimizers", None)]
        if not owners:
            return None
        home = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
        handles = getattr(home, "param_to_optim_hook_handle_map", {})
        for parameter in owners:
            for handle in handles.get(parameter, ()):
                handle.remove()
        return cls(owners)

    def __call__(self) -> None:
        for parameter in self._parameters:
            for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            parameter.grad = None


class Steady:
    """Holds every step's graph to that of the first: ``static_graph`` under strict.

    Parameters
    ----------
    reducer : paceline._native.Reducer
        Whose steps.
    journal : paceline._journal.Journal
        Where a refusal is noted.
    """

    def __init__(self, reducer: _native.Reducer, journal: Journal) -> None:
        self._reducer = weakref.ref(reducer)
        self._journal = journal
        self.first: bytes | None = None
        self.has_changed = False  # the last step used what the first had not

    def __call__(self) -> None:
        reducer = self._reducer()
        assert reducer is not None, "called by its reducer alone"
        fires = reducer.fires
        if self.first is None:
            self.first = fires
        pairs = zip(self.first, fires, strict=True)
        changed = [i for i, (then, now) in enumerate(pairs) if now > then]
        self.has_changed = bool(changed)
        if changed:
            words = (
                "Your training graph has changed in this iteration, e.g., one "
                "parameter is unused in first iteration, but then got used in the "
                "second iteration. this is not compatible with static_graph set to "
                f"True. (Parameter indices: {changed}.) Leave out static_graph, which "
                "paceline does not need, or strict."
            )
            self._journal.note_error(words)
            raise RuntimeError(words)
