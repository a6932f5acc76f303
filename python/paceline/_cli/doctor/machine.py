"""Checks of what every training needs: the software, cores and ``/dev/shm``."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from paceline import _cgroup, _environment
from paceline._cli.doctor.finding import (
    GIB,
    Finding,
    count,
    describe,
    ok,
    problem,
    size,
    warning,
)
from paceline._cli.options import meant
from paceline._install import rebind

OLDEST_TORCH = (2, 4)

# ---- the extension ------------------------------------------------------------------


def look_extension() -> Finding:
    """Import the native module, and read its instruction set."""
    import paceline

    found = (
        f"paceline {paceline.__version__}, {platform.python_implementation()} "
        f"{platform.python_version()} on {platform.system()} {platform.release()} "
        f"({platform.machine()}): {sys.executable}"
    )
    try:
        native = importlib.import_module("paceline._native")
    except ImportError as error:
        return problem(
            f"{found}: {describe(error)}",
            "The native module is missing, or was built for another Python or a newer "
            f"system. Build it here, in Paceline's folder: {sys.executable} -m pip "
            "install --force-reinstall --no-deps .",
        )
    try:
        return judge_isa(found, native.isa())
    except Exception as error:  # PACELINE_ISA names one that is missing
        return problem(f"{found}: {describe(error)}", "Unset PACELINE_ISA.")


def judge_isa(found: str, isa: str) -> Finding:
    """Judge whether sums on the CPU use vector instructions."""
    found += f", sums on the CPU by {isa}"
    if isa != "plain":
        return ok(found)
    return warning(
        found,
        "Sums on the CPU use no vector instructions, which is slower: this processor "
        "has neither AVX2 nor Neon, or PACELINE_ISA is set to plain.",
    )


# ---- torch --------------------------------------------------------------------------


def look_torch() -> Finding:
    """Import torch, and attach it to the native module."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    error_text = build = ""
    has_groups = True
    try:
        for name in ("numpy", "cloudpickle", "torch.distributed"):
            importlib.import_module(name)
        from paceline._compat import torch_core, torch_cuda

        build = torch_cuda.build()
        has_groups = importlib.import_module("torch.distributed").is_available()
        torch_core.attach()
    except Exception as error:  # an OSError, if a library is missing
        error_text = describe(error)
    return judge_torch(version, build, error_text, has_groups)


