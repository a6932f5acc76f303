"""Checks of the software: Python, the extension, torch, and environment variables."""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

from paceline._cli.doctor import imports
from paceline._cli.doctor.finding import (
    Finding,
    count,
    describe,
    ok,
    problem,
    warning,
)
from paceline._cli.doctor.system import Cores, look_cores

OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
OLDEST_TORCH = (2, 4)

# ---- Python -------------------------------------------------------------------------


@dataclass(frozen=True)
class Python:
    """The interpreter, and what it runs on."""

    version: tuple[int, int, int]
    implementation: str
    executable: str
    system: str
    is_free_threaded: bool = False


def look_python() -> Python:
    """Read what this interpreter says of itself."""
    libc = " ".join(platform.libc_ver()).strip()
    system = f"{platform.system()} {platform.release()} ({platform.machine()}"
    return Python(
        version=sys.version_info[:3],
        implementation=platform.python_implementation(),
        executable=sys.executable,
        system=f"{system}, {libc})" if libc else f"{system})",
        is_free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    )


def judge_python(python: Python) -> Finding:
    """Judge whether Paceline is made for this Python."""
    version = ".".join(map(str, python.version))
    found = f"{python.implementation} {version} on {python.system}: {python.executable}"
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_PYTHON, NEWEST_PYTHON))
    use = f"Use CPython {oldest} to {newest}."
    if python.version[:2] < OLDEST_PYTHON:
        return problem(found, f"This Python is too old. {use}")
    if python.version[:2] > NEWEST_PYTHON:
        return warning(found, f"This Python is newer than all that were tried. {use}")
    if python.implementation != "CPython":
        return warning(found, f"The extension is written for CPython. {use}")
    if python.is_free_threaded:
        return warning(
            found,
            "Without the global interpreter lock a part of the tests has run, and not "
            "the whole. Use the ordinary build for what must not fail.",
        )
    return ok(found)


# ---- the extension ------------------------------------------------------------------


@dataclass(frozen=True)
class Extension:
    """Paceline's version, and its native module.

    Attributes
    ----------
    version : str
    error : str
        Why the native module cannot be imported.
    isa : str
        The instruction set that sums on the CPU use.
    isa_error : str
        Why there is none.
    processor : str
        The processor's architecture.
    """

    version: str
    error: str = ""
    isa: str = ""
    isa_error: str = ""
    processor: str = ""


def look_extension() -> Extension:
    """Import the native module."""
    import paceline

    version, processor = paceline.__version__, platform.machine()
    try:
        native = importlib.import_module("paceline._native")
    except ImportError as error:
        return Extension(version, error=describe(error), processor=processor)
    try:
        return Extension(version, isa=native.isa(), processor=processor)
    except Exception as error:  # PACELINE_ISA names what is not there
        return Extension(version, isa_error=describe(error), processor=processor)


def judge_extension(extension: Extension) -> Finding:
    """Judge whether the core works, and by which instructions."""
    found = f"paceline {extension.version}"
    if extension.error:
        return problem(
            f"{found}: {extension.error}",
            "The native module is missing, or was built for another Python or a newer "
            f"system. Build it here, in Paceline's folder: {sys.executable} -m pip "
            "install --force-reinstall --no-deps .",
        )
    if extension.isa_error:
        return problem(f"{found}: {extension.isa_error}", "Unset PACELINE_ISA.")
    found += f", sums on the CPU by {extension.isa}"
    if extension.isa != "plain":
        return ok(found)
    return warning(
        found,
        "Sums on the CPU use no vector instructions, which is slower: this "
        f"processor ({extension.processor}) has neither AVX2 nor Neon, or PACELINE_ISA "
        "is set to plain.",
    )


# ---- torch --------------------------------------------------------------------------


