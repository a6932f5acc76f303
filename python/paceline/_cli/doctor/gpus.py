"""Checks of NVIDIA GPUs: the driver, what a step needs, and copies between GPUs."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline._cli.doctor.finding import (
    MIB,
    Finding,
    count,
    describe,
    ok,
    problem,
    size,
    warning,
)

_NVIDIA, _DISPLAY = "0x10de", "0x03"
NO_DRIVER = "no CUDA driver ("
"""Part of the native module's message if the driver's library is missing."""
_HIDES_ALL = ("", "-1", "NoDevFiles")

# ---- the driver ---------------------------------------------------------------------


def look_driver() -> Finding:
    """Start the driver, and count NVIDIA's cards."""
    return judge_driver(
        *_driver_version(),
        n_cards=_count_cards(),
        build=_torch_build(),
        is_named=bool(os.environ.get("PACELINE_LIBCUDA")),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _driver_version() -> tuple[int, str]:
    """Start the driver; return its version, or 0 and why it cannot be started."""
    from paceline import _native

    try:
        return _native.driver_version(None), ""
    except Exception as error:
        return 0, describe(error)


def _count_cards(root: Path = Path("/")) -> int:
    n_cards = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (
                (device / name).read_text().strip() for name in ("vendor", "class")
            )
        except OSError:
            continue
        n_cards += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return n_cards


def _torch_build() -> str:
    try:
        from paceline._compat import torch_cuda
    except Exception:  # the check of torch reports why
        return ""
    return torch_cuda.build()


def judge_driver(
    version: int = 0,  # the CUDA version that the driver serves, such as 13000
    error: str = "",  # why the driver cannot be started
    n_cards: int = 0,  # NVIDIA's cards on the PCI bus
    build: str = "",  # what torch is built for; empty if it cannot be imported
    is_named: bool = False,  # PACELINE_LIBCUDA names the library
    visible: str | None = None,  # CUDA_VISIBLE_DEVICES
) -> Finding:
    """Judge whether driver, cards and torch fit together."""
    is_cuda = build.startswith("CUDA")
    if error:
        found = error
        if n_cards:
            found += f"; {count(n_cards, 'NVIDIA card')} on the PCI bus"
        has_library = NO_DRIVER not in error
        if is_named:
            return problem(found, "PACELINE_LIBCUDA is set: correct it, or unset it.")
        if has_library and visible in _HIDES_ALL:
            return warning(
                f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs",
                "Training is on the CPU: unset CUDA_VISIBLE_DEVICES to use the GPUs.",
            )
        if n_cards and is_cuda:
            return problem(
                found,
                "There are GPUs, but none can be used. Install NVIDIA's driver, or "
                "give the container its GPUs (docker run --gpus all).",
            )
        if n_cards or has_library:
            return warning(
                found,
                "Training is on the CPU. To train on GPUs, install NVIDIA's driver and "
                "a CUDA torch, and see whether `nvidia-smi` works.",
            )
        return ok("none, and no NVIDIA card: training is on the CPU")
    major, minor = version // 1000, version % 1000 // 10
    found = f"CUDA's driver serves CUDA {major}.{minor}"
    needed = build.rpartition(" ")[2].partition(".")[0]
    if not build or (is_cuda and int(needed) <= major):
        return ok(found)
    return (problem if is_cuda else warning)(
        f"{found}, and torch is built for {build}",
        f"This torch cannot use the GPUs: install one that is built for CUDA {major} "
        "or older (https://pytorch.org/get-started), or a newer driver.",
    )


# ---- devices, kernels, NCCL ---------------------------------------------------------


def look_gpus() -> Finding:
    """Ask torch for its GPUs, load the kernels for each, and open NCCL."""
    from paceline import _gpu

    machine = _gpu.machine
    libnccl = os.environ.get("PACELINE_LIBNCCL")
    why_none = machine.why_unusable()
    if why_none and not libnccl:
        has_driver = _torch_build().startswith("CUDA") and _driver_version()[0] > 0
        return judge_no_gpu(why_none, has_driver)
    n_gpus = 0 if why_none else machine.count()
    kinds: Counter[str] = Counter()
    for index in range(n_gpus):
        name, capability = machine.properties(index)
        n_bytes = size(machine.size(index)[0])
        kinds[f"{name} ({n_bytes}, compute capability {capability})"] += 1
    found = ", ".join(f"{n} x {kind}" for kind, n in kinds.items()) or why_none
    try:
        sources = {_gpu.open_device(index).kernels for index in range(n_gpus)}
    except Exception as error:
        return problem(
            f"{found}: {describe(error)}",
            "Gradients on GPUs need kernels: those that nvcc built into the package, "
            "or those that torch's NVRTC compiles (pip install torch with its CUDA "
            f"packages); NVRTC is {_gpu.find_library('nvrtc')}.",
        )
    try:
        version = machine.nccl_version(_gpu.find_library("nccl"))
    except Exception as error:
        return problem(
            f"{found}: {describe(error)}",
            "PACELINE_LIBNCCL is set: correct it, or unset it."
            if libnccl
            else "DistributedDataParallel on GPUs needs NCCL: install torch with its "
            "CUDA packages, which bring it.",
        )
    base = 1000 if version < 10000 else 10000
    nccl = f"{version // base}.{version % base // 100}.{version % 100}"
    found += f"; kernels by {' and '.join(sorted(sources)) or 'none'}; NCCL {nccl}"
    pairs = itertools.permutations(range(n_gpus), 2)
    if all(itertools.starmap(machine.can_access, pairs)):
        return ok(found)
    return ok(
        f"{found}; not all access each other's memory",
        "Copies between such GPUs go through host memory, which is slower. "
        "`nvidia-smi topo -p2p r` shows why; many GeForce cards cannot.",
    )


def judge_no_gpu(why_none: str, has_driver: bool) -> Finding:
    """Judge why torch has no GPU: a problem if the driver sees one."""
    if not has_driver:
        return ok(why_none)
    return problem(
        f"CUDA's driver sees a GPU, and {why_none}",
        'See what `python -c "import torch; torch.cuda.init()"` says. On machines with '
        "NVSwitch the service nvidia-fabricmanager must run.",
    )


# ---- copies between GPUs ------------------------------------------------------------

_N_ELEMS = 4 * MIB  # of 4 bytes
_N_ROUNDS = 2
_STALE = -1

CORRUPT = (
    "Peer-to-peer copies give wrong data, and nothing else shows it: training on these "
    "GPUs gives wrong results. Boot with iommu=pt (or amd_iommu=off, intel_iommu=off), "
    "and switch off ACS for the PCIe bridges between the GPUs (in the BIOS, or by "
    "setpci). Until then train by DistributedDataParallel with NCCL_P2P_DISABLE=1, and "
    "not by DataParallel, whose copies go from GPU to GPU."
)
COPIES_HANG = (
    "Copies between GPUs hang, as they do if an IOMMU or ACS stands between them: "
    "boot with iommu=pt and switch off ACS for the PCIe bridges; NCCL_P2P_DISABLE=1 "
    "makes NCCL avoid them."
)


def look_gpu_links() -> Finding:
    """Copy a pattern to each GPU, between all pairs, and back, and compare."""
    from paceline import _gpu, _native

    if _gpu.machine.why_unusable():
        return judge_gpu_links(0, {})
    n_gpus = _gpu.machine.count()
    devices = [_gpu.open_device(index) for index in range(n_gpus)]
    group = _native.DeviceGroup(devices)
    n_wrong: Counter[tuple[str, str]] = Counter()
    for round_number in range(_N_ROUNDS):
        for index in range(n_gpus):
            # Every element differs from its neighbours, and from other GPUs and rounds.
            start = (round_number * n_gpus + index) * _N_ELEMS
            n_wrong += _copy_from(_gpu.machine, group, n_gpus, index, start)
    return judge_gpu_links(n_gpus, n_wrong)


def _copy_from(
    machine: Any, group: Any, n_gpus: int, index: int, start: int
) -> Counter[tuple[str, str]]:
    """Copy a pattern to a GPU, and from there to all others; count what is wrong."""
    import torch

    expected = torch.arange(start, start + _N_ELEMS, dtype=torch.int32)
    source = torch.empty(_N_ELEMS, dtype=torch.int32, device=machine.device(index))
    source.copy_(expected)
    copies = [("the host", f"GPU {index}", source)]
    for target in range(n_gpus):
        if target != index:
            place = torch.full_like(source, _STALE, device=machine.device(target))
            copies.append((f"GPU {index}", f"GPU {target}", place))
            machine.synchronize()
            group.copy(group.streams(), index, [source], target, [place])
    machine.synchronize()
    n_wrong: Counter[tuple[str, str]] = Counter()
    for from_, to, found in copies:
        n_wrong[from_, to] += int((found.cpu() != expected).sum())
    return +n_wrong


def judge_gpu_links(n_gpus: int, n_wrong: Mapping[tuple[str, str], int]) -> Finding:
    """Judge whether copies arrive; `n_wrong`: wrong elements per direction."""
    if n_gpus == 0:
        return ok("no GPU in use: there is nothing to copy between")
    if n_wrong:
        rows = [f"{a} to {b} ({n} elements)" for (a, b), n in n_wrong.items()]
        more = ", ..." if len(rows) > 8 else ""
        return problem(f"wrong data: {', '.join(rows[:8])}{more}", CORRUPT)
    return ok(
        f"{size(4 * _N_ELEMS)} from the host, between all pairs of {n_gpus} GPUs and "
        "back arrived right"
    )
