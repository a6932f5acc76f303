"""The machine on which figures were measured, which readers need to judge them."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from paceline import _cgroup

TELLING = ("PACELINE_", "OMP_", "MKL_", "KMP_", "GLIBC_", "MALLOC_", "LD_PRELOAD")


def cpu_model() -> str:
    """Return the processor's name as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def memory_gib() -> float:
    """Return the memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def load() -> float:
    """Return the current load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def environment() -> dict[str, str]:
    """Return the environment variables that affect figures, if they are set."""
    return {k: v for k, v in os.environ.items() if k.startswith(TELLING)}


def describe() -> dict[str, Any]:
    """Return all facts that a reader needs to judge the figures."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "cores_quota": _cgroup.cpu_quota(),
        "memory_gib": round(memory_gib(), 1),
        "load_at_start": load(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "paceline": version("paceline"),
    }
