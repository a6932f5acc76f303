"""Pack and unpack the calls and results that the caller and ranks exchange.

Classes and functions of a cell or of ``__main__`` go by value (cloudpickle), tensors in
the format of ``torch.save``; tensors on GPUs arrive on the CPU.
"""

from __future__ import annotations

import inspect
import io
import operator
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from paceline import _cloudpickle
from paceline._compat import torch_core
from paceline._launch.messages import Result

_DEEPEST = 8  # values, each inside the one before, that a message may name


class _Unwrapping:
    """Pickle for `torch.save`: the caller has no group that a wrapper could use."""

    class Pickler(_cloudpickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch_core.WRAPPERS[1]):
                return operator.itemgetter(0), ([value.module],)
            return super().reducer_override(value)


def pack(value: Any, pickle_module: Any = _cloudpickle) -> bytes:
    """Return bytes from which :func:`unpack` makes an equal value."""
    file = io.BytesIO()
    torch.save(value, file, pickle_module=pickle_module)
    return file.getvalue()


def pack_result(value: Any) -> Result:
    """Return what a rank sends of its result: wrappers of ranks go as their modules."""
    name = "what fn returned"
    try:
        packed = pack(value, _Unwrapping)
    except Exception as error:
        name = _name_culprit(name, [(name, value)], _Unwrapping)
        return Result(name, b"", f"{type(error).__name__}: {error}")
    return Result(f"{name} (of type {type(value).__name__})", packed)


def unpack_result(result: Result) -> Any:
    """Return what a rank returned; raise an error if it could not be packed."""
    if result.problem:
        raise TypeError(result.problem)
    return unpack(result.packed)


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
        name = _name_culprit("fn, or an argument of it,", parts)
        raise TypeError(
            f"{name} cannot be sent to the ranks: {type(error).__name__}: {error}"
        ) from error


def _name_culprit(
    name: str, parts: list[tuple[str, Any]], pickle_module: Any = _cloudpickle
) -> str:
    """Return the name of the first part that does not pickle, or of a value in it."""
    seen: set[int] = set()

    def is_lost(part: tuple[str, Any]) -> bool:
        try:
            pack(part[1], pickle_module)
        except Exception:
            return True
        return False

    for _ in range(_DEEPEST):
        found = next(filter(is_lost, parts), None)
        if found is None:
            break
        name = f"{found[0]} (of type {type(found[1]).__name__})"
        if id(found[1]) in seen:
            break
        seen.add(id(found[1]))
        parts = [(f"{inner}, in {found[0]}", value) for inner, value in _held(found[1])]
    return name


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that are pickled along with a value."""
    if isinstance(value, types.MethodType):
        yield "the object of a method", value.__self__
    elif isinstance(value, types.FunctionType):
        with suppress(ValueError):  # of a variable without a value
            variables = inspect.getclosurevars(value)
            for name, each in variables.globals.items():
                yield f"global {name!r}", each
            for name, each in variables.nonlocals.items():
                yield f"variable {name!r}", each
    elif isinstance(value, dict):
        yield from ((f"key {key!r}", each) for key, each in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((f"item {k}", each) for k, each in enumerate(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f"attribute {name!r}", e) for name, e in vars(value).items())
