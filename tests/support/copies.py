"""Copies of things, by way of bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any


def saved_and_loaded(thing: Any) -> Any:
    """Return what torch loads, of whatever type, of what it has saved."""
    import torch

    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(thing: Any) -> Any:
    """Return what is loaded of a pickle."""
    return pickle.loads(pickle.dumps(thing))
