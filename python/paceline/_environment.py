"""Environment variables and facts of the machine: Python code reads them only here.

``csrc/core/config.c`` reads those of the native side: ``PACELINE_TIMEOUT``,
``PACELINE_LINK_TIMEOUT``, ``PACELINE_CHECK``, ``PACELINE_ISA``, and the libraries
``PACELINE_LIBCUDA`` and ``PACELINE_LIBNCCL``.
"""

from __future__ import annotations

import os
from pathlib import Path

CPU_REPLICAS = "PACELINE_CPU_REPLICAS"
INSTALL = "PACELINE_INSTALL"
RECORDER = "PACELINE_RECORDER"
SECRET = "PACELINE_SECRET"
STRICT = "PACELINE_STRICT"
_SECRET_CHARACTERS = 16

agreed_start = ""  # set by ``paceline.init()`` if torchrun's store outlives starts


def cpu_replicas() -> int | None:
    """Return the number in ``PACELINE_CPU_REPLICAS``, or None if it is not set."""
    text = os.environ.get(CPU_REPLICAS, "")
    if not text:
        return None
    try:
        n_replicas = int(text)
    except ValueError:
        n_replicas = 0
    if n_replicas < 1:
        raise ValueError(
            f"{CPU_REPLICAS} is {text!r}: give a whole number from 1 on, as in "
            f"{CPU_REPLICAS}=2"
        )
    return n_replicas


def is_strict() -> bool:
    """Tell whether ``PACELINE_STRICT`` turns on torch's refusals."""
    text = os.environ.get(STRICT, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{STRICT} is {text!r}: give 1, or 0, as in {STRICT}=1")
    return text == "1"


def recorder_name() -> str | None:
    """Return the name of recordings in /proc; None if steps are not recorded."""
    text = os.environ.get(RECORDER, "")
    if text == "0":
        return None
    return "paceline-steps" if text in ("", "1") else f"paceline-steps-{text}"


def check() -> str:
    """Return the word in ``PACELINE_CHECK``, which the native side reads."""
    return os.environ.get("PACELINE_CHECK") or "rotate"


def secret() -> bytes | None:
    """Return the job's secret in ``PACELINE_SECRET``, or None if it is not set."""
    text = os.environ.get(SECRET, "")
    if 0 < len(text) < _SECRET_CHARACTERS:
        raise ValueError(
            f"{SECRET} has only {len(text)} characters: give {_SECRET_CHARACTERS} or "
            'more random ones, as of python -c "import secrets; '
            'print(secrets.token_hex(32))", and the same to every rank'
        )
    return os.fsencode(text) or None


def of_launcher(name: str) -> str:
    """Return a variable of launchers or torch, or "N/A" as in torch's logs."""
    return os.environ.get(name, "N/A")


def start() -> str:
    """Return a name of this start of the ranks, unlike those of earlier starts."""
    # torchrun's count differs between hosts once a rank of one host has failed.
    return agreed_start or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def nccl_host() -> str:
    """Return NCCL's identity of this host: ``NCCL_HOSTID``, or name and boot."""
    host_id = os.environ.get("NCCL_HOSTID", "")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return host_id or f"{os.uname().nodename}/{boot}"


def nccl_shares_gpus() -> bool:
    """Tell whether NCCL may run several ranks on one GPU."""
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "") == "1"


def copies_by_side_stream() -> bool:
    """Tell whether a separate stream copies inputs to a GPU, as in torch."""
    return os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
