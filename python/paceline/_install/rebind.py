"""Binds torch's names to Paceline's classes, in this process and its children.

``torch.nn.DataParallel`` is set to ours; so are ``DataParallel``, ``data_parallel`` and
``DistributedDataParallel`` in ``torch.nn.parallel`` and in the submodules that define
them.  ``torch.nn.parallel.distributed`` is special: the code of torch's class looks up
its own name there (the join hook's ``isinstance``, ``_active_ddp_module``), and must
find torch's class.  So that module keeps its names, and a copy of it, with our class,
replaces it in ``sys.modules``.

Our classes derive from torch's, so torch's checks for its own class accept ours too:
asserts, ``functional_call``, checkpoints, ONNX, dynamo.  Modules of torch that are
imported later, and programs, check for our class instead, and do not accept a wrapper
that torch's class made before.  ``replicate``, ``scatter``, ``gather`` and
``parallel_apply`` go on as torch's on GPUs, and serve replicas on the CPU.
``torch.distributed._composable.replicate`` makes wrappers for programs, so it gets our
class even if it was imported before.

A module that was imported before and did ``from torch.nn.parallel import ...`` keeps
torch's class: ``install()`` warns, and names such modules.

Pickles.  A pickle refers to torch's class by its public name.  While installed, loading
a DataParallel makes one of ours (torch's if its devices are GPUs), and loading a
DistributedDataParallel makes torch's.  Objects of torch's class that were made before
can still be pickled, and load with torch alone.

Children.  ``PACELINE_INSTALL=1`` asks children to install too.  A folder at the front
of ``PYTHONPATH`` holds a ``sitecustomize`` that does it right after torch is imported;
it then removes itself and runs the ``sitecustomize`` that it hides.  It does not reach
Python with ``-I``, ``-E`` or ``-S``, a child with another environment, or a fork server
that was started before.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import os
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from paceline import _environment
from paceline._install import import_hook

_CLASSES = ("DataParallel", "DistributedDataParallel", "data_parallel")
_DDP = "DistributedDataParallel"
_HOME_OF_DDP = "torch.nn.parallel.distributed"
_NAMES = {  # the module that defines a name first
    "torch.nn.parallel.data_parallel": ("DataParallel", "data_parallel"),
    _HOME_OF_DDP: (_DDP,),
    "torch.nn.parallel.scatter_gather": ("scatter", "scatter_kwargs", "gather"),
    "torch.nn.parallel.replicate": ("replicate",),
    "torch.nn.parallel.parallel_apply": ("parallel_apply",),
    "torch.nn.parallel": (
        *_CLASSES,
        *("scatter", "gather", "replicate", "parallel_apply"),
    ),
    "torch.nn": ("DataParallel",),
}
_MAKER = "torch.distributed._composable.replicate"
_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup")

_lock = threading.RLock()
_is_bound = False
_torchs: dict[str, Any] = {}  # name: torch's object, while bound
_ours: dict[str, Any] = {}  # name: our object
_put: list[tuple[ModuleType, str, Any]] = []  # module, name, old value
_before: dict[str, str | None] | None = None  # old environment variables, if changed


class Installation:
    """The result of :func:`install`: the end of a ``with`` block uninstalls.

    If paceline was already installed, it stays installed.
    """

    def __init__(self, is_first: bool) -> None:
        self._is_first = is_first

    def __repr__(self) -> str:
        return f"<paceline installation, {'on' if is_installed() else 'off'}>"

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_first:
            uninstall()


def install() -> Installation:
    """Make torch's names DataParallel and DistributedDataParallel mean Paceline's.

    From now on ``torch.nn.DataParallel``, ``torch.nn.parallel.DataParallel``,
    ``torch.nn.parallel.DistributedDataParallel``, ``torch.nn.parallel.data_parallel``
    are :class:`paceline.DataParallel`, :class:`paceline.DistributedDataParallel` and
    :func:`paceline.data_parallel`, in this process and in the Python processes that it
    starts.  Call it before any code imports these names.  To leave a program unchanged,
    start it by ``python -m paceline`` instead.

    Returns
    -------
    Installation
        A context manager that uninstalls at its end, if this call installed.

    Warns
    -----
    UserWarning
        If modules have already imported torch's class: they go on using it.  The
        warning names them.

    See Also
    --------
    uninstall

    Examples
    --------
    >>> import paceline, torch
    >>> with paceline.install():
    ...     torch.nn.DataParallel is paceline.DataParallel
    True
    >>> torch.nn.DataParallel is paceline.DataParallel
    False

    Notes
    -----
    It does not import torch.  Paceline's classes derive from torch's, so they pass
    torch's ``isinstance`` checks.  A wrapper that torch's class made before is not an
    instance of ``torch.nn.parallel.DistributedDataParallel`` any more: wrap after
    installing.  May be called again.

    ``torch.nn.parallel.replicate``, ``scatter``, ``gather`` and ``parallel_apply``
    work as torch's on GPUs; on a machine without, they serve replicas on the CPU.

    It reaches children through the environment: ``PACELINE_INSTALL``, and a folder at
    the front of ``PYTHONPATH`` with a ``sitecustomize`` (an existing one runs too).  It
    does not reach Python with ``-I``, ``-E`` or ``-S``, children that get another
    environment, or a running ``forkserver``.
    """
    with _lock:
        is_first = not is_installed()
        if is_first:
            _reach_children()
        if "torch" not in sys.modules:
            import_hook.begin(_bind)
        elif not _is_bound:
            import_hook.end()
            _bind()
            _warn_of_holders()
        return Installation(is_first)


def uninstall() -> None:
    """Undo :func:`install`: torch's names mean torch's classes again.

    Existing objects keep their class.  Does nothing if paceline is not installed.

    Warns
    -----
    UserWarning
        If one of the names was set to something else meanwhile: it keeps that value.

    Examples
    --------
    >>> import paceline, torch
    >>> _ = paceline.install()
    >>> paceline.uninstall()
    >>> torch.nn.DataParallel is paceline.DataParallel
    False
    """
    with _lock:
        import_hook.end()
        if _is_bound:
            _unbind()
        _forget_children()


def is_installed() -> bool:
    """Tell whether torch's names mean ours, or will once torch is imported."""
    return _is_bound or import_hook.is_on()