@dataclass(frozen=True)
class Torch:
    """The installed torch.

    Attributes
    ----------
    version : str
        Of the installed package; empty where there is none.
    error : str
        Why it cannot be imported.
    build : str
        "CUDA 13.0", "ROCm 6.2" or "CPU".
    has_groups : bool
        Whether it has process groups.
    attach_error : str
        Why Paceline cannot use it.
    missing : tuple of str
        Other packages that Paceline needs, and why they cannot be imported.
    """

    version: str = ""
    error: str = ""
    build: str = ""
    has_groups: bool = True
    attach_error: str = ""
    missing: tuple[str, ...] = ()


def look_torch() -> Torch:
    """Import torch, and hand it to the native module."""
    missing = []
    for name in ("numpy", "cloudpickle"):
        try:
            importlib.import_module(name)
        except Exception as error:
            missing.append(f"{name}: {describe(error)}")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    try:
        import torch.distributed
    except Exception as error:  # an OSError, where a library is missing
        return Torch(version, describe(error), missing=tuple(missing))
    build = has_groups = None
    try:
        from paceline._compat import torch_core, torch_cuda

        build = torch_cuda.build()
        has_groups = torch.distributed.is_available()
        torch_core.attach()
    except Exception as error:
        attach_error = describe(error)
    else:
        attach_error = ""
    return Torch(
        version,
        build=build or "",
        has_groups=has_groups is not False,
        attach_error=attach_error,
        missing=tuple(missing),
    )


