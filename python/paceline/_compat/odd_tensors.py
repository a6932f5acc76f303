"""What no shared memory or capsule can hold: sparse gradients, rare dtypes."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import torch

OddTensors = list[tuple[int, torch.Tensor]]


def pack(tensors: OddTensors) -> tuple[bytes, list[torch.Tensor]]:
    """Return a header and plain tensors that :func:`unpack` makes the same of."""
    if not tensors:
        return b"", []
    header: list[tuple[int, Any]] = []
    parts: list[torch.Tensor] = []
    for index, gradient in tensors:
        if gradient.layout == torch.sparse_coo:
            rows = gradient.coalesce()
            header.append((index, tuple(rows.shape)))
            parts += [rows.indices(), rows.values()]
        else:
            header.append((index, None))
            parts.append(gradient)
    return pickle.dumps(header), parts


def unpack(header: bytes, parts: list[torch.Tensor]) -> OddTensors:
    """Return what :func:`pack` was given."""
    if not header:
        return []
    left = iter(parts)
    tensors = []
    for index, shape in pickle.loads(header):
        first = next(left)
        if shape is not None:
            first = torch.sparse_coo_tensor(
                first, next(left), shape, is_coalesced=True, check_invariants=False
            )
        tensors.append((index, first))
    return tensors


_BITS = {1: torch.uint8, 2: torch.int16}


@functools.cache
def _is_picklable(dtype: torch.dtype) -> bool:
    try:
        pickle.loads(pickle.dumps(torch.empty(1, dtype=dtype)))
    except Exception:
        return False
    return True


class _Bits:
    """A tensor that is pickled as integers of its size."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bits = tensor.view(_BITS[tensor.dtype.itemsize])
        self._dtype = tensor.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bits, (self._bits, self._dtype)


def _from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bits.view(dtype)


def pickled(value: Any) -> bytes:
    """Return the pickle of a value: of what no capsule holds, a tensor of float8, say.

    Where torch itself cannot read back what it wrote of a dtype, the bits are sent.
    """
    if (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.dtype.itemsize in _BITS
        and not _is_picklable(value.dtype)
    ):
        value = _Bits(value)
    return pickle.dumps(value, 5)
