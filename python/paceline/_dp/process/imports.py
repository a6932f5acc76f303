"""The user's modules that workers import for themselves, compared with the caller's.

A class or a function that another process can import is pickled by its name, and a
worker imports it once.  Where the caller has another one than a fresh import gives
(patched, reloaded, a global assigned), a replica would compute something else in
silence.  So what the classes of the model reach in the user's own modules is described
by digests, here and in the worker; where they differ the model is not sent.  Installed
libraries are not looked into.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib
import site
import sys
import sysconfig
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline import _native
from paceline._dp.process import watchable
from paceline._replicas.errors import UnsupportedModelError
from paceline._replicas.generators import contents_of, names_of

Entry = tuple[str, str]
"""A module's name, and the name of one of its globals."""

_HASH = "builtins", "hash"

_DEEPEST = 4
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    paths |= {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = {str(Path(path)) + "/" for path in paths if path}
    return tuple(folders | {str(Path(torch.__file__).parent.parent) + "/"})


@functools.lru_cache(1 << 12)
def _is_library(file: str) -> bool:
    return str(Path(file)).startswith(_library_folders())


def is_own(name: Any) -> bool:
    """Tell whether a module is the user's: neither torch's nor a library's."""
    if not isinstance(name, str) or name.partition(".")[0] in ("torch", "paceline"):
        return False
    module = sys.modules.get(name)
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    if name == "__main__" or not isinstance(file, str):
        return name == "__main__"
    return not _is_library(file)


# ---- what a model reaches -----------------------------------------------------------


class _Reached:
    """The globals of own modules that classes reach by the names that they mention.

    The script's own code is pickled by value; what it mentions of modules is not.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self.entries: dict[Entry, Any] = {}
        self._seen: set[int] = set()
        self._todo: list[Any] = list(kinds)
        while self._todo:
            value = self._todo.pop()
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._look_into(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, type):
            if is_own(value.__module__):
                name = value.__qualname__.partition(".")[0]
                home = sys.modules.get(value.__module__)
                self._add(value.__module__, name, getattr(home, name, None))
                self._todo += [*vars(value).values(), *value.__bases__]
        elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
            self._todo.append(value.__func__)
        elif isinstance(value, property):
            self._todo += [value.fget, value.fset]
        elif isinstance(value, types.FunctionType):
            home = value.__globals__.get("__name__", "__main__")
            if not is_own(home):
                return
            names = names_of(value.__code__)
            if _calls_hash(value.__code__):
                self.entries[_HASH] = hash
            for name in names & value.__globals__.keys():
                held = value.__globals__[name]
                self._add(home, name, held)
                if isinstance(held, types.ModuleType):
                    for inside in names & vars(held).keys():
                        self._add(held.__name__, inside, vars(held)[inside])

    def _add(self, module: str, name: str, value: Any) -> None:
        if not is_own(module):
            return
        is_imported = module != "__main__" and module in sys.modules
        if is_imported and name.isidentifier():  # pytest's own are not
            self.entries[module, name] = value
        self._todo.append(value)


@functools.lru_cache(1 << 14)
def _calls_hash(code: types.CodeType) -> bool:
    """Tell whether code that makes no hash of an object itself asks for one."""
    if code.co_name == "__hash__":
        return False
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return any(map(_calls_hash, inner)) or (
        "hash" in code.co_names
        and any(
            step.argval == "hash" and step.opname == "LOAD_GLOBAL"
            for step in dis.get_instructions(code)
        )
    )


# ---- digests ------------------------------------------------------------------------


def digests_of(entries: Iterable[Entry]) -> dict[Entry, Any]:
    """Return a digest of each entry, of this process's modules."""
    found = {}
    for module, name in entries:
        home = sys.modules.get(module) or importlib.import_module(module)
        found[module, name] = _digest(vars(home).get(name), module)
    return found


def _digest(value: Any, home: str, depth: int = 0) -> Any:
    """Return what two processes have alike where a value is alike in both."""
    if isinstance(value, _ATOMS):
        return repr(value)
    if value is hash:
        return hash("a string")
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, types.FunctionType):
        if depth > _DEEPEST:
            return value.__module__, value.__qualname__
        code = _digest_of_code(value.__code__)
        cells = map(contents_of, value.__closure__ or ())
        inside = [*(value.__defaults__ or ()), *cells]
        members = [_digest(x, home, depth + 1) for x in inside]
        attributes = _digest_of_items(vars(value), home, depth)
        return value.__module__, code, members, attributes
    if isinstance(value, (staticmethod, classmethod)):
        return _digest(value.__func__, home, depth)
    if isinstance(value, type) and (depth > _DEEPEST or value.__module__ != home):
        return value.__module__, value.__qualname__
    if isinstance(value, type):
        return _digest_of_items(vars(value), home, depth)
    if depth > _DEEPEST:
        return type(value).__qualname__
    if isinstance(value, dict):
        return _digest_of_items(value, home, depth)
    if isinstance(value, (list, tuple)):
        return [_digest(x, home, depth + 1) for x in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_digest(x, home, depth + 1)) for x in value)
    if type(value) is torch.Tensor and value.is_cpu and value.layout == torch.strided:
        return tuple(value.shape), _native.tensor_hash(value.detach().contiguous())
    held = getattr(value, "__dict__", None)
    if type(held) is dict and not isinstance(value, nn.Module):
        return type(value).__qualname__, _digest_of_items(held, home, depth)
    return type(value).__qualname__


