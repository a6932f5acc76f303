"""What an engine is given for one forward of a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from paceline._recorder import Steps


class ReplicaCall(NamedTuple):
    """What an engine has to know of the wrapper that calls it.

    `replicate` and `parallel_apply` are methods of a subclass that make and run the
    replicas in the engine's place.  `keeps_outputs`: the outputs must outlive the next
    forward.  `raises_own_error`: a failed replica is the caller's error, and no reason
    to run by threads.  `steps` records what is waited for.
    """

    module: Module
    devices: list[torch.device]
    steps: Steps
    replicate: Callable[[Module, Sequence[Any]], list[Module]] | None = None
    parallel_apply: Callable[[Any, Any, Any], list[Any]] | None = None
    keeps_outputs: bool = False
    raises_own_error: bool = False
