"""Gradients that no slot can hold, sparse ones for the most part, as plain tensors."""

from __future__ import annotations

import pickle
from typing import Any

import torch

Strays = list[tuple[int, torch.Tensor]]


def pack(strays: Strays) -> tuple[bytes, list[torch.Tensor]]:
    """Return words and plain tensors that :func:`unpack` makes the same strays of."""
    if not strays:
        return b"", []
    told: list[tuple[int, Any]] = []
    parts: list[torch.Tensor] = []
    for index, gradient in strays:
        if gradient.layout == torch.sparse_coo:
            rows = gradient.coalesce()
            told.append((index, tuple(rows.shape)))
            parts += [rows.indices(), rows.values()]
        else:
            told.append((index, None))
            parts.append(gradient)
    return pickle.dumps(told), parts


def unpack(words: bytes, parts: list[torch.Tensor]) -> Strays:
    """Return what :func:`pack` was given."""
    if not words:
        return []
    left = iter(parts)
    strays = []
    for index, shape in pickle.loads(words):
        first = next(left)
        if shape is not None:
            first = torch.sparse_coo_tensor(
                first, next(left), shape, is_coalesced=True, check_invariants=False
            )
        strays.append((index, first))
    return strays
