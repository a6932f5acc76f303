"""Checks of NVIDIA's GPUs: driver, devices, kernels, NCCL, and copies between them."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline._cli.doctor import imports
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
NO_GPU = "no GPU in use"
NO_DRIVER = "no CUDA driver ("
"""What the native module says where there is no library of the driver's."""
_HIDES_ALL = ("", "-1", "NoDevFiles")

# ---- the driver ---------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """CUDA's driver, and who would use it.

    Attributes
    ----------
    version : int
        Of CUDA, as the driver serves it: 13000.
    error : str
        Why it cannot be started.
    n_cards : int
        NVIDIA's cards on the PCI bus.
    build : str
        What torch is built for; empty where it cannot be imported.
    is_named : bool
        Whether ``PACELINE_LIBCUDA`` names the library.
    visible : str or None
        The value of ``CUDA_VISIBLE_DEVICES``.
    """

    version: int = 0
    error: str = ""
    n_cards: int = 0
    build: str = ""
    is_named: bool = False
    visible: str | None = None


def look_driver(root: Path = Path("/")) -> Driver:
    """Start the driver, and count NVIDIA's cards."""
    native = imports.native()
    version, error_text = 0, ""
    try:
        version = native.driver_version(None)
    except Exception as error:
        error_text = describe(error)
    return Driver(
        version,
        error_text,
        n_cards=_count_cards(root),
        build=_torch_build(),
        is_named=bool(os.environ.get("PACELINE_LIBCUDA")),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _count_cards(root: Path) -> int:
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
    except Exception:  # the check of torch says why
        return ""
    return torch_cuda.build()


def judge_driver(driver: Driver) -> Finding:
    """Judge whether driver, cards and torch fit together."""
    is_cuda = driver.build.startswith("CUDA")
    if driver.error:
        return _judge_no_driver(driver, is_cuda)
    major, minor = driver.version // 1000, driver.version % 1000 // 10
    found = f"CUDA's driver serves CUDA {major}.{minor}"
    if not driver.build:
        return ok(found)
    if not is_cuda:
        return warning(
            f"{found}, and torch is built for {driver.build}",
            "This torch cannot use the GPUs: install one that is built for CUDA "
            f"{major} or older (https://pytorch.org/get-started).",
        )
    if _major(driver.build) > major:
        return problem(
            f"{found}, and torch is built for {driver.build}",
            "The driver is too old for this torch: install a newer driver, or a torch "
            f"that is built for CUDA {major}.",
        )
    return ok(found)


def _judge_no_driver(driver: Driver, is_cuda: bool) -> Finding:
    found = driver.error
    if driver.n_cards:
        found += f"; {count(driver.n_cards, 'NVIDIA card')} on the PCI bus"
    if driver.is_named:
        return problem(found, "PACELINE_LIBCUDA is set: mend it, or unset it.")
    has_library = NO_DRIVER not in driver.error
    if has_library and driver.visible in _HIDES_ALL:
        return warning(
            f"CUDA_VISIBLE_DEVICES={driver.visible} hides all GPUs",
            "Training is on the CPU: unset CUDA_VISIBLE_DEVICES to use the GPUs.",
        )
    if driver.n_cards and is_cuda:
        return problem(
            found,
            "There are GPUs, and none can be used. Install NVIDIA's driver, or give "
            "the container its GPUs (docker run --gpus all).",
        )
    if driver.n_cards:
        return warning(
            found, "To train on the GPUs, install NVIDIA's driver and a CUDA torch."
        )
    if has_library:
        return warning(
            found,
            "The driver is installed and sees no GPU, so training is on the CPU. If "
            "there is one, see whether `nvidia-smi` works.",
        )
    return ok("none, and no NVIDIA card: training is on the CPU")


def _major(build: str) -> int:
    number = build.rpartition(" ")[2].partition(".")[0]
    return int(number) if number.isdecimal() else 0


# ---- devices ------------------------------------------------------------------------

_OLDEST_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class Gpu:
    """A GPU as torch sees it."""

    name: str
    n_bytes: int
    capability: str


@dataclass(frozen=True)
class Gpus:
    """The GPUs that torch sees.

    Attributes
    ----------
    why_none : str
        Why none can be used.
    gpus : tuple of Gpu
    blocked : tuple of (int, int)
        Pairs of which the first cannot access the second's memory by itself.
    has_driver : bool
        Whether the driver sees a GPU, which this torch is built for.
    """

    why_none: str = ""
    gpus: tuple[Gpu, ...] = ()
    blocked: tuple[tuple[int, int], ...] = ()
    has_driver: bool = False


def look_gpus() -> Gpus:
    """Ask torch for its GPUs."""
    machine = imports.gpus().machine
    why_none = machine.why_unusable()
    if why_none:
        return Gpus(why_none, has_driver=_has_driver())
    found = []
    for index in range(machine.count()):
        name, capability = machine.properties(index)
        found.append(Gpu(name, machine.size(index)[0], capability))
    pairs = [(a, b) for a in range(len(found)) for b in range(len(found)) if a != b]
    blocked = tuple(pair for pair in pairs if not machine.can_access(*pair))
    return Gpus("", tuple(found), blocked)


def _has_driver() -> bool:
    if not _torch_build().startswith("CUDA"):
        return False
    try:
        imports.native().driver_version(None)
    except Exception:  # the check of the driver says why
        return False
    return True


def judge_gpus(gpus: Gpus) -> Finding:
    """Judge whether GPUs can be used, and access each other."""
    if gpus.has_driver and not gpus.gpus:
        return problem(
            f"CUDA's driver sees a GPU, and {gpus.why_none}",
            'See what `python -c "import torch; torch.cuda.init()"` says. On machines '
            "with NVSwitch the service nvidia-fabricmanager must run.",
        )
    if not gpus.gpus:
        return ok(gpus.why_none or "torch sees no CUDA device")
    kinds: dict[Gpu, int] = {}
    for gpu in gpus.gpus:
        kinds[gpu] = kinds.get(gpu, 0) + 1
    found = ", ".join(
        f"{n} x {gpu.name} ({size(gpu.n_bytes)}, compute capability {gpu.capability})"
        for gpu, n in kinds.items()
    )
    old = [g for g in kinds if _as_numbers(g.capability) < _OLDEST_CAPABILITY]
    if old:
        oldest = ".".join(map(str, _OLDEST_CAPABILITY))
        return warning(
            found,
            f"Paceline's kernels are tried from compute capability {oldest} on: see "
            "the check of kernels.",
        )
    n_pairs = len(gpus.gpus) * (len(gpus.gpus) - 1)
    if n_pairs == 0:
        return ok(found)
    if not gpus.blocked:
        return ok(f"{found}; all access each other's memory")
    shown = ", ".join(f"{a} to {b}" for a, b in gpus.blocked[:8])
    more = ", ..." if len(gpus.blocked) > 8 else ""
    which = "none can" if len(gpus.blocked) == n_pairs else f"not {shown}{more}"
    return ok(
        f"{found}; access to each other's memory: {which}",
        "Copies between these GPUs go through host memory, which is slower. "
        "`nvidia-smi topo -p2p r` says why; many GeForce cards cannot.",
    )


def _as_numbers(capability: str) -> tuple[int, int]:
    major, _, minor = capability.partition(".")
    return int(major), int(minor or 0)


# ---- kernels ------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """Where each GPU's kernels come from: "fatbin" or "nvrtc"; NVRTC's path."""

    sources: tuple[str, ...] = ()
    nvrtc: str | None = None
    error: str = ""


def look_kernels() -> Kernels:
    """Load or compile the kernels for every GPU."""
    gpu = imports.gpus()
    if gpu.machine.why_unusable():
        return Kernels()
    nvrtc = gpu.find_library("nvrtc")
    try:
        devices = [gpu.open_device(index) for index in range(gpu.machine.count())]
    except Exception as error:
        return Kernels(nvrtc=nvrtc, error=describe(error))
    return Kernels(tuple(device.kernels for device in devices), nvrtc)


def judge_kernels(kernels: Kernels) -> Finding:
    """Judge whether there are kernels for every GPU."""
    if kernels.error:
        nvrtc = f"NVRTC is {kernels.nvrtc}" if kernels.nvrtc else "no NVRTC was found"
        return problem(
            f"{kernels.error}; {nvrtc}",
            "Gradients on GPUs need kernels: those that nvcc built into the package, "
            "or those that torch's NVRTC compiles (pip install torch with its CUDA "
            "packages, among them nvidia-cuda-nvrtc).",
        )
    if not kernels.sources:
        return ok(f"{NO_GPU}: none are needed")
    words = {"fatbin": "built into the package", "nvrtc": "compiled by NVRTC"}
    sources = sorted({words.get(source, source) for source in kernels.sources})
    return ok(f"{' and '.join(sources)}, loaded on every GPU")


# ---- NCCL ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Nccl:
    """NCCL's version, as in 22809 (0: none is needed), or why there is none.

    `is_named` says whether ``PACELINE_LIBNCCL`` names the library.
    """

    version: int = 0
    error: str = ""
    is_named: bool = False


def look_nccl() -> Nccl:
    """Open NCCL as a step on GPUs would."""
    is_named = bool(os.environ.get("PACELINE_LIBNCCL"))
    gpu = imports.gpus()
    if gpu.machine.why_unusable() and not is_named:
        return Nccl()
    try:
        version = gpu.machine.nccl_version(gpu.find_library("nccl"))
    except Exception as error:
        return Nccl(error=describe(error), is_named=is_named)
    return Nccl(version, is_named=is_named)


def judge_nccl(nccl: Nccl) -> Finding:
    """Judge whether ranks on GPUs can reduce gradients."""
    if nccl.error:
        if nccl.is_named:
            return problem(nccl.error, "PACELINE_LIBNCCL is set: mend it, or unset it.")
        return problem(
            nccl.error,
            "DistributedDataParallel on GPUs needs NCCL: install torch with its CUDA "
            "packages, which bring it.",
        )
    if nccl.version == 0:
        return ok(f"{NO_GPU}: it is not needed")
    v = nccl.version
    base = 1000 if v < 10000 else 10000
    return ok(f"NCCL {v // base}.{v % base // 100}.{v % 100}")


# ---- copies between GPUs ------------------------------------------------------------

_N_ELEMS = 4 * MIB  # of 4 bytes
_N_ROUNDS = 2
_STALE = -1

CORRUPT = (
    "Peer-to-peer copies give wrong data, and nothing else says so: training on these "
    "GPUs gives wrong results. Boot with iommu=pt (or amd_iommu=off, intel_iommu=off), "
    "and switch off ACS for the PCIe bridges between the GPUs (in the BIOS, or by "
    "setpci). Until then train by DistributedDataParallel with NCCL_P2P_DISABLE=1, and "
    "not by DataParallel, whose copies go from GPU to GPU."
)
COPIES_HANG = (
    "Copies between GPUs hang, as they do where an IOMMU or ACS stands between them: "
    "boot with iommu=pt and switch off ACS for the PCIe bridges; NCCL_P2P_DISABLE=1 "
    "has NCCL go around them."
)


@dataclass(frozen=True)
class GpuLinks:
    """What copies of a known pattern gave.

    Attributes
    ----------
    n_gpus : int
    n_bytes : int
        Of each copy.
    wrong : tuple of (str, str, int)
        From where, to where, and how many elements were wrong.
    """

    n_gpus: int = 0
    n_bytes: int = 0
    wrong: tuple[tuple[str, str, int], ...] = ()


def look_gpu_links() -> GpuLinks:
    """Copy a pattern to each GPU, between all pairs, and back, and compare."""
    gpu = imports.gpus()
    if gpu.machine.why_unusable():
        return GpuLinks()
    n_gpus = gpu.machine.count()
    devices = [gpu.open_device(index) for index in range(n_gpus)]
    group = imports.native().DeviceGroup(devices)
    n_wrong: Counter[tuple[str, str]] = Counter()
    for round_number in range(_N_ROUNDS):
        for index in range(n_gpus):
            # Every element differs from its neighbours', and other GPUs' and rounds'.
            start = (round_number * n_gpus + index) * _N_ELEMS
            n_wrong += _copy_from(gpu.machine, group, n_gpus, index, start)
    rows = tuple((source, target, n) for (source, target), n in n_wrong.items())
    return GpuLinks(n_gpus, 4 * _N_ELEMS, rows)


def _copy_from(
    machine: Any, group: Any, n_gpus: int, index: int, start: int
) -> Counter[tuple[str, str]]:
    """Copy a pattern to a GPU, and from there to all others; count what is wrong."""
    torch = imports.torch()
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


def judge_gpu_links(links: GpuLinks) -> Finding:
    """Judge whether copies arrive as they were sent."""
    if links.n_gpus == 0:
        return ok(f"{NO_GPU}: there is nothing to copy between")
    if links.wrong:
        shown = ", ".join(f"{a} to {b} ({n} elements)" for a, b, n in links.wrong[:8])
        more = ", ..." if len(links.wrong) > 8 else ""
        return problem(f"wrong data: {shown}{more}", CORRUPT)
    if links.n_gpus == 1:
        return ok(f"{size(links.n_bytes)} from the host and back arrived right")
    return ok(
        f"{size(links.n_bytes)} from the host, between all pairs of {links.n_gpus} "
        "GPUs and back arrived right"
    )
