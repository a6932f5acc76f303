"""How a model is sent to its replicas: code and attributes by value, tensors by place.

The caller pickles the module once, without its parameters and buffers; those lie in
shared memory, and a description of where is sent.  Classes and functions of a script
or a notebook are pickled by value (cloudpickle), so that nothing is imported anew.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import importlib.util
import io
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING, Any

import torch
from cloudpickle import cloudpickle  # type: ignore[import-untyped]
from torch import nn

from paceline import _cloudpickle, _native
from paceline._compat import torch_core, torch_ops
from paceline._dp.process import ordered_sets
from paceline._dp.process.watchable import ATOMS
from paceline._replicas.errors import UnsupportedModelError

if TYPE_CHECKING:
    from paceline._dp.process.snapshot import ModelState

ALIGNMENT = 64
LEAST_ALIGNMENT = 16
"""What a view of shared memory needs."""


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in shared memory, and what it is like; it is dense."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def like(self) -> torch.Tensor:
        """Return a tensor of this layout, whose memory is never touched."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def view_in(self, memory: _native.SharedMemory) -> torch.Tensor:
        """Return the tensor that lies here."""
        return memory.view(self.offset, self.like())


def place_of(tensor: torch.Tensor, offset: int) -> Place:
    """Return the place of a dense tensor that lies at an offset."""
    return Place(offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def lay_out(tensors: Sequence[torch.Tensor], begin: int) -> tuple[list[Place], int]:
    """Give each tensor a place from offset `begin` on; return the end too."""
    places = []
    offset = begin
    for tensor in tensors:
        like = torch.empty_like(tensor, device="meta")  # dense, strides kept if it is
        places.append(place_of(like, offset))
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
    parameter: torch.nn.Parameter = torch_core.make_subclass(
        description.kind, data, description.requires_grad
    )
    vars(parameter).update(description.attributes)
    return parameter


class ScriptGlobals:
    """Globals of functions pickled by value: a replica has one dictionary for each.

    So it can receive later what a global is now, and functions that are sent at other
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


def globals_of(key: tuple[Any, ...], known: dict[Any, Any]) -> dict[str, Any]:
    """Return a replica's dictionary for a key of :class:`ScriptGlobals`."""
    _, _, name, package = key
    home: dict[str, Any] = known.setdefault(key[:2], {})
    home.setdefault("__name__", name)
    home.setdefault("__package__", package)
    return home


class Whole:
    """Stands for a part that is pickled as its class says, and not by its key."""

    def __init__(self, part: nn.Module) -> None:
        self.part = part


class _Pickler(_cloudpickle.Pickler):
    """Replaces the tensors, modules and others of a table by their keys in it.

    Where there is a `state`, it is shown all else that could change.
    """

    records_alone = False
    """Whether nobody reads what is written: tensors and arrays are left out."""
    has_classes = False
    """Whether who reads it has the classes already that came from there by value."""
    top: Any = None
    """The value that is written, of which nobody else knows."""

    def __init__(
        self,
        file: Any,
        keys: dict[int, Any],
        script_globals: ScriptGlobals | None = None,
        state: ModelState | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self._keys = keys
        self._script_globals = script_globals
        self.state = state
        self._bases: dict[int, Any] = {}
        self._sets: dict[int, Any] = {}
        self._is_for_replica = state is not None or script_globals is not None

    def persistent_id(self, value: Any) -> Any:
        if type(value) in ATOMS:
            return None
        at = id(value)
        key = self._keys.get(at)
        if key is not None:
            if self.state is not None:
                self.state.check_known(key)
            return key
        if type(value) is dict and at in self._bases:
            return self._bases[at]
        if type(value) is Whole or value is self.top:
            return None
        if self.state is not None:
            self.state.see(value)
        if self.records_alone:
            return _left_out(value)
        if self._is_for_replica and ordered_sets.has_order(value):
            return self._key_of_set(value)
        if isinstance(value, torch.Tensor) and value.requires_grad:
            self._check_grad(value)
        return None

    def _key_of_set(self, value: Any) -> tuple[Any, ...]:
        """Return what a set is made of, once in this stream: it stays one object."""
        at = id(value)
        if at in self._sets:
            return "set", at
        self._sets[at] = value  # lives on, so that its id is no other's
        return "set", at, type(value) is frozenset, *value

    def _check_grad(self, value: torch.Tensor) -> None:
        if self.state is None or not self.state.is_at_made:
            raise UnsupportedModelError(
                f"a tensor of shape {tuple(value.shape)} requires a gradient, and is "
                "neither a parameter nor a buffer of the module"
            )

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.requires_grad:
            data: Any = value.detach()
            return data.__reduce_ex__(5)
        if type(value) is Whole:
            how: Any = value.part.__reduce_ex__(5)
            return (_MAKERS.get(how[0], how[0]), *how[1:])
        if found := torch_ops.reduce_operator(value) or _reduce_cache(value):
            return found
        if isinstance(value, types.ModuleType):
            is_made = sys.modules.get(value.__name__) is not value
            if is_made and self.state is not None:
                self.state.see_module(value)
            return _reduce_module(value)
        if self.has_classes and (name := _name_of_class(value)):
            return _find_class, (name,)
        found = super().reducer_override(value)
        if self.state is not None and isinstance(found, tuple):
            if isinstance(value, types.FunctionType):
                self.state.see_code(value, found[2][1]["__globals__"])
            elif isinstance(value, type):
                self.state.see_code(value)
        return found

    def _function_getnewargs(self, function: types.FunctionType) -> Any:
        code, base, *rest = super()._function_getnewargs(function)
        if self._script_globals is not None:
            self._bases[id(base)] = self._script_globals.key(function.__globals__)
        return code, base, *rest


def _new_object(kind: Any, *args: Any) -> Any:
    return kind.__new__(kind, *args)


def _new_object_ex(kind: Any, args: Any, kwargs: Any) -> Any:
    return kind.__new__(kind, *args, **kwargs)


# Pickle takes copyreg's for the very object that is pickled.
_MAKERS = {
    copyreg.__newobj__: _new_object,  # type: ignore[attr-defined]
    copyreg.__newobj_ex__: _new_object_ex,  # type: ignore[attr-defined]
}


def _name_of_class(value: Any) -> str | None:
    """Return the name by which both sides know a class that was pickled by value."""
    if not isinstance(value, type):
        return None
    name: str | None = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.get(value)
    return name


def _find_class(name: str) -> Any:
    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[name]


def _left_out(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return "left out" if is_array or isinstance(value, torch.Tensor) else None


def _reduce_cache(value: Any) -> Any:
    """Say how what functools makes of a script's function is made; None: all else.

    Neither can be pickled itself: one is taken for a global, the other may hold a lock.
    """
    if type(value) is functools.cached_property:
        return _make_property, (value.func, value.attrname, value.__doc__)
    if isinstance(value, _CACHED) and value.__module__ == "__main__":
        return _make_cache, (value.__wrapped__, value.cache_parameters())
    return None


_CACHED = type(functools.lru_cache(len))


def _make_property(
    function: Any, name: str | None, doc: str | None
) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname, made.__doc__ = name, doc
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


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, known: dict[Any, Any]) -> None:
        super().__init__(file)
        self._known = known
        self._sets: dict[int, Any] = {}

    def persistent_load(self, key: Any) -> Any:
        if key[0] == "globals":
            return globals_of(key, self._known)
        if key[0] == "set":
            _, at, *described = key
            if described:
                self._sets[at] = ordered_sets.made(described[0], tuple(described[1:]))
            return self._sets[at]
        return self._known[key]


class Recorder:
    """Shows a state what values hold, by pickling them for nobody to read."""

    def __init__(
        self,
        state: ModelState | None,
        keys: dict[int, Any],
        script_globals: ScriptGlobals | None,
    ) -> None:
        self._pickler = _Pickler(self._file(), keys, script_globals, state)
        self._pickler.records_alone = True

    def _file(self) -> Any:
        return _Nowhere()

    def write(self, value: Any) -> None:
        """Pickle one more value; what came before in this stream stays one object."""
        self._pickler.top = value
        try:
            self._pickler.dump(value)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"it cannot be pickled: {type(error).__name__}: {error}"
            ) from error


class _Nowhere:
    def write(self, data: Any) -> None:
        pass


class Stream(Recorder):
    """Values pickled one after the other, for :func:`load_stream`."""

    def __init__(
        self,
        state: ModelState | None,
        keys: dict[int, Any],
        script_globals: ScriptGlobals | None = None,
        has_classes: bool = False,
    ) -> None:
        super().__init__(state, keys, script_globals)
        self._pickler.records_alone = False
        self._pickler.has_classes = has_classes

    def _file(self) -> Any:
        self._bytes = io.BytesIO()
        return self._bytes

    def write_plain(self, value: Any) -> None:
        """Pickle one more value, of tuples and atoms, which nobody has to watch."""
        state, self._pickler.state = self._pickler.state, None
        self.write(value)
        self._pickler.state = state

    def getvalue(self) -> bytes:
        """Return what was written."""
        return self._bytes.getvalue()


def load_stream(payload: bytes, known: dict[Any, Any]) -> Iterator[Any]:
    """Yield the values of a stream; `known` may grow meanwhile."""
    file = io.BytesIO(payload)
    unpickler = _Unpickler(file, known)
    while file.tell() < len(payload):
        yield unpickler.load()


def dumps(
    value: Any,
    keys: dict[int, Any],
    script_globals: ScriptGlobals | None = None,
    *,
    has_classes: bool = False,
) -> bytes:
    """Pickle a value; what has its ``id`` in `keys` is left behind, as its key.

    `script_globals` has the globals of functions pickled by value; `has_classes`
    says that the reader is who the classes came from.
    """
    stream = Stream(None, keys, script_globals, has_classes)
    stream.write(value)
    return stream.getvalue()


def check_plain(leaves: Sequence[Any]) -> None:
    """Raise for tensors of a subclass of torch's: replicas would get plain ones."""
    for leaf in leaves:
        kind = type(leaf)
        if kind is torch.Tensor or kind is nn.Parameter:
            continue
        if isinstance(leaf, torch.Tensor):
            raise UnsupportedModelError(
                f"an input is a {kind.__name__}, a subclass of torch.Tensor"
            )


def loads(payload: bytes, known: dict[Any, Any]) -> Any:
    """Return what :func:`dumps` was given, with `known` put back by their keys."""
    return _Unpickler(io.BytesIO(payload), known).load()
