"""The contestants.  Each is a way to wrap a module; nothing else differs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import paceline
from torch import nn


def wrap_unrecorded(module: nn.Module) -> nn.Module:
    """Wrap in Paceline's DDP without a recorder, which wrapping would create."""
    before = os.environ.get("PACELINE_RECORDER")
    os.environ["PACELINE_RECORDER"] = "0"
    try:
        return paceline.DistributedDataParallel(module)
    finally:
        del os.environ["PACELINE_RECORDER"]
        if before is not None:
            os.environ["PACELINE_RECORDER"] = before


UNRECORDED = "unrecorded"
FLOOR, TORCH, TORCH_VIEW, PACELINE = "none", "torch", "torch-view", "paceline"
WRAP: dict[str, Callable[[nn.Module], nn.Module]] = {
    FLOOR: lambda module: module,
    TORCH: nn.parallel.DistributedDataParallel,
    TORCH_VIEW: lambda module: nn.parallel.DistributedDataParallel(
        module, gradient_as_bucket_view=True
    ),
    PACELINE: paceline.DistributedDataParallel,
    UNRECORDED: wrap_unrecorded,
}
BY_DEFAULT = [FLOOR, TORCH, TORCH_VIEW, PACELINE]


def split_names(parser: Any, text: str, known: Collection[str]) -> list[str]:
    """Split a list at commas; every name must be known."""
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"unknown {name!r}; known: {', '.join(known)}")
    return list(dict.fromkeys(names))
