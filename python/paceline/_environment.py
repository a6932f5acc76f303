"""The environment and the machine, as the Python side reads them: here alone.

What the native side reads (``PACELINE_TIMEOUT``, ``PACELINE_ISA``, and the libraries
``PACELINE_LIBCUDA`` and ``PACELINE_LIBNCCL``) stands in ``csrc/core/config.c``.
"""

from __future__ import annotations

import os
from pathlib import Path

CPU_REPLICAS = "PACELINE_CPU_REPLICAS"
INSTALL = "PACELINE_INSTALL"
STRICT = "PACELINE_STRICT"
_NODES = Path("/sys/devices/system/node")


def cpu_replicas() -> int | None:
    """Return the number in ``PACELINE_CPU_REPLICAS``, or None where it is not set.

    Raises
    ------
    ValueError
        If it is no whole number from 1 on.
    """
    word = os.environ.get(CPU_REPLICAS, "")
    if not word:
        return None
    try:
        n_replicas = int(word)
    except ValueError:
        n_replicas = 0
    if n_replicas < 1:
        raise ValueError(
            f"{CPU_REPLICAS} is {word!r}: give a whole number from 1 on, as in "
            f"{CPU_REPLICAS}=2"
        )
    return n_replicas


def is_install_asked() -> bool:
    """Tell whether a parent process has called ``paceline.install()``."""
    return os.environ.get(INSTALL) == "1"


def is_strict() -> bool:
    """Tell whether ``PACELINE_STRICT`` asks for torch's refusals.

    Raises
    ------
    ValueError
        If it is neither 0 nor 1, nor empty.
    """
    word = os.environ.get(STRICT, "")
    if word not in ("", "0", "1"):
        raise ValueError(f"{STRICT} is {word!r}: give 1, or 0, as in {STRICT}=1")
    return word == "1"


def of_launcher(name: str) -> str:
    """Return a variable that launchers or torch read, in the words of torch's logs."""
    return os.environ.get(name, "N/A")


def nccl_host() -> str:
    """Return what NCCL tells hosts apart by: ``NCCL_HOSTID``, or name and boot."""
    given = os.environ.get("NCCL_HOSTID", "")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return given or f"{os.uname().nodename}/{boot}"


def nccl_shares_gpus() -> bool:
    """Tell whether NCCL was told to take several ranks on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1"


def copies_by_side_stream() -> bool:
    """Tell whether inputs are copied to a GPU by a stream of their own, as in torch."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"


def numa_nodes(folder: Path = _NODES) -> int:
    """Return how many NUMA nodes have a core that this process may use; at least 1."""
    own = os.sched_getaffinity(0)
    n_nodes = 0
    try:
        for node in folder.glob("node[0-9]*"):
            n_nodes += not own.isdisjoint(_parse((node / "cpulist").read_text()))
    except (OSError, ValueError):
        return 1
    return max(n_nodes, 1)


def _parse(words: str) -> set[int]:
    """Return the numbers of a list as Linux writes it: ``0-3,8,10-11``."""
    numbers: set[int] = set()
    for part in filter(None, words.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