def install_in_child() -> None:
    """Bind the names if the parent process asks for it; torch was just imported."""
    if _environment.is_install_asked():
        with _lock:
            _bind()


# ---- the names ----------------------------------------------------------------------


def _bind() -> None:
    global _is_bound
    if _is_bound:
        return
    for module, names in _NAMES.items():
        for name in names:
            is_class = name in _CLASSES
            home = "paceline" if is_class else "paceline._install.functions"
            _torchs.setdefault(name, vars(importlib.import_module(module))[name])
            _ours[name] = getattr(importlib.import_module(home), name)
    _put_copy(_HOME_OF_DDP)
    for module, names in _NAMES.items():
        for name in names:
            _put_name(sys.modules[module], name)
    if _MAKER in sys.modules:
        _put_name(sys.modules[_MAKER], _DDP)
    for name in ("DataParallel", "DistributedDataParallel"):
        copyreg.pickle(_torchs[name], _reduce)
    _is_bound = True


def _put_copy(home: str) -> None:
    """Replace a module by a copy; its functions keep the globals of the original."""
    own = sys.modules[home]
    copy = ModuleType(home, own.__doc__)
    vars(copy).update(vars(own))
    parent, _, name = home.rpartition(".")
    _put.append((sys.modules[parent], name, own))
    setattr(sys.modules[parent], name, copy)
    sys.modules[home] = copy


def _put_name(module: ModuleType, name: str) -> None:
    """Set a name to our object, unless the program has set it to another one."""
    if vars(module).get(name) is _torchs[name]:
        _put.append((module, name, _torchs[name]))
        setattr(module, name, _ours[name])


