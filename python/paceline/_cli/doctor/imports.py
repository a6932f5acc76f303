"""The native module and torch, for checks that need them."""

from __future__ import annotations

import importlib
from typing import Any

from paceline._cli.doctor.finding import BlockedError


def native() -> Any:
    """Return the native module."""
    try:
        return importlib.import_module("paceline._native")
    except ImportError:
        raise BlockedError("the extension cannot be imported") from None


def torch() -> Any:
    """Return torch, attached to the native module."""
    native()
    try:
        torch_core = importlib.import_module("paceline._compat.torch_core")
        torch_core.attach()
        return importlib.import_module("torch")
    except Exception:
        raise BlockedError("torch cannot be used") from None


def gpus() -> Any:
    """Return the module for the GPUs of this process."""
    torch()
    return importlib.import_module("paceline._gpu")
