"""How a model travels to its replicas: code and attributes by value, tensors by place.

The caller pickles the module once, without its parameters and buffers; those lie in
shared memory, and travel as a description of where.  Classes and functions of a script
or a notebook travel by value (cloudpickle), so that nothing is imported anew.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn

from paceline import _native, _torch, _torch_ops, _torch_weights

ALIGNMENT = 64


class CannotTravelError(RuntimeError):
    """The model cannot be run in another process; the words say why."""


class ThisCallError(CannotTravelError):
    """One call cannot be run in another process; others may."""


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


class Travelled:
    """Stands, in what is pickled, for those of some values that came before it.

    Parameters
    ----------
    values : dict
        By their ``id``.
    """

    def __init__(self, values: dict[int, Any]) -> None:
        self.asked = values
        self.found: list[Any] = []


class Homes:
    """Globals of functions that travel by value: a replica has one dictionary for each.

    So it can be told later what a global is now, and functions that travel at other
    times, with an input, read the same.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, dict[str, Any]]] = {}

    def key(self, held: dict[str, Any]) -> tuple[Any, ...]:
        """Return what takes the place of a function's globals."""
        at, _ = self._held.setdefault(id(held), (len(self._held), held))
        return ("globals", at, held.get("__name__"), held.get("__package__"))

    def __contains__(self, held: dict[str, Any]) -> bool:
        return id(held) in self._held


def home_of(key: tuple[Any, ...], known: dict[Any, Any]) -> dict[str, Any]:
    """Return a replica's dictionary for a key of :class:`Homes`."""
    _, _, name, package = key
    home: dict[str, Any] = known.setdefault(key[:2], {})
    home.setdefault("__name__", name)
    home.setdefault("__package__", package)
    return home


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Replaces the tensors, modules and others of a table by their keys in it."""

    def __init__(
        self,
        file: io.BytesIO,
        keys: dict[int, Any],
        homes: Homes | None,
        by_value: frozenset[int],
        as_data: frozenset[int],
        asked: dict[int, Any],
    ) -> None:
        super().__init__(file, protocol=5)
        self._keys = keys
        self._homes = homes
        self._by_value = by_value
        self._as_data = as_data
        self._asked = asked
        self.travelled: dict[int, Any] = {}
        self._bases: dict[int, Any] = {}
        self.others: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        at = id(value)
        if type(value) is dict and at in self._bases:
            return self._bases[at]
        if at in self._asked and at not in self.travelled:
            self.travelled[at] = value
        key = self._keys.get(at)
        if key is None and isinstance(value, torch.Tensor):
            if value.requires_grad and at not in self._as_data:
                raise CannotTravelError(
                    f"a tensor of shape {tuple(value.shape)} requires a gradient, and "
                    "is neither a parameter nor a buffer of the module"
                )
            self.others.append(value)
        return key

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in self._as_data:
            data: Any = value.detach()
            return data.__reduce_ex__(5)
        if isinstance(value, nn.Module) and _torch_weights.is_parametrized(value):
            return _torch_weights.reduce_parametrized(value)
        if type(value) is Travelled:
            value.found = list(self.travelled.values())
            return list, (), None, iter(value.found)
        if id(value) in self._by_value and _is_of_module(value):
            return _reduce_function(value)
        if found := _torch_ops.reduce_operator(value) or _reduce_cache(value):
            return found
        if isinstance(value, types.ModuleType):
            return _reduce_module(value)
        return super().reducer_override(value)

    def _function_getnewargs(self, function: types.FunctionType) -> Any:
        code, base, *rest = super()._function_getnewargs(function)
        if self._homes is not None:
            self._bases[id(base)] = self._homes.key(function.__globals__)
        return code, base, *rest


def _reduce_cache(value: Any) -> Any:
    """Say how what functools makes of a script's function is made; None: all else.

    Neither travels by itself: one is taken for a global, the other may hold a lock.
    """
    if type(value) is functools.cached_property:
        return _make_property, (value.func, value.attrname, value.__doc__)
    if isinstance(value, _CACHED) and value.__module__ == "__main__":
        return _make_cache, (value.__wrapped__, value.cache_parameters())
    return None


_CACHED = type(functools.lru_cache(len))


def _make_property(
    function: Any, name: str | None, words: str | None
) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname, made.__doc__ = name, words
    return made


def _make_cache(function: Any, options: dict[str, Any]) -> Any:
    return functools.lru_cache(**options)(function)


def _reduce_module(module: types.ModuleType) -> Any:
    """Have a module imported; one that a compiler has just made, from its file."""
    name = module.__name__
    spec = getattr(module, "__spec__", None)
    if isinstance(getattr(spec, "loader", None), ExtensionFileLoader):
        return _import, (name, module.__file__)
    if type(module) is not types.ModuleType and sys.modules.get(name) is module:
        return importlib.import_module, (name,)
    return NotImplemented  # cloudpickle's way


def _import(name: str, file: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module


def _is_of_module(value: Any) -> bool:
    """Tell whether it is a function among a module's globals, and not a script's."""
    if not isinstance(value, types.FunctionType):
        return False
    name = value.__globals__.get("__name__", "")
    module = sys.modules.get(name) if name != "__main__" else None
    return module is not None and vars(module) is value.__globals__


def _reduce_function(function: types.FunctionType) -> Any:
    """Have a function made anew among the globals of the module that it is from."""
    parts = (
        function.__globals__["__name__"],
        function.__code__,
        function.__name__,
        function.__qualname__,
        function.__defaults__,
        function.__kwdefaults__,
        function.__closure__,
        function.__dict__,
    )
    return _make_function, parts


def _make_function(
    module: str,
    code: types.CodeType,
    name: str,
    qualname: str,
    defaults: tuple[Any, ...] | None,
    kwdefaults: dict[str, Any] | None,
    closure: tuple[Any, ...] | None,
    attributes: dict[str, Any],
) -> types.FunctionType:
    held = vars(importlib.import_module(module))
    function = types.FunctionType(code, held, name, defaults, closure)
    function.__qualname__, function.__kwdefaults__ = qualname, kwdefaults
    vars(function).update(attributes)
    return function


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: dict[Any, Any]) -> None:
        super().__init__(file)
        self._known = known

    def persistent_load(self, key: Any) -> Any:
        if key[0] == "globals":
            return home_of(key, self._known)
        return self._known[key]


def dumps(
    value: Any,
    keys: dict[int, Any],
    others: list[torch.Tensor] | None = None,
    *,
    homes: Homes | None = None,
    by_value: frozenset[int] = frozenset(),
    as_data: frozenset[int] = frozenset(),
    asked: dict[int, Any] | None = None,
) -> bytes:
    """Pickle a value; what has its ``id`` in `keys` is left behind.

    Parameters
    ----------
    value : object
        What is to travel.
    keys : dict
        By the ``id`` of a tensor, module or other thing, what takes its place.
    others : list, optional
        Gets the tensors that travel by value.
    homes : Homes, optional
        Where functions that travel by value have their globals.
    by_value : frozenset of int, optional
        The ``id`` of functions that are to travel by value, though they can be
        imported; they get the globals of the module that is imported there.
    as_data : set of int
        The ``id`` of tensors of which the values travel, and not that they require a
        gradient.
    asked : dict, optional
        Of :class:`Travelled`, where `value` has one.

    Raises
    ------
    CannotTravelError
        If something in it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, keys, homes, by_value, as_data, asked or {})
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
