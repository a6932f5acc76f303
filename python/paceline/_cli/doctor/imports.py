"""The native module and torch, for checks that cannot look without them."""

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
    """Return torch, of which the native module knows."""
    native()
    try:
        torch_core = importlib.import_module("paceline._compat.torch_core")
        torch_core.attach()
        return importlib.import_module("torch")
    except Exception:
        raise BlockedError("torch cannot be used") from None


def gpus() -> Any:
    """Return the module that knows the GPUs of this process."""
    torch()
    return importlib.import_module("paceline._gpu")