def judge_torch(installed: Torch) -> Finding:
    """Judge whether Paceline can use this torch."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    install = f"{sys.executable} -m pip install 'torch>={oldest}'"
    found = f"torch {installed.version or 'of unknown version'}"
    if installed.error:
        if not installed.version:
            return problem(
                installed.error, f"Paceline trains torch's models: {install}."
            )
        return problem(
            f"{found}: {installed.error}",
            f"torch is installed and cannot be imported: {install} --force-reinstall.",
        )
    if installed.build:
        found += f", built for {installed.build}"
    if is_older(installed.version, OLDEST_TORCH):
        return problem(found, f"This torch is older than {oldest}: {install}.")
    if installed.attach_error:
        return problem(
            f"{found}: {installed.attach_error}",
            "Paceline cannot use this torch: install another version of either.",
        )
    if installed.missing:
        return problem(
            f"{found}; {'; '.join(installed.missing)}",
            "Paceline needs these packages: pip install numpy cloudpickle.",
        )
    if not installed.has_groups:
        return problem(
            f"{found}, without torch.distributed",
            "DistributedDataParallel needs process groups: install torch's own wheel.",
        )
    return ok(found)


def is_older(version: str, oldest: tuple[int, int]) -> bool:
    """Tell whether a version, as in "2.13.0+cpu", is older; what is none is not."""
    numbers = version.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return False
    return (int(numbers[0]), int(numbers[1])) < oldest


# ---- threads ------------------------------------------------------------------------

_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Threads:
    """Threads of torch's operators on the CPU.

    Attributes
    ----------
    n_threads : int
    cores : Cores
        What this process may use.
    n_bound : int
        The cores that the main thread may still use once operators have run.
    binding : tuple of str
        Variables that bind threads to cores.
    """

    n_threads: int
    cores: Cores
    n_bound: int
    binding: tuple[str, ...] = ()


def look_threads() -> Threads:
    """Run an operator on all threads, and see what that leaves of the affinity."""
    pid = os.getppid()  # the doctor itself, which has not started OpenMP
    n_before = len(os.sched_getaffinity(pid))
    torch = imports.torch()
    torch.ones(1 << 20).add_(1)
    cores = look_cores()
    return Threads(
        torch.get_num_threads(),
        Cores(cores.n_machine, n_before, cores.quota, cores.n_nodes),
        len(os.sched_getaffinity(0)),
        tuple(f"{name}={os.environ[name]}" for name in _BINDING if name in os.environ),
    )


def judge_threads(threads: Threads) -> Finding:
    """Judge whether threads and cores are as many."""
    found = f"torch runs operators on {count(threads.n_threads, 'thread')}"
    if threads.binding:
        found += f"; {', '.join(threads.binding)}"
    n_cores = threads.cores.n_affinity
    if threads.n_bound < n_cores:
        return warning(
            f"{found}; then the main thread is bound to {threads.n_bound} of "
            f"{count(n_cores, 'core')}",
            "All that the main thread starts, DataLoader's workers too, shares these "
            "cores, and so do all ranks of this host: unset the variables that bind "
            f"threads ({', '.join(_BINDING)}).",
        )
    n_usable = max(1, int(threads.cores.n_usable))
    if threads.n_threads > n_usable:
        return warning(
            f"{found}, for {count(threads.cores.n_usable, 'core')}",
            "More threads than cores wait for each other, and a quota stops them all "
            f"for a part of each 0.1 s: set OMP_NUM_THREADS={n_usable}, divided by the "
            "number of ranks on this host.",
        )
    return ok(found)


# ---- the environment ----------------------------------------------------------------

_PREFIXES: tuple[str, ...] = (
    "PACELINE_",
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "CUDA_",
    "PYTORCH_",
)
_PREFIXES += ("OMP_", "GOMP_", "KMP_", "MKL_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}


def _is_whole(text: str) -> bool:
    try:
        return int(text) >= 1
    except ValueError:
        return False


def _is_seconds(text: str) -> bool:
    try:
        return 1e-9 <= float(text) <= 1e9
    except ValueError:
        return False


def _is_recorder(text: str) -> bool:
    return text in ("0", "1") or text.startswith("/")


def _is_anything(text: str) -> bool:
    return True


def _one_of(*words: str) -> Callable[[str], bool]:
    return lambda text: text in words


VARIABLES: dict[str, tuple[Callable[[str], bool], str]] = {
    "PACELINE_CFLAGS": (_is_anything, ""),
    "PACELINE_CPU_REPLICAS": (_is_whole, "a whole number from 1 on"),
    "PACELINE_INSTALL": (_is_anything, ""),
    "PACELINE_ISA": (
        _one_of("plain", "neon", "avx2", "avx512"),
        "plain, neon, avx2 or avx512",
    ),
    "PACELINE_LIBCUDA": (_is_anything, ""),
    "PACELINE_LIBNCCL": (_is_anything, ""),
    "PACELINE_NCCL_BLOCKING": (_one_of("0", "1"), "0 or 1"),
    "PACELINE_NVCC": (_one_of("0", "1"), "0 or 1"),
    "PACELINE_RECORDER": (_is_recorder, "0, 1 or an absolute path"),
    "PACELINE_STRICT": (_one_of("0", "1"), "0 or 1"),
    "PACELINE_TIMEOUT": (_is_seconds, "a positive number of seconds"),
    "PACELINE_WERROR": (_one_of("0", "1"), "0 or 1"),
}
"""Every variable of Paceline's, what its value must be, and that in words."""


@dataclass(frozen=True)
class Environment:
    """Variables that change what Paceline or torch does."""

    variables: Mapping[str, str] = field(default_factory=dict)


def look_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables that matter."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES))
    return Environment({name: environ[name] for name in names})


def judge_environment(environment: Environment) -> Finding:
    """Judge names that are misspelt, values that are wrong, and what is slow."""
    variables = environment.variables
    found = ", ".join(f"{name}={value}" for name, value in variables.items())
    wrong, doubtful = [], []
    for name, value in variables.items():
        if name in VARIABLES:
            is_right, words = VARIABLES[name]
            if value and not is_right(value):
                wrong.append(f"{name} is {value!r}: give {words}.")
        elif name.startswith("PACELINE_"):
            close = difflib.get_close_matches(name, VARIABLES, 1)
            meant = f": did you mean {close[0]}?" if close else "."
            doubtful.append(f"Paceline has no variable {name}{meant}")
        elif name in _SLOW and value.upper() == _SLOW[name]:
            doubtful.append(f"{name}={value} is for debugging, and slow: unset it.")
    advice = " ".join([*wrong, *doubtful])
    if wrong:
        return problem(found, advice)
    return warning(found, advice) if doubtful else ok(found or "nothing is set")
