"""What replicas have imported for themselves, compared with what the caller has.

Both sides compute digests of functions, of the attributes of classes and of globals;
where a replica's differs (a patch, a reload, a file that was edited after its import)
the caller sends its own, and the replica assigns it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import pickle
import site
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline import _torch_ops, _travel

_MOST_BYTES = 1 << 20
_DEEPEST = 6
_NOT_THERE = (ImportError, AttributeError, AssertionError)
_UNWRAPPED = (staticmethod, classmethod, types.MethodType)


# ---- whose code it is ---------------------------------------------------------------


@functools.cache
def _library_folders() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    paths |= {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    folders = {str(Path(path)) + "/" for path in paths if path}
    return tuple(folders | {str(Path(torch.__file__).parent.parent) + "/"})


def is_own(name: Any) -> bool:
    """Tell whether a module is the user's own: neither torch's nor a library's."""
    if name == "__main__":
        return True
    if not isinstance(name, str) or name.partition(".")[0] in ("torch", "paceline"):
        return False
    module = sys.modules.get(name)
    if module is None:
        return True
    file = getattr(module, "__file__", None)
    return file is not None and not str(Path(file)).startswith(_library_folders())


def is_importable(name: Any) -> bool:
    """Tell whether another process finds a module under its name."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    spec = getattr(module, "__spec__", None)
    if name == "__main__" or spec is None or spec.origin is None:
        return False
    above = sys.modules.get(name.rpartition(".")[0])
    path = getattr(above, "__path__", None)
    for finder in sys.meta_path:
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            if found := finder.find_spec(name, path):
                return bool(found.origin == spec.origin)
    return False


# ---- where things are found ----------------------------------------------------------


class Missing:
    """Stands for a name that is to be deleted."""


class Entry(NamedTuple):
    """Where something can be found that replicas have imported for themselves.

    Attributes
    ----------
    module : str
        The module's name.
    kind : str
        The qualified name of the class; empty: the module itself.
    name : str
        Of the function or the value.
    """

    module: str
    kind: str
    name: str

    def holder(self) -> dict[str, Any] | type:
        """Return the module's dictionary, or the class, of this process."""
        module = sys.modules.get(self.module) or importlib.import_module(self.module)
        if not self.kind:
            return vars(module)
        kind: Any = module
        for name in self.kind.split("."):
            kind = getattr(kind, name)
        assert isinstance(kind, type)
        return kind

    def value(self) -> Any:
        """Return what is there in this process; :class:`Missing`: nothing."""
        holder = self.holder()
        held = holder if isinstance(holder, dict) else vars(holder)
        return held.get(self.name, Missing)

    def assign(self, value: Any) -> None:
        """Put something else there."""
        holder = self.holder()
        if isinstance(holder, dict):
            if value is Missing:
                holder.pop(self.name, None)
            else:
                holder[self.name] = value
        elif value is not Missing:
            setattr(holder, self.name, value)
        elif self.name in vars(holder):
            delattr(holder, self.name)


_assigned: set[Entry] = set()
"""What this process, a replica's, has otherwise than its files say."""


def assign(target: Any, name: str, value: Any, known: dict[Any, Any]) -> None:
    """Give a name of a replica's another value.

    Parameters
    ----------
    target : Entry or tuple
        Where replicas have imported it, or the key of a function's globals.
    """
    if isinstance(target, Entry):
        target.assign(value)
        _assigned.add(target)
    else:
        _travel.home_of(target, known)[name] = value


def inner(value: Any) -> list[Any]:
    """Return the functions of which a descriptor or a partial is made."""
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, _UNWRAPPED):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    wrapped = getattr(value, "__wrapped__", None)  # functools.lru_cache
    return [wrapped] if isinstance(wrapped, types.FunctionType) else []


def functions_in(value: Any, depth: int = 0) -> Iterator[types.FunctionType]:
    """Yield the functions that something from a class or a module is made of."""
    if depth > _DEEPEST:
        return
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            try:
                yield from functions_in(cell.cell_contents, depth + 1)
            except ValueError:
                continue
    elif not isinstance(value, type):
        for one in inner(value):
            yield from functions_in(one, depth + 1)


def corrections(entries: list[Entry], homes: _travel.Homes) -> bytes:
    """Return the same for what a replica has otherwise."""
    found: list[tuple[Any, str, Any]] = []
    for entry in entries:
        with contextlib.suppress(*_NOT_THERE):  # gone since, here too
            held, value = entry.holder(), entry.value()
            found.append((entry, entry.name, value))
            if isinstance(held, dict) and held in homes:
                found.append((homes.key(held), entry.name, value))
    functions = (f for _, _, value in found for f in functions_in(value))
    by_value = frozenset(map(id, functions))
    return _travel.dumps(found, {}, homes=homes, by_value=by_value)


# ---- digests ------------------------------------------------------------------------


def digest(value: Any, depth: int = 0) -> Any:
    """Return what is equal in processes that have the same; None: cannot be said."""
    if value is Missing or depth > _DEEPEST:
        return ()
    if isinstance(value, types.FunctionType):
        cells = [_contents(cell, depth) for cell in value.__closure__ or ()]
        data = [digest(value.__defaults__, depth + 1)]
        data.append(digest(value.__kwdefaults__, depth + 1))
        held = {name: x for name, x in vars(value).items() if name != "__wrapped__"}
        if held:
            data.append(digest(held, depth + 1))
        return "function", _digest_of_code(value.__code__), data, cells
    if isinstance(value, type):
        return "class", value.__module__, value.__qualname__
    if isinstance(value, types.ModuleType):
        return "module", value.__name__
    if parts := inner(value):
        parts = [None if one is None else digest(one, depth + 1) for one in parts]
        return type(value).__qualname__, parts
    try:
        words = pickle.dumps(value)
    except Exception:
        return None
    return None if len(words) > _MOST_BYTES else hashlib.sha1(words).digest()


def _contents(cell: Any, depth: int) -> Any:
    try:
        return digest(cell.cell_contents, depth + 1)
    except ValueError:  # empty
        return ()


@functools.lru_cache(1 << 14)
def _digest_of_code(code: types.CodeType) -> bytes:
    """Return the same for the same source, wherever it stands in its file."""
    constants = [
        _digest_of_code(one)
        if isinstance(one, types.CodeType)
        else sorted(map(repr, one))
        if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]
    words = (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_kwonlyargcount,
        constants,
    )
    return hashlib.sha1(repr(words).encode()).digest()


def differing(
    told: tuple[list[tuple[Entry, Any]], list[str]],
) -> tuple[list[Entry], list[str]]:
    """Return what this process has otherwise than the caller, and lacks.

    Parameters
    ----------
    told : tuple
        From :meth:`Code.told`.

    Returns
    -------
    list of Entry, list of str
        What differs; the operators that are unknown here.
    """
    entries, operators = told
    found = []
    for entry, expected in entries:
        try:
            is_same = digest(entry.value()) == expected
        except _NOT_THERE:
            continue  # nobody here has it
        if not is_same:
            found.append(entry)
    found += _assigned - {entry for entry, _ in entries}
    return found, [name for name in operators if not _torch_ops.has_operator(name)]
