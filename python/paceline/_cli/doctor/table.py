"""All checks, in the order in which they are printed."""

from __future__ import annotations

from paceline._cli.doctor import gpus, links, memory, software, system
from paceline._cli.doctor.finding import Check

_GPU_SECONDS = 60.0  # the first use of eight GPUs takes tens of seconds
_BROKEN = "The extension is broken: install Paceline anew."
_BROKEN_TORCH = "Importing torch crashes or hangs: install torch anew."
_NO_DNS = "Looking up this host's name hangs: add it to /etc/hosts."
_DRIVER = "CUDA's driver crashes or hangs: see whether `nvidia-smi` works, and dmesg."

CHECKS = (
    Check("python", software.look_python, software.judge_python),
    Check(
        "extension",
        software.look_extension,
        software.judge_extension,
        is_apart=True,
        hint=_BROKEN,
    ),
    Check(
        "torch",
        software.look_torch,
        software.judge_torch,
        is_apart=True,
        seconds=120.0,  # from a network's file system
        hint=_BROKEN_TORCH,
    ),
    Check("environment", software.look_environment, software.judge_environment),
    Check("cores", system.look_cores, system.judge_cores),
    Check(
        "threads",
        software.look_threads,
        software.judge_threads,
        is_apart=True,
        seconds=120.0,
        hint=_BROKEN_TORCH,
    ),
    Check("memory", memory.look_memory, memory.judge_memory),
    Check(
        "shared_memory",
        memory.look_shared_memory,
        memory.judge_shared_memory,
        is_apart=True,
        hint="Shared memory cannot be used: see memory, limits and dmesg.",
    ),
    Check("dev_shm", memory.look_dev_shm, memory.judge_dev_shm),
    Check("limits", system.look_limits, system.judge_limits),
    Check("processes", system.look_processes, system.judge_processes),
    Check(
        "host_name",
        system.look_host_name,
        system.judge_host_name,
        is_apart=True,
        hint=_NO_DNS,
    ),
    Check("malloc", memory.look_malloc, memory.judge_malloc),
    Check("huge_pages", memory.look_huge_pages, memory.judge_huge_pages),
    Check(
        "links",
        links.look_links,
        links.judge_links,
        is_apart=True,
        seconds=links.SECONDS + 10,
        hint="Ranks on this machine would hang: see shared_memory and processes.",
    ),
    Check(
        "driver",
        gpus.look_driver,
        gpus.judge_driver,
        is_apart=True,
        seconds=_GPU_SECONDS,
        hint=_DRIVER,
    ),
    Check(
        "gpus",
        gpus.look_gpus,
        gpus.judge_gpus,
        is_apart=True,
        seconds=_GPU_SECONDS,
        hint=_DRIVER,
    ),
    Check(
        "kernels",
        gpus.look_kernels,
        gpus.judge_kernels,
        is_apart=True,
        seconds=2 * _GPU_SECONDS,
        hint=_DRIVER,
    ),
    Check(
        "nccl",
        gpus.look_nccl,
        gpus.judge_nccl,
        is_apart=True,
        hint="Opening NCCL crashes or hangs: install torch's CUDA packages anew.",
    ),
    Check(
        "gpu_links",
        gpus.look_gpu_links,
        gpus.judge_gpu_links,
        is_apart=True,
        seconds=2 * _GPU_SECONDS,
        hint=gpus.COPIES_HANG,
    ),
)
