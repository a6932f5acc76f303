"""Who is compared.  Each is a way to wrap a module; nothing else differs.

A contestant is imported when it is wanted, so that the benchmark runs, and says who is
missing, where one of them is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Contestant:
    """A name for tables, a line for readers, the way to wrap a module."""

    name: str
    what: str
    wrap: Callable[[nn.Module], nn.Module]


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


FLOOR, TORCH, TORCH_VIEW, PACELINE = "none", "torch", "torch-view", "paceline"
ALL = [
    Contestant(FLOOR, "the bare module, no communication", lambda module: module),
    Contestant(TORCH, "torch's DDP, defaults", wrap_torch),
    Contestant(TORCH_VIEW, "torch's DDP, gradient_as_bucket_view", wrap_torch_view),
    Contestant(PACELINE, "Paceline's DDP, defaults", wrap_paceline),
]
BY_NAME = {contestant.name: contestant for contestant in ALL}


def why_missing(name: str) -> str | None:
    """Say why a contestant cannot take part, or None if it can."""
    return why_not_in_paceline("DistributedDataParallel") if name == PACELINE else None


def why_not_in_paceline(attribute: str) -> str | None:
    """Say why Paceline does not offer this name, or None if it does."""
    try:
        import paceline
    except ImportError as error:
        return str(error)
    if not hasattr(paceline, attribute):
        return f"paceline has no {attribute}"
    return None
