"""Who is compared.  Each is a way to wrap a module; nothing else differs.

A contestant is imported when it is wanted, so that the benchmark runs, and says who is
missing, where one of them is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Contestant:
    """A name for tables, a line for readers, the way to wrap a module.

    Who is `by_hand` takes part where it is asked for by name.
    """

    name: str
    what: str
    wrap: Callable[[nn.Module], nn.Module]
    by_hand: bool = False


def wrap_torch(module: nn.Module) -> nn.Module:
    """Wrap in torch's DDP with its defaults."""
    return nn.parallel.DistributedDataParallel(module)


def wrap_torch_view(module: nn.Module) -> nn.Module:
    """Wrap in torch's DDP with gradients that are views of its buckets."""
    return nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def wrap_paceline(module: nn.Module) -> nn.Module:
    """Wrap in Paceline's DDP with its defaults."""
    import paceline

    wrapped: nn.Module = paceline.DistributedDataParallel(module)
    return wrapped


def wrap_unrecorded(module: nn.Module) -> nn.Module:
    """Wrap in Paceline's DDP without its recorder, which is made as the module is."""
    before = os.environ.get("PACELINE_RECORDER")
    os.environ["PACELINE_RECORDER"] = "0"
    try:
        return wrap_paceline(module)
    finally:
        del os.environ["PACELINE_RECORDER"]
        if before is not None:
            os.environ["PACELINE_RECORDER"] = before


UNRECORDED = "unrecorded"
FLOOR, TORCH, TORCH_VIEW, PACELINE = "none", "torch", "torch-view", "paceline"
ALL = [
    Contestant(FLOOR, "the bare module, no communication", lambda module: module),
    Contestant(TORCH, "torch's DDP, defaults", wrap_torch),
    Contestant(TORCH_VIEW, "torch's DDP, gradient_as_bucket_view", wrap_torch_view),
    Contestant(PACELINE, "Paceline's DDP, defaults", wrap_paceline),
    Contestant(UNRECORDED, "Paceline's DDP, no recorder", wrap_unrecorded, True),
]
BY_NAME = {contestant.name: contestant for contestant in ALL}
BY_DEFAULT = [contestant.name for contestant in ALL if not contestant.by_hand]


def why_missing(name: str) -> str | None:
    """Say why a contestant cannot take part, or None if it can."""
    if name not in (PACELINE, UNRECORDED):
        return None
    try:
        import paceline  # noqa: F401
    except ImportError as error:
        return str(error)
    return None
