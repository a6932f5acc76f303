"""Refuses, under ``strict``, what torch refuses and Paceline serves.

For programs that must also run with torch's own class: ``PACELINE_STRICT=1``, or
``DistributedDataParallel(..., strict=True)``.  The messages begin with torch's words.
The native reducer itself refuses a second gradient of a parameter in one backward, and
with ``find_unused_parameters`` a gradient of a parameter that no output depends on.
The classes here check which parameters a step used: each step of the reducer, which
owns them, calls them at its end.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline import _native
from paceline._compat import torch_core, torch_graph, torch_groups
from paceline._ddp.step_log import StepLog

UNFINISHED = (
    "Expected to have finished reduction in the prior iteration before starting a new "
    "one. "
)
_UNUSED = (
    "This error indicates that your module has parameters that were not used in "
    "producing loss. "
)
_ALL_OUTPUTS = (
    "making sure all `forward` function outputs participate in calculating loss. "
)
_ASK_FOR_SEARCH = (
    f"{_UNUSED}You can enable unused parameter detection by passing the keyword "
    "argument `find_unused_parameters=True` to "
    f"`torch.nn.parallel.DistributedDataParallel`, and by {_ALL_OUTPUTS}"
)
_SEARCHED = (
    f"{_UNUSED}Since `find_unused_parameters=True` is enabled, this likely  means that "
    "not all `forward` outputs participate in computing loss. You can fix this by "
    f"{_ALL_OUTPUTS}"
)
_ADVISE_DEBUG = (
    "\n In addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to "
    "either INFO or DETAIL to print out information about which particular parameters "
    "did not receive gradient on this rank as part of this error"
)
_CHANGED = (
    "This error indicates that your training graph has changed in this iteration, "
    "e.g., one parameter is used in first iteration, but then got unused in the second "
    "iteration. this is not compatible with static_graph set to True."
)
LATE_STATIC = (
    "set_static_graph() should be called before training loop starts and after "
    "DistributedDataParallel is constructed. Pass static_graph=True to the "
    "constructor, or leave it out: paceline does not need it."
)


class DynamicGraph:
    """Gradients since the last forward, if the graph may change from step to step.

    Each step since then counts, since outputs may have separate backwards.  With
    `searches` (``find_unused_parameters``) outputs are searched for used parameters.
    """

    def __init__(
        self,
        reducer: _native.Reducer,
        parameters: Sequence[torch.nn.Parameter],
        searches: bool,
    ) -> None:
        self._reducer: _native.Reducer = weakref.proxy(reducer)
        self._parameters = parameters
        self._searches = searches
        self._counts = bytes(len(parameters))
        self._wanted = bytes([not searches]) * len(parameters)

    def __call__(self) -> None:
        self._counts = _combined(operator.or_, self._counts, self._reducer.ready_counts)

    def forward_ends(self, output: Any) -> None:
        """Search a forward's output for used parameters, with `searches`."""
        if not self._searches:
            return
        found = torch_graph.output_tensors(output)
        shown = torch_graph.mask_of_shown(found, self._parameters)
        # torch passes tensors in containers through one node, which then reaches all of
        # them, whichever outputs have a gradient.
        passed = _mask_of_passed(output, self._parameters)
        self._reducer.unused = bytes(not is_shown for is_shown in shown)
        self._wanted = _combined(operator.gt, shown, passed)

    def refusal(self, names: Sequence[str], rank: int) -> str | None:
        """Return torch's message if parameters were left out, else None."""
        if not any(self._counts):
            return None
        pairs = zip(self._counts, self._wanted, strict=True)
        missing = [i for i, (came, wanted) in enumerate(pairs) if wanted and not came]
        if missing:
            cause = _SEARCHED if self._searches else _ASK_FOR_SEARCH
            return _message(cause, names, rank, missing, "Leave out strict")
        self._counts = bytes(len(self._counts))
        return None


class StaticGraph:
    """Compares every step's graph with that of the first: ``static_graph``."""

    def __init__(
        self,
        reducer: _native.Reducer,
        parameters: Sequence[torch.nn.Parameter],
        log: StepLog,
    ) -> None:
        self._reducer: _native.Reducer = weakref.proxy(reducer)
        self._parameters = parameters
        self._log = log
        self._passed = bytes(len(parameters))
        self._first: bytes | None = None
        self._last: bytes | None = None  # None: only the first step was taken
        self._has_changed = False  # the last step used more than the first

    def __call__(self) -> None:
        counts = self._reducer.ready_counts
        if self._first is None:
            self._first = _combined(max, counts, self._passed)
            return
        self._last = counts
        pairs = zip(self._first, counts, strict=True)
        changed = [i for i, (then, now) in enumerate(pairs) if now > then]
        self._has_changed = bool(changed)
        if changed:
            message = (
                "Your training graph has changed in this iteration, e.g., one "
                "parameter is unused in first iteration, but then got used in the "
                "second iteration. this is not compatible with static_graph set to "
                f"True. (Parameter indices: {changed}.) Leave out static_graph, which "
                "paceline does not need, or strict."
            )
            self._log.note_error(message)
            raise RuntimeError(message)

    def forward_ends(self, output: Any) -> None:
        """Note parameters of the first step's outputs: torch passes all through."""
        if self._first is None:
            passed = _mask_of_passed(output, self._parameters)
            self._passed = _combined(operator.or_, self._passed, passed)

    def refusal(self, names: Sequence[str], rank: int) -> str | None:
        """Return torch's message if the last step differs from the first, else None."""
        if self._first is None or self._last is None or not any(self._last):
            return None
        pairs = zip(self._last, self._first, strict=True)
        missing = [i for i, (n, least) in enumerate(pairs) if n < least]
        if not missing and not self._has_changed:
            return None
        advice = "Leave out static_graph, or strict"
        return _message(_CHANGED, names, rank, missing, advice)


def _combined(of: Callable[[int, int], int], one: bytes, other: bytes) -> bytes:
    return bytes(itertools.starmap(of, zip(one, other, strict=True)))


def _mask_of_passed(output: Any, parameters: Sequence[torch.nn.Parameter]) -> bytes:
    return torch_graph.mask_of_shown(torch_core.tensor_leaves(output), parameters)


def _message(
    cause: str, names: Sequence[str], rank: int, missing: Sequence[int], advice: str
) -> str:
    indices = " ".join(map(str, missing)) or "none, but others did than in the first"
    listed = ", ".join(names[i] for i in missing)
    text = (
        f"\nParameter indices which did not receive grad for rank {rank}: {indices}"
        f"\nParameters which did not receive grad for rank {rank}: {listed}"
    )
    if not torch_groups.is_debugging():
        text += _ADVISE_DEBUG
    return f"{UNFINISHED}{cause}{text}\n{advice}: paceline averages what there is."


# These run in backwards, which torch.compile may trace.
torch_core.skip_frames(DynamicGraph.__call__, StaticGraph.__call__)
