"""Checks of memory: how much, shared memory, malloc, huge pages.

Functions that read files take the folder that stands for ``/``.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline import _cgroup
from paceline._cli.doctor.finding import (
    GIB,
    MIB,
    Finding,
    describe,
    ok,
    problem,
    size,
    warning,
)

_ROOT = Path("/")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# ---- memory -------------------------------------------------------------------------

_FEW_BYTES = GIB


@dataclass(frozen=True)
class Memory:
    """Bytes of the machine, and of the cgroup's limit."""

    total: int
    available: int
    limit: _cgroup.Usage | None


def look_memory(root: Path = _ROOT) -> Memory:
    """Read how much memory there is."""
    text = _text(root / "proc/meminfo")
    kilobytes = {
        name: int(number)
        for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    total = kilobytes.get("MemTotal", 0) << 10
    available = kilobytes.get("MemAvailable", kilobytes.get("MemFree", 0)) << 10
    return Memory(total, available, _cgroup.memory(root))


def judge_memory(memory: Memory) -> Finding:
    """Judge whether a model and its ranks fit."""
    if memory.total == 0:
        return warning(
            "/proc/meminfo cannot be read",
            "Paceline cannot see that memory runs out before the kernel ends a "
            "process. Mount /proc.",
        )
    found = f"{size(memory.available)} available of {size(memory.total)}"
    free = memory.available
    if memory.limit is not None and memory.limit.limit < memory.total:
        found += f"; the cgroup allows {size(memory.limit.limit)}"
        found += f", of which {size(memory.limit.free)} are free"
        free = min(free, memory.limit.free)
    if free >= _FEW_BYTES:
        return ok(found)
    return warning(
        found,
        "A rank's process takes 150 MiB besides its model and gradients; the kernel "
        "kills processes when memory runs out. End other programs, or raise the "
        "container's limit (docker run --memory).",
    )


# ---- shared memory ------------------------------------------------------------------

_TRIED_BYTES = 32 * MIB


@dataclass(frozen=True)
class SharedMemory:
    """What became of shared memory that was written and read."""

    n_bytes: int
    error: str = ""


def look_shared_memory() -> SharedMemory:
    """Make memory that processes can share, map it twice, write, read and compare."""
    try:
        fd = os.memfd_create("paceline")
    except OSError as error:
        return SharedMemory(_TRIED_BYTES, describe(error))
    try:
        os.posix_fallocate(fd, 0, _TRIED_BYTES)  # an error where SIGBUS would come
        with mmap.mmap(fd, _TRIED_BYTES) as first, mmap.mmap(fd, _TRIED_BYTES) as other:
            pattern = bytes(range(251)) * (_TRIED_BYTES // 251 + 1)
            first[:] = pattern[:_TRIED_BYTES]
            if other[:] != first[:]:
                return SharedMemory(_TRIED_BYTES, "two mappings hold other bytes")
    except OSError as error:
        return SharedMemory(_TRIED_BYTES, describe(error))
    finally:
        os.close(fd)
    return SharedMemory(_TRIED_BYTES)


def judge_shared_memory(memory: SharedMemory) -> Finding:
    """Judge whether processes can share memory."""
    if not memory.error:
        return ok(f"memfd_create works: {size(memory.n_bytes)} written and read")
    return problem(
        f"memfd_create: {memory.error}",
        "Ranks average by the process group instead, which is slower, and launch() "
        "fails. Allow memfd_create in the container's seccomp profile, raise its "
        "memory limit, and see that `ulimit -f` is unlimited.",
    )


@dataclass(frozen=True)
class DevShm:
    """Bytes of /dev/shm; an error where it cannot be used."""

    total: int
    free: int
    error: str = ""


def look_dev_shm(root: Path = _ROOT) -> DevShm:
    """Read how large /dev/shm is."""
    folder = root / "dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return DevShm(0, 0, describe(error))
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    error_text = "" if is_writable else "it cannot be written to"
    block = found.f_frsize
    return DevShm(found.f_blocks * block, found.f_bavail * block, error_text)


def judge_dev_shm(shm: DevShm) -> Finding:
    """Judge whether DataLoader's workers and NCCL have what they use of it."""
    found = shm.error or f"{size(shm.free)} free of {size(shm.total)}"
    if not shm.error and shm.free >= GIB:
        return ok(found)
    return warning(
        found,
        "Paceline does not need /dev/shm, but torch's DataLoader and NCCL do: they "
        'fail with "bus error" or "No space left on device" where it is full. '
        "Start the container with --shm-size=8g or --ipc=host, or remove what was left "
        "in /dev/shm.",
    )


# ---- memory allocation --------------------------------------------------------------

_SLOW_MALLOC = ("MALLOC_CHECK_", "MALLOC_PERTURB_")
_KEEPS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")
_OTHERS = re.compile(r"(jemalloc|tcmalloc|mimalloc)")


@dataclass(frozen=True)
class Malloc:
    """The environment variables that malloc reads."""

    variables: Mapping[str, str]


def look_malloc(environ: Mapping[str, str] = os.environ) -> Malloc:
    """Read the variables."""
    names = [name for name in environ if name.startswith("MALLOC_")]
    names += [name for name in ("GLIBC_TUNABLES", "LD_PRELOAD") if environ.get(name)]
    return Malloc({name: environ[name] for name in sorted(names)})


def judge_malloc(malloc: Malloc) -> Finding:
    """Judge whether malloc keeps freed memory."""
    variables = malloc.variables
    found = ", ".join(f"{name}={value}" for name, value in variables.items())
    slow = [name for name in _SLOW_MALLOC if variables.get(name, "0") != "0"]
    if slow:
        return warning(
            found, f"malloc checks all memory, which is slow: unset {', '.join(slow)}."
        )
    other = _OTHERS.search(variables.get("LD_PRELOAD", ""))
    tunables = variables.get("GLIBC_TUNABLES", "")
    if other or "glibc.malloc" in tunables or any(map(variables.get, _KEEPS)):
        return ok(found)
    return ok(
        found or "the C library's, with its defaults",
        "Where layers on the CPU have tens of MiB, ranks gain time by keeping freed "
        "memory: MALLOC_TRIM_THRESHOLD_=1099511627776 MALLOC_MMAP_MAX_=0.",
    )


@dataclass(frozen=True)
class HugePages:
    """What the kernel does with transparent huge pages; empty: it has none."""

    ordinary: str
    shared: str


def look_huge_pages(root: Path = _ROOT) -> HugePages:
    """Read the settings, of which brackets mark the chosen one."""
    folder = root / "sys/kernel/mm/transparent_hugepage"

    def chosen(name: str) -> str:
        match = re.search(r"\[(\w+)\]", _text(folder / name))
        return match[1] if match else ""

    return HugePages(chosen("enabled"), chosen("shmem_enabled"))


def judge_huge_pages(pages: HugePages) -> Finding:
    """Judge whether large tensors can be in large pages."""
    if not pages.ordinary:
        return ok("the kernel does not say that it has transparent huge pages")
    found = f"{pages.ordinary} for ordinary memory"
    found += f", {pages.shared} for shared memory" if pages.shared else ""
    if pages.ordinary != "never":
        return ok(found)
    return ok(
        found,
        "Large tensors on the CPU are faster in huge pages: as root, `echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled`, and THP_MEM_ALLOC_ENABLE=1 for "
        "torch.",
    )
