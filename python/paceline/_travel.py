"""How a model travels to its replicas: code and attributes by value, tensors by place.

The caller pickles the module once, without its parameters and buffers; those lie in
shared memory, and travel as a description of where.  Classes and functions of a script
or a notebook travel by value (cloudpickle), so that nothing is imported anew.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn

from paceline import _native, _torch

ALIGNMENT = 64


class CannotTravelError(RuntimeError):
    """The model cannot be run in another process; the words say why."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in an arena, and what it is like.

    Attributes
    ----------
    offset : int
        In bytes, from the start of the arena.
    shape, stride : tuple of int
        The stride is in elements, and dense.
    dtype : torch.dtype
        The type of the elements.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """Return a tensor of this layout, whose memory is never touched."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def view_in(self, arena: _native.Arena) -> torch.Tensor:
        """Return the tensor that lies here."""
        return arena.view(self.offset, self.like())


def lay_out(tensors: Sequence[torch.Tensor], begin: int) -> tuple[list[Place], int]:
    """Give each tensor a place from offset `begin` on; return the end too."""
    places = []
    offset = begin
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, strides kept if it is
        places.append(Place(offset, tuple(like.shape), like.stride(), like.dtype))
        n_bytes = like.numel() * like.element_size()
        offset += -(-n_bytes // ALIGNMENT) * ALIGNMENT
    return places, offset


@dataclass(frozen=True)
class Description:
    """A parameter, as its replicas make it anew around the shared memory."""

    kind: type
    requires_grad: bool
    attributes: dict[str, Any]


def describe(parameter: torch.nn.Parameter) -> Description:
    """Describe all of a parameter but its values."""
    return Description(type(parameter), parameter.requires_grad, dict(vars(parameter)))


def rebuild(description: Description, data: torch.Tensor) -> torch.nn.Parameter:
    """Return a parameter over `data`, like the one that was described."""
    parameter: torch.nn.Parameter = _torch.make_subclass(
        description.kind, data, description.requires_grad
    )
    vars(parameter).update(description.attributes)
    return parameter


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Replaces the tensors and modules of a table by their keys in it."""

    def __init__(self, file: io.BytesIO, keys: dict[int, Any]) -> None:
        super().__init__(file, protocol=5)
        self._keys = keys
        self.others: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, (torch.Tensor, nn.Module)):
            return None
        key = self._keys.get(id(value))
        if key is None and isinstance(value, torch.Tensor):
            if value.requires_grad:
                raise CannotTravelError(
                    f"a tensor of shape {tuple(value.shape)} requires a gradient, and "
                    "is neither a parameter nor a buffer of the module"
                )
            self.others.append(value)
        return key


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: dict[Any, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, key: Any) -> Any:
        return self._known[key]


def dumps(
    value: Any, keys: dict[int, Any], others: list[torch.Tensor] | None = None
) -> bytes:
    """Pickle a value; what has its ``id`` in `keys` is left behind.

    Parameters
    ----------
    value : object
        What is to travel.
    keys : dict
        By the ``id`` of a tensor or module, what takes its place.
    others : list, optional
        Gets the tensors that travel by value.

    Raises
    ------
    CannotTravelError
        If something in it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, keys)
    try:
        pickler.dump(value)
    except CannotTravelError:
        raise
    except Exception as error:
        raise CannotTravelError(
            f"it cannot be pickled: {type(error).__name__}: {error}"
        ) from error
    if others is not None:
        others += pickler.others
    return file.getvalue()


def check_plain(leaves: Sequence[Any]) -> None:
    """Raise for leaves that would arrive in a replica as something else.

    Raises
    ------
    CannotTravelError
        If a tensor is of a subclass of torch's.
    """
    for leaf in leaves:
        kind = type(leaf)
        if kind is torch.Tensor or kind is nn.Parameter:
            continue
        if isinstance(leaf, torch.Tensor):
            raise CannotTravelError(
                f"an input is a {kind.__name__}, a subclass of torch.Tensor"
            )


def loads(words: bytes, known: dict[Any, Any]) -> Any:
    """Return what :func:`dumps` was given, with `known` put back by their keys."""
    return _Unpickler(io.BytesIO(words), known).load()