def _unbind() -> None:
    global _is_bound
    _is_bound = False
    taken = []
    maker = sys.modules.get(_MAKER)
    if maker is not None and not any(module is maker for module, _, _ in _put):
        _put.append((maker, _DDP, _torchs[_DDP]))  # imported since
    for module, name, before in reversed(_put):
        found = vars(module).get(name)
        if isinstance(before, ModuleType):
            if sys.modules.get(before.__name__) is found:
                sys.modules[before.__name__] = before
        elif found is not _ours[name]:
            taken.append(f"{module.__name__}.{name}")
            continue
        setattr(module, name, before)
    for name in ("DataParallel", "DistributedDataParallel"):
        if copyreg.dispatch_table.get(_torchs[name]) is _reduce:
            del copyreg.dispatch_table[_torchs[name]]
    _put.clear()
    _torchs.clear()
    if taken:
        warnings.warn(
            f"{', '.join(taken)} changed since paceline.install(), and keeps the new "
            "value",
            stacklevel=3,
        )


def _warn_of_holders() -> None:
    """Warn of the modules that have already imported torch's own objects."""
    owned = {id(_torchs[name]): name for name in _CLASSES}
    found: dict[str, set[str]] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", None)
        if not isinstance(module, ModuleType) or not isinstance(name, str):
            continue
        if name.partition(".")[0] in ("torch", "paceline"):
            continue
        held = {owned[id(v)] for v in list(vars(module).values()) if id(v) in owned}
        if held:
            found.setdefault(", ".join(sorted(held)), set()).add(name)
    for names, modules in sorted(found.items()):
        holders = sorted(modules)
        more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
        warnings.warn(
            f"torch's own {names} was imported before paceline.install() by "
            f"{', '.join(holders[:5])}{more}, and stays torch's there: call install() "
            "first, or start the program by python -m paceline",
            stacklevel=3,
        )


# ---- pickles ------------------------------------------------------------------------


class _New:
    """Makes an empty object of torch's class; a pickle refers to it by torch's name."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __call__(self) -> Any:
        return object.__new__(self._kind)

    def __reduce__(self) -> Any:
        return functools.partial, (object.__new__, _Name(self._kind))


class _Name:
    """A class, pickled as a name that is looked up on loading."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def __reduce__(self) -> Any:
        path = f"{self._kind.__module__}:{self._kind.__qualname__}"
        return pkgutil.resolve_name, (path,)


def _reduce(wrapper: Any) -> tuple[Callable[[], Any], tuple[()], Any]:
    """Reduce an object of torch's own class while the name means ours."""
    return _New(type(wrapper)), (), wrapper.__reduce_ex__(2)[2]


# ---- children -----------------------------------------------------------------------


def _reach_children() -> None:
    global _before
    if os.pathsep in _FOLDER:
        warnings.warn(
            f"paceline lies in {_FOLDER!r}, which PYTHONPATH cannot hold: processes "
            "that this one starts use torch's own classes",
            stacklevel=3,
        )
        return
    paths = os.environ.get("PYTHONPATH")
    _before = {
        "PYTHONPATH": paths,
        _environment.INSTALL: os.environ.get(_environment.INSTALL),
    }
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *([paths] if paths else [])])
    os.environ[_environment.INSTALL] = "1"


def reaches_children() -> bool:
    """Tell whether the environment makes children install paceline."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return _FOLDER in paths and _environment.is_install_asked()


def _forget_children() -> None:
    global _before
    before, _before = _before or {}, None
    os.environ.pop(_environment.INSTALL, None)
    if before.get(_environment.INSTALL) is not None:
        os.environ[_environment.INSTALL] = before[_environment.INSTALL] or ""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _FOLDER in paths:
        rest = [each for each in paths if each != _FOLDER]
        if rest or before.get("PYTHONPATH") is not None:
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        else:
            del os.environ["PYTHONPATH"]
