"""Pack and unpack the calls and results that the caller and ranks exchange.

Classes and functions of a cell or of ``__main__`` go by value (cloudpickle), tensors in
the format of ``torch.save``; tensors on GPUs arrive on the CPU.
"""

from __future__ import annotations

import inspect
import io
import types
from collections.abc import Iterator
from typing import Any

import torch

from paceline import _cloudpickle


def pack(value: Any) -> bytes:
    """Return bytes from which :func:`unpack` makes an equal value."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=_cloudpickle)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the packed value, with all tensors on the CPU."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


def pack_call(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a call's bytes; raise a TypeError that names what cannot be pickled."""
    try:
        return pack((fn, args, kwargs))
    except Exception as error:
        parts = [("fn", fn)]
        parts += [(f"argument {k} of fn", value) for k, value in enumerate(args)]
        parts += [(f"argument {name!r} of fn", each) for name, each in kwargs.items()]
        raise TypeError(
            f"{_name_culprit(parts)} cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}"
        ) from error


def _name_culprit(parts: list[tuple[str, Any]]) -> str:
    """Return the name of the first part that does not pickle, or of a value in it."""
    seen: set[int] = set()
    name = "fn, or an argument of it,"
    while True:
        found = next((part for part in parts if not _is_picklable(part[1])), None)
        if found is None:
            return name
        name = f"{found[0]} (of type {type(found[1]).__name__})"
        if id(found[1]) in seen:
            return name
        seen.add(id(found[1]))
        parts = [(f"{inner}, in {found[0]}", value) for inner, value in _held(found[1])]


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that are pickled along with a value."""
    if isinstance(value, types.MethodType):
        yield "the object of a method", value.__self__
    elif isinstance(value, types.FunctionType):
        variables = inspect.getclosurevars(value)
        for kind, found in (
            ("global", variables.globals),
            ("variable", variables.nonlocals),
        ):
            yield from ((f"{kind} {name!r}", each) for name, each in found.items())
    elif isinstance(value, dict):
        yield from ((f"key {key!r}", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {k}", each) for k, each in enumerate(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f"attribute {name!r}", e) for name, e in vars(value).items())


def _is_picklable(value: Any) -> bool:
    try:
        pack(value)
    except Exception:
        return False
    return True
