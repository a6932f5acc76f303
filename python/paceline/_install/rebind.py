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

Children.  ``PACELINE_INSTALL=1`` asks a process that starts to install as well, right
after it has imported torch: Python runs the line of ``paceline.pth``, which lies in
``site-packages``.  That reaches neither Python with ``-S``, nor folders on
``PYTHONPATH``, nor a fork server that was started before.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import os
import pkgutil
import site
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
NOT_REACHED = (
    "Python reads no paceline.pth when it starts here (-S, or pip install --target)"
)
_MAKER = "torch.distributed._composable.replicate"
_ADVICE = {  # a variable or module that such a process has, and what to do there
    "RAY_RAYLET_PID": "start Ray with "
    'ray.init(runtime_env={"env_vars": {"PACELINE_INSTALL": "1"}})',
    "pyspark.worker": "start Spark with spark.executorEnv.PACELINE_INSTALL=1",
    "ipykernel": "restart the kernel, and call install() in its first cell",
    "sys": "call install() first, or start the program by python -m paceline",
}

_lock = threading.RLock()
_is_bound = False
_torchs: dict[str, Any] = {}  # name: torch's object, while bound
_ours: dict[str, Any] = {}  # name: our object
_put: list[tuple[ModuleType, str, Any]] = []  # module, name, old value


class Installation:
    """The result of :func:`install`: the end of a ``with`` block uninstalls.

    If paceline was already installed, it stays installed.

    Examples
    --------
    >>> import paceline
    >>> with paceline.install() as installation:
    ...     print(installation)
    <paceline installation, on>
    >>> print(installation)
    <paceline installation, off>
    """

    __module__ = "paceline"

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
        warning names them, and says what to do in such a process.

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

    It reaches children by the environment variable ``PACELINE_INSTALL=1``.  Set it
    yourself for processes that a daemon starts, such as workers of Ray or executors of
    Spark, and for any program you do not want to edit.  It does not reach Python with
    ``-S``, children that get another environment, or a running ``forkserver``.
    """
    with _lock:
        is_first = not is_installed()
        if is_first:
            os.environ[_environment.INSTALL] = "1"
            if not reaches_children():
                words = f"{NOT_REACHED}: other processes use torch's own classes"
                warnings.warn(words, stacklevel=2)
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
        os.environ.pop(_environment.INSTALL, None)


def is_installed() -> bool:
    """Tell whether torch's names mean ours, or will once torch is imported."""
    return _is_bound or import_hook.is_on()


def reaches_children() -> bool:
    """Tell whether Python reads a folder that has ``paceline.pth`` when it starts."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    are_there = [os.path.exists(f"{folder}/paceline.pth") for folder in folders]
    return any(are_there) and not sys.flags.no_site


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
    advice = next(_ADVICE[k] for k in _ADVICE if k in os.environ or k in sys.modules)
    for names, modules in sorted(found.items()):
        holders = sorted(modules)
        more = f" and {len(holders) - 5} more" if len(holders) > 5 else ""
        warnings.warn(
            f"torch's own {names} was imported before paceline.install() by "
            f"{', '.join(holders[:5])}{more}, and stays torch's there: {advice}",
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