def _digest_of_items(items: Any, home: str, depth: int) -> dict[str, Any]:
    return {
        repr(name): _digest(value, home, depth + 1)
        for name, value in list(items.items())
        if not (isinstance(name, str) and name.startswith(("__", "_abc_")))
    }


@functools.lru_cache(1 << 14)
def _digest_of_code(code: types.CodeType) -> bytes:
    """Return the same for the same source, wherever it stands in its file."""
    constants = [
        _digest_of_code(constant)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_flags, constants)
    return hashlib.sha1(repr(parts).encode()).digest()


# ---- the caller's side --------------------------------------------------------------


class Imported:
    """What a model reaches in modules that workers import for themselves, watched.

    `entries` are the modules and names that replicas are to describe.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self._kinds = list(dict.fromkeys(kind for part in parts for kind in _mro(part)))
        self._theirs: dict[Entry, Any] = {}
        self._watch()

    def _watch(self) -> None:
        reached = _Reached(self._kinds).entries
        for (module, name), value in reached.items():
            if watchable.is_generator(value):
                raise UnsupportedModelError(
                    f"{module}.{name} is a random generator, of which each process "
                    "would have one of its own"
                )
        self.entries = [
            entry for entry in reached if not _is_rewritten(*entry, reached[entry])
        ]
        self._snapshot = _native.Snapshot()
        self._seen: set[int] = set()
        for (module, name), value in reached.items():
            self._snapshot.add(vars(sys.modules[module]), name)
            self._add(value, 0)
        for kind in self._kinds:
            watchable.cache_slot_names(kind)
            self._snapshot.add(kind)
            _check_patched(kind.__qualname__, kind.__module__, vars(kind))
        self._snapshot.add(vars(nn.functional))
        _check_patched("functional", "torch.nn", vars(nn.functional))
        _check_patched("torch", "torch", vars(torch))

    def _add(self, value: Any, depth: int) -> None:
        """Watch functions, classes and plain containers."""
        if depth > _DEEPEST or id(value) in self._seen:
            return
        self._seen.add(id(value))
        held = getattr(value, "__dict__", None)
        if isinstance(value, type):
            watchable.cache_slot_names(value)
        if isinstance(value, (dict, list, set, type, types.FunctionType, torch.Tensor)):
            self._snapshot.add(value)
        elif type(held) is dict and not isinstance(value, types.ModuleType):
            self._snapshot.add(held)
            value = held
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._snapshot.add(cell)
                self._add(contents_of(cell), depth + 1)
            self._snapshot.add(vars(value))
        if isinstance(value, (dict, list, set, tuple)):
            for member in list(value.values() if isinstance(value, dict) else value):
                self._add(member, depth + 1)

    def compare(self, theirs: dict[Entry, Any]) -> None:
        """Raise where a replica has found something else in its own process."""
        self._theirs.update(theirs)
        ours = digests_of(self.entries)
        for (module, name), digest in ours.items():
            if digest != theirs[module, name] and (module, name) == _HASH:
                raise UnsupportedModelError(
                    "its code calls hash(), by which strings have another number in "
                    "each process, unless PYTHONHASHSEED is set"
                )
            if digest != theirs[module, name]:
                raise UnsupportedModelError(
                    f"{module}.{name} is not in this process what a fresh import of "
                    "its file gives"
                )

    def check(self) -> bool:
        """Tell whether replicas still have what the caller has, as far as is known.

        Raise where the caller's process has something else now.
        """
        if not self._snapshot.differing():
            return True
        self._watch()
        if any(entry not in self._theirs for entry in self.entries):
            return False  # replicas have not described that yet
        self.compare(self._theirs)
        return True


def _mro(part: nn.Module) -> list[type]:
    return [kind for kind in type(part).__mro__ if kind not in (object, nn.Module)]


def _check_patched(what: str, home: str, held: Any) -> None:
    """Raise where a library holds a function of the user's."""
    if is_own(home):
        return
    for name, value in list(held.items()):
        if isinstance(value, types.FunctionType) and is_own(value.__module__):
            raise UnsupportedModelError(
                f"{home}.{what}.{name} is a function of {value.__module__}, set in "
                "this process alone"
            )


def _is_rewritten(module: str, name: str, value: Any) -> bool:
    """Tell whether pytest has rewritten the asserts of what has code there."""
    loader = getattr(getattr(sys.modules[module], "__spec__", None), "loader", None)
    is_rewriting = type(loader).__module__.startswith("_pytest")
    return is_rewriting and isinstance(value, (type, types.FunctionType))
