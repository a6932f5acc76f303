"""Mistakes of callers: what is wrong, and what to write."""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

import torch

_IN_LIBRARY = re.compile(r"(paceline|torch)(\.|$)")


def check_module(module: Any) -> None:
    """Raise TypeError unless the argument `module` is a module."""
    if isinstance(module, type):
        name = module.__name__
        raise TypeError(f"module is the class {name}: give an object, such as {name}()")
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {type(module).__name__}: give a torch.nn.Module")


def warn_of_scalars(n_replicas: int) -> None:
    """Warn of losses that are joined, at the line of the program that called."""
    level, frame = 1, sys._getframe()
    while frame.f_back and _IN_LIBRARY.match(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"forward returns a scalar, such as a loss, on each of {n_replicas} replicas: "
        "they are joined into a vector; write .mean() before backward()",
        stacklevel=level,
    )