def judge_torch(
    version: str, build: str = "", error: str = "", has_groups: bool = True
) -> Finding:
    """Judge whether Paceline can use this torch; the version "" means no torch."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    install = f"{sys.executable} -m pip install 'torch>={oldest}' numpy cloudpickle"
    found = f"torch {version}" if version else "no torch"
    if build:
        found += f", built for {build}"
    numbers = version.split(".")[:2]
    is_known = len(numbers) == len(OLDEST_TORCH) and all(map(str.isdecimal, numbers))
    if is_known and tuple(map(int, numbers)) < OLDEST_TORCH:
        return problem(found, f"This torch is older than {oldest}: {install}.")
    if error:
        again = " --force-reinstall" if version else ""
        return problem(f"{found}: {error}", f"Paceline needs both: {install}{again}.")
    if not has_groups:
        return problem(
            f"{found}, without torch.distributed",
            "DistributedDataParallel needs process groups: install torch's own wheel.",
        )
    return ok(found)


# ---- the environment ----------------------------------------------------------------

_PREFIXES: tuple[str, ...] = ("PACELINE_", "CUDA_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_PREFIXES += ("PYTORCH_", "TORCH_DISTRIBUTED_", "TORCHELASTIC_")
_PREFIXES += ("OMP_", "GOMP_", "KMP_", "MKL_")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
}


def _is_seconds(text: str) -> bool:
    try:
        return 1e-9 <= float(text) <= 1e9
    except ValueError:
        return False


# Those that may have any value, and those that are 0 or 1.
_FREE: tuple[str, ...] = ("PACELINE_CFLAGS", "PACELINE_INSTALL", "PACELINE_RECORDER")
_FREE += ("PACELINE_LIBCUDA", "PACELINE_LIBNCCL")
_FLAGS: tuple[str, ...] = ("PACELINE_NVCC", "PACELINE_STRICT", "PACELINE_WERROR")
_is_check = re.compile("off|rotate|all").fullmatch
_is_isa = re.compile("plain|neon|avx2|avx512").fullmatch
VARIABLES: dict[str, tuple[Callable[[str], object], str]] = {
    **dict.fromkeys(_FREE, (str, "")),
    **dict.fromkeys(_FLAGS, (re.compile("[01]").fullmatch, "0 or 1")),
    "PACELINE_CHECK": (_is_check, "off, rotate or all"),
    "PACELINE_CPU_REPLICAS": (
        re.compile(r"\s*\+?0*[1-9]\d*\s*").fullmatch,
        "a whole number from 1 on",
    ),
    "PACELINE_ISA": (_is_isa, "plain, neon, avx2 or avx512"),
    "PACELINE_LINK_TIMEOUT": (_is_seconds, "a positive number of seconds"),
    "PACELINE_SECRET": (
        re.compile(".{16,}", re.DOTALL).fullmatch,
        "16 or more random characters, the same to every rank",
    ),
    "PACELINE_TIMEOUT": (_is_seconds, "a positive number of seconds"),
}
"""Every variable of Paceline: a test of its value, and the right values in words."""


def look_environment() -> Finding:
    """Read the variables that matter."""
    return judge_environment(os.environ, rebind.reaches_children())


def judge_environment(environ: Mapping[str, str], is_reached: bool = True) -> Finding:
    """Judge misspelt names, wrong values, and slow settings."""
    names = sorted(name for name in environ if name.startswith(_PREFIXES))
    variables = {name: environ[name] for name in names}
    shown, wrong, doubtful = dict(variables), [], []
    for name, value in variables.items():
        is_unknown = name.startswith("PACELINE_") and name not in VARIABLES
        if name == _environment.SECRET or is_unknown:  # it may be misspelt
            shown[name] = "..."
        if name in VARIABLES:
            is_right, words = VARIABLES[name]
            if value and not is_right(value):
                wrong.append(f"{name} is {shown[name]!r}: give {words}.")
        elif is_unknown:
            doubtful.append(
                f"Paceline has no variable {name}{meant(name, VARIABLES) or '.'}"
            )
        elif name in _SLOW and value.upper() == _SLOW[name]:
            doubtful.append(f"{name}={value} is for debugging, and slow: unset it.")
    if not is_reached:
        effect = f"install() and {_environment.INSTALL}=1 change no other process"
        doubtful.append(f"{rebind.NOT_REACHED}: {effect}.")
    advice = " ".join([*wrong, *doubtful])
    found = ", ".join(f"{k}={v}" for k, v in shown.items()) or "nothing is set"
    if wrong:
        return problem(found, advice)
    return warning(found, advice) if doubtful else ok(found)


# ---- cores --------------------------------------------------------------------------

_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def look_cores() -> Finding:
    """Run an operator on all threads, and read the affinity that it leaves."""
    import torch

    # The doctor itself has not started OpenMP.
    n_affinity = len(os.sched_getaffinity(os.getppid()))
    torch.ones(1 << 20).add_(1)
    return judge_cores(
        n_machine=os.cpu_count() or n_affinity,
        n_affinity=n_affinity,
        quota=_cgroup.cpu_quota(),
        n_threads=torch.get_num_threads(),
        n_bound=len(os.sched_getaffinity(0)),
    )


def judge_cores(
    n_machine: int,  # cores
    n_affinity: int,  # those that this process may use
    quota: float | None,  # for how many cores the cgroup grants time
    n_threads: int,  # of torch's operators
    n_bound: int,  # cores that the main thread may use once operators have run
) -> Finding:
    """Judge whether several ranks have a core each, and threads do not exceed cores."""
    found = f"{n_affinity} of {count(n_machine, 'core')} by affinity"
    if quota is not None:
        found += f", time for {count(quota, 'core')} by the cgroup's quota"
    found += f", {count(n_threads, 'torch thread')}"
    n_usable = min(n_affinity, quota or n_affinity)
    if n_bound < n_affinity:
        return warning(
            f"{found}; then the main thread is bound to {n_bound} of them",
            "Everything that the main thread starts, even DataLoader's workers, shares "
            "these cores, and so do all ranks of this host: unset the variables that "
            f"bind threads ({', '.join(_BINDING)}).",
        )
    if n_usable < 2:
        return warning(
            found,
            "Ranks on the CPU take turns on less than two cores, which is slower than "
            "one process; GPUs wait for data loading. Lift the limit, if there is one: "
            "taskset, the scheduler (Slurm: --cpus-per-task), docker run --cpus.",
        )
    if n_threads > n_usable:
        return warning(
            found,
            "More threads than cores wait for each other, and a quota stops them all "
            f"for a part of each 0.1 s: set OMP_NUM_THREADS={int(n_usable)}, divided "
            "by the number of ranks on this host.",
        )
    return ok(found)


# ---- /dev/shm -----------------------------------------------------------------------


def look_dev_shm(root: Path = Path("/")) -> Finding:
    """Read how large /dev/shm is."""
    folder = root / "dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return judge_dev_shm(0, 0, describe(error))
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    return judge_dev_shm(
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        "" if is_writable else "it cannot be written to",
    )


def judge_dev_shm(total: int, free: int, error: str = "") -> Finding:
    """Judge whether DataLoader's workers and NCCL have enough of it."""
    found = error or f"{size(free)} free of {size(total)}"
    if not error and free >= GIB:
        return ok(found)
    return warning(
        found,
        "Paceline does not need /dev/shm, but torch's DataLoader and NCCL do: they "
        'fail with "bus error" or "No space left on device" if it is full. '
        "Start the container with --shm-size=8g or --ipc=host, or remove old files "
        "from /dev/shm.",
    )
